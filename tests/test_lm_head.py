"""Log-probs are those of the model's own forward, in every causal family that can be built tiny."""

import copy
import warnings

import pytest
import torch
from causal_families import FAMILIES, LOOK_AHEAD, NOT_TINY, VOCAB, make_config, make_family
from character_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM

from lit_rlsched import GRPOModule
from lit_rlsched.settings import UsageError
from lit_rlsched.training import logprobs
from lit_rlsched.training.logprobs import (
    completion_logprobs,
    completion_states,
    vocabulary_logprobs,
)

PROMPTS = torch.tensor([2, 5, 1, 3])
COMPLETIONS = torch.tensor([7, 3, 0, 6])
QUICK = ["bert", "gemma2", "gpt2", "llama4_text", "modernbert-decoder", "recurrent_gemma", "xlstm"]
OTHERWISE = "does not compute its logits by applying its LM head"


@pytest.fixture
def input_ids():
    ids = torch.randint(3, VOCAB, (4, 11), generator=torch.Generator().manual_seed(0))
    return ids * (torch.arange(11) < (PROMPTS + COMPLETIONS).unsqueeze(1))


def naive(model, input_ids, temperature):
    """Token by token, from the model's own logits."""
    scores = (model(input_ids=input_ids, use_cache=False).logits / temperature).log_softmax(-1)
    logp = scores.new_zeros(4, 7)
    for row, (prompt, length) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        for column in range(length):
            at = prompt + column
            logp[row, column] = scores[row, at - 1, input_ids[row, at]]
    return logp


def check(model, input_ids):
    with torch.no_grad():
        expected = naive(model, input_ids, 0.7)
        logp, _ = completion_logprobs(model, input_ids, PROMPTS, COMPLETIONS, temperature=0.7)
    torch.testing.assert_close(logp, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("family", QUICK)
def test_values_and_gradients(family, input_ids):
    model = make_family(family)
    copied = copy.deepcopy(model)
    upstream = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    (naive(copied, input_ids, 0.7) * upstream).sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        logp, _ = completion_logprobs(
            model, input_ids, PROMPTS, COMPLETIONS, temperature=0.7, chunk_tokens=5
        )
    (logp * upstream).sum().backward()
    check(model, input_ids)
    pairs = [
        (ours.grad, theirs.grad)
        for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True)
        if theirs.grad is not None
    ]
    gap = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    assert pairs and gap <= 1e-3 * torch.stack([b.norm() for _, b in pairs]).norm()
    falls_back = any(OTHERWISE in str(w.message) for w in said)
    assert falls_back == (family in ("bert", "modernbert-decoder"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(LOOK_AHEAD)))
def test_every_family(family, input_ids):
    if family in NOT_TINY:
        pytest.skip(NOT_TINY[family])
    check(make_family(family), input_ids)


def encoder():
    config = make_config("bert")
    config.is_decoder = False
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("make", [encoder, lambda: make_family("cpmant")])
def test_a_model_that_looks_ahead_is_refused(make, input_ids):
    with pytest.raises(UsageError, match=r"looks ahead: the log-probs .* `is_decoder=True`"):
        completion_logprobs(make(), input_ids, PROMPTS, COMPLETIONS)


def test_prompt_learning_is_refused(input_ids):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make_family("gpt2"), config)
    with pytest.raises(UsageError, match=r"shape \[1, 14, 128\] for 11 tokens.*use LoRA"):
        completion_logprobs(model, input_ids[:1], PROMPTS[:1], torch.tensor([9]))


def test_a_model_is_compared_once_and_left_as_it_was(input_ids):
    model, calls = make_family("gpt2"), []
    model.register_forward_hook(lambda *_: calls.append(None))
    for part in model.modules():
        if hasattr(part, "p"):
            part.p = 0.0  # no dropout: all else that draws would show
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    for _ in range(3):
        completion_logprobs(model, input_ids, PROMPTS, COMPLETIONS)
        assert len(calls) == 2
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "modernbert-decoder"])
def test_whole_distributions(family, input_ids):
    model = make_family(family)
    states = completion_states(model, input_ids, PROMPTS, COMPLETIONS)
    logp = vocabulary_logprobs(model, states, temperature=0.7)
    targets = torch.cat(
        [input_ids[i, p : p + c] for i, (p, c) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))]
    )
    expected = naive(model, input_ids, 0.7)
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(chosen, expected[expected != 0], rtol=0, atol=2e-3)


def test_a_run_on_a_model_with_a_head_of_its_own(fit, tmp_path):
    tokenizer = make_tokenizer()
    config = make_config("modernbert-decoder")
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 512
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    module = GRPOModule(str(tmp_path / "model"), learning_rate=1e-3)
    with pytest.warns(UserWarning, match=f"`ModernBertDecoderForCausalLM` {OTHERWISE}"):
        trainer, _, _ = fit(module)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["sync/max_logp_diff"] < 1e-3
    assert logprobs._parts_differ[module.model]
