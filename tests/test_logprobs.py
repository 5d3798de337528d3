"""Log-probs are those of the model's own forward, in every causal family that can be built tiny."""

import copy
from typing import Any

import pytest
import torch
import transformers
from causal_families import (
    FAMILIES,
    HEADS_OF_LAYERS,
    LOOK_AHEAD,
    NOT_TINY,
    make_config,
    make_family,
)
from causal_families import VOCAB as FEW
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lit_rlsched.cli.estimate import LiveBytes
from lit_rlsched.settings import UsageError
from lit_rlsched.training import logprobs
from lit_rlsched.training.logprobs import (
    completion_logprobs,
    completion_mask,
    completion_states,
    vocabulary_logprobs,
)

VOCAB = 512
PROMPTS = torch.tensor([2, 5, 1, 3])
COMPLETIONS = torch.tensor([7, 3, 0, 6])
QUICK = ["gemma2", "gpt2", "llama4_text", "recurrent_gemma", "xlstm"]
SPECIAL: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Llama": {},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 0.3, "sliding_window": 4},
    "Cohere": {"logit_scale": 3.0},
    "Granite": {"logits_scaling": 0.2},
    "HyperCLOVAX": {"logits_scaling": 4.0},
}


def make_model(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SPECIAL[family],
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


def with_lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


@pytest.fixture
def input_ids() -> Tensor:
    ids = torch.randint(3, FEW, (4, 11), generator=torch.Generator().manual_seed(0))
    used = PROMPTS + COMPLETIONS
    return ids * (torch.arange(11) < used.unsqueeze(1))


def score(model: nn.Module, input_ids: Tensor, **settings: Any) -> tuple[Tensor, Tensor | None]:
    return completion_logprobs(model, input_ids, PROMPTS, COMPLETIONS, **settings)


def naive(model: nn.Module, input_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Token by token, from the full logits."""
    scores = (model(input_ids=input_ids, use_cache=False).logits / temperature).log_softmax(-1)
    logp = scores.new_zeros(4, 7)
    entropy = scores.new_zeros(4, 7)
    for row, (prompt, length) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        for column in range(length):
            position = prompt + column
            distribution = scores[row, position - 1]
            logp[row, column] = distribution[input_ids[row, position]]
            entropy[row, column] = -(distribution.exp() * distribution).sum().detach()
    return logp, entropy


def check_against_naive(model: nn.Module, input_ids: Tensor, chunk_tokens: int | None) -> None:
    upstream = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    copied = copy.deepcopy(model)
    expected, expected_entropy = naive(copied, input_ids, 0.7)
    (expected * upstream).sum().backward()
    logp, entropy = score(
        model, input_ids, temperature=0.7, entropy=True, chunk_tokens=chunk_tokens
    )
    (logp * upstream).sum().backward()

    assert entropy is not None and not entropy.requires_grad
    torch.testing.assert_close(logp, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-10, atol=1e-12)
    trained = 0
    for (name, ours), theirs in zip(model.named_parameters(), copied.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11, msg=name)
            trained += 1
    assert trained > 0


@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 16])
@pytest.mark.parametrize("family", SPECIAL)
def test_values_and_gradients(family: str, chunk_tokens: int | None, input_ids: Tensor) -> None:
    check_against_naive(make_model(family), input_ids, chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma2"])
def test_lora(family: str, chunk_tokens: int | None, input_ids: Tensor) -> None:
    model = with_lora(make_model(family))
    check_against_naive(model, input_ids, chunk_tokens)
    adapted, _ = score(model, input_ids)
    with model.disable_adapter():
        base, _ = score(model, input_ids)
    assert (adapted - base).abs().max() > 1e-3


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave out, forward and backward."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_no_logits_of_the_whole_batch(input_ids: Tensor) -> None:
    model, whole = make_model("Qwen3"), input_ids.numel() * VOCAB
    with LargestTensor() as largest:
        naive(model, input_ids, 1.0)[0].sum().backward()
    assert largest.numel >= whole
    model.zero_grad()
    with LargestTensor() as largest:
        score(model, input_ids, entropy=True, chunk_tokens=3)[0].sum().backward()
    # The largest things left are the embedding matrix and its gradient.
    assert largest.numel == VOCAB * 16 < whole / 2


def test_logits_are_not_kept_for_backward(input_ids: Tensor) -> None:
    model, kept = make_model("Llama"), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    for chunk_tokens, expected in ((5, False), (16, True)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            score(model, input_ids, chunk_tokens=chunk_tokens)
        assert any(shape[1:] == (VOCAB,) and shape[0] < VOCAB for shape in kept) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_autograds_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, VOCAB, dtype=dtype, generator=generator) * 5
    targets = torch.randint(VOCAB, (50,), generator=generator)
    upstream = torch.randn(50, dtype=dtype, generator=generator)
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    logp, entropy = logprobs._score(lambda states: states, True, ours, targets)
    (logp * upstream).sum().backward()
    expected = theirs.gather(-1, targets[:, None]).squeeze(-1) - theirs.logsumexp(-1)
    (expected * upstream).sum().backward()
    assert torch.equal(logp, expected) and torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(entropy, rows.logsumexp(-1) - (rows.softmax(-1) * rows).sum(-1))


def test_a_chunk_takes_one_temporary_beside_its_logits() -> None:
    head = nn.Linear(16, VOCAB, bias=False)
    states = torch.randn(200, 16, requires_grad=True)
    targets = torch.zeros(200, dtype=torch.long)
    with LiveBytes() as live:
        logp, _ = logprobs._score(head, True, states, targets)
        logp.sum().backward()
    assert live.peak < 2.2 * 4 * 200 * VOCAB


def test_default_chunk_follows_the_vocabulary(
    input_ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = make_model("Llama"), []
    score(model, input_ids)  # the first call compares the head with the model's own forward
    model.lm_head.register_forward_hook(lambda *call: rows.append(call[2].shape[0]))
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", 6 * 4 * VOCAB)
    with torch.no_grad():
        score(model, input_ids)
    assert rows == [6, 6, 4]


def test_padding_is_not_read(input_ids: Tensor) -> None:
    model = make_model("Qwen3")
    clean, _ = score(model, input_ids)
    used = torch.arange(input_ids.shape[1]) < (PROMPTS + COMPLETIONS).unsqueeze(1)
    dirty, _ = score(model, input_ids.masked_fill(~used, 77))
    torch.testing.assert_close(clean, dirty, rtol=0, atol=0)
    assert (clean[~completion_mask(COMPLETIONS)] == 0).all()


def test_half_precision_gives_fp32(input_ids: Tensor) -> None:
    logp, entropy = score(make_model("Qwen3").bfloat16(), input_ids, entropy=True)
    assert entropy is not None
    assert logp.dtype == entropy.dtype == torch.float32


def test_only_empty_completions_still_have_a_graph(input_ids: Tensor) -> None:
    model = make_model("Qwen3")
    logp, entropy = completion_logprobs(
        model, input_ids, PROMPTS, torch.zeros(4, dtype=torch.long), entropy=True
    )
    assert logp.shape == (4, 0) and entropy is not None and entropy.shape == (4, 0)
    logp.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().max() == 0


def test_completion_mask() -> None:
    assert completion_mask(torch.tensor([2, 0, 3])).int().tolist() == [
        [1, 1, 0],
        [0, 0, 0],
        [1, 1, 1],
    ]


def test_refusals(input_ids: Tensor) -> None:
    model, lengths = make_model("Llama"), COMPLETIONS
    with pytest.raises(UsageError, match="Put the BOS or EOS token in front"):
        completion_logprobs(model, input_ids, PROMPTS - 1, lengths)
    with pytest.raises(UsageError, match=r"reaches 12, past the 11 columns"):
        completion_logprobs(model, input_ids, PROMPTS + 3, lengths)
    with pytest.raises(UsageError, match="`LlamaModel` has no LM head"):
        completion_logprobs(model.model, input_ids, PROMPTS, lengths)


# Families of other layouts, and the comparison with a model's own forward.


def check(model, input_ids):
    with torch.no_grad():
        expected = naive(model, input_ids, 0.7)[0]
        logp, _ = completion_logprobs(model, input_ids, PROMPTS, COMPLETIONS, temperature=0.7)
    torch.testing.assert_close(logp, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("family", QUICK)
def test_values_and_gradients_of_other_families(family, input_ids):
    model = make_family(family)
    copied = copy.deepcopy(model)
    upstream = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    (naive(copied, input_ids, 0.7)[0] * upstream).sum().backward()
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", sorted(set(FAMILIES) - {*LOOK_AHEAD, *NOT_TINY, *HEADS_OF_LAYERS})
)
def test_every_family(family, input_ids):
    check(make_family(family), input_ids)


@pytest.mark.parametrize("family", ["bert", "modernbert-decoder"])
def test_a_head_of_more_than_one_layer_is_refused(family, input_ids):
    with pytest.raises(UsageError, match="does not compute its logits by applying its LM head"):
        completion_logprobs(make_family(family), input_ids, PROMPTS, COMPLETIONS)


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
def test_whole_distributions(input_ids):
    model = make_family("gpt2")
    states = completion_states(model, input_ids, PROMPTS, COMPLETIONS)
    logp = vocabulary_logprobs(model, states, temperature=0.7)
    targets = torch.cat(
        [input_ids[i, p : p + c] for i, (p, c) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))]
    )
    expected = naive(model, input_ids, 0.7)[0]
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(chosen, expected[expected != 0], rtol=0, atol=2e-3)
