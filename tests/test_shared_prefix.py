import copy
from typing import Any

import pytest
import torch
import transformers
from causal_families import FAMILIES, HEADS_OF_LAYERS, LOOK_AHEAD, NOT_TINY, make_family
from lightning import Callback, seed_everything
from seen_rounds import vector
from torch import Tensor, nn

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.settings import UsageError
from lit_rlsched.training import shared_prefix
from lit_rlsched.training.logprobs import completion_logprobs, completion_mask
from lit_rlsched.training.losses import policy_loss
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep, RowCost, Trained
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

VOCAB = 128
ALWAYS = RowCost(position=1.0, causal=0.0, masked=0.0)
GROUPS = (
    (40, (7, 12, 0, 9)),
    (3, (5,)),
    (25, (1, 6, 6)),
    (30, (2, 8)),
    (50, (4, 6, 2)),
    (52, (3, 8)),
)
"""A prompt's length and its completions'."""
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8, "intermediate_size": 24},
    "Llama": {"intermediate_size": 24},
    "GPTNeoX": {"intermediate_size": 24},
    "GPT2": {},
}
EXACT = {"GPT2", "GPTNeoX"}
"""The others' norms compute in fp32 whatever the weights are."""


def make_model(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **SHAPES.get(family, {}),
            **settings,
        }
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def make_rows(groups: Any = GROUPS, vocab: int = VOCAB) -> list[Sample]:
    g = torch.Generator().manual_seed(1)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, vocab, (n,), generator=g).tolist()

    rows = []
    for i, (prompt, completions) in enumerate(groups):
        group = Group(str(i), Prompt(str(i), "x", tuple(tokens(prompt))), Sampling(64, 0.7), [])
        for j, length in enumerate(completions):
            drawn = Completion(j, tokens(length), [-3.0] * length, [], "stop")
            drawn.advantage = (-1.0) ** j * (0.5 + j)
            rows.append(Sample(group, drawn))
    return rows


def forward(model: nn.Module, batch: MicroBatch, **settings: Any) -> tuple[Tensor, Tensor | None]:
    return completion_logprobs(model, **batch.logprob_inputs, **settings)


def update(model: nn.Module, step: OptimizerStep) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """Log-probs and entropies of each completion, the loss, the gradients; as a module does it."""
    model.zero_grad()
    total = torch.zeros(())
    seen = {}
    for rows, batch in zip(step.micro_batches, step, strict=True):
        logp, entropy = forward(model, batch, entropy=True)
        assert entropy is not None
        loss = policy_loss(
            logp,
            batch.advantages,
            batch.completion_mask,
            step_sequences=batch.step_sequences,
            step_tokens=batch.step_tokens,
            rollout_logp=batch.rollout_logp,
            importance_sampling_mode="token_truncate",
        ).loss
        loss.backward()
        total = total + loss.detach()
        inside = completion_mask(batch.completion_lengths)
        for row, a, b, mask in zip(rows, logp, entropy, inside, strict=True):
            seen[id(row)] = torch.stack([a[mask].detach(), b[mask]])
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return seen, total, torch.cat(grads)


def check_equal(model: nn.Module, rows: list[Sample], exact: float, gradient: float) -> None:
    """Shared and repeated prompts give the same; both differ from another order of completions."""
    copied = copy.deepcopy(model)
    plain, loss, grads = update(copied, OptimizerStep(rows, 200))
    shared, shared_loss, shared_grads = update(model, OptimizerStep(rows, 200, row_cost=ALWAYS))
    assert plain.keys() == shared.keys()
    for key, values in plain.items():
        torch.testing.assert_close(shared[key], values, rtol=0, atol=exact)
    torch.testing.assert_close(shared_loss, loss, rtol=0, atol=exact)
    assert grads.norm() > 1e-3
    assert (shared_grads - grads).norm() <= gradient * grads.norm()


def test_the_cases_are_of_all_kinds() -> None:
    batches = list(OptimizerStep(make_rows(), 200, row_cost=ALWAYS))
    assert {b.completion_rows is None for b in batches} == {True, False}
    assert any(b.input_ids.shape[0] > 1 for b in batches)
    assert any(bool((b.input_ids == 0).any()) for b in batches)  # padding
    assert (
        sum(b.input_ids.numel() for b in batches)
        < OptimizerStep(make_rows(), 200).padding().positions
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SHAPES)
def test_equal_in_fp64(family: str, attention: str) -> None:
    model = make_model(family, attn_implementation=attention)
    # eager attention takes its softmax in fp32
    tolerance = 1e-12 if family in EXACT and attention == "sdpa" else 2e-6
    check_equal(model, make_rows(), tolerance, tolerance)


def test_gradient_checkpointing() -> None:
    model = make_model("GPTNeoX")
    model.gradient_checkpointing_enable()
    model.train()
    check_equal(model, make_rows(), 1e-12, 1e-12)


@pytest.mark.parametrize("family", ["Qwen3", "GPTNeoX"])
def test_lora(family: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    model = peft.get_peft_model(make_model(family), config).double()
    assert shared_prefix.obstacle(model) is None
    check_equal(model, make_rows(), *((1e-12, 1e-12) if family in EXACT else (1e-7, 1e-7)))


def test_some_completions_are_left_out() -> None:
    rows = make_rows()
    rows[1].completion.dropped = "nonfinite_logprob"
    rows[6].completion.finish_reason = "length"
    rows[3].completion.advantage = 0.0
    trained = Trained(mask_truncated=True, skip_zero_advantage=True)
    model = make_model("GPT2")
    _, loss, grads = update(copy.deepcopy(model), OptimizerStep(rows, 200, trained))
    step = OptimizerStep(rows, 200, trained, row_cost=ALWAYS)
    _, shared_loss, shared_grads = update(model, step)
    torch.testing.assert_close(shared_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(shared_grads, grads, rtol=0, atol=1e-12)


def test_a_prompt_goes_through_the_model_once() -> None:
    model, rows = make_model("Qwen3"), make_rows(((40, (7, 9, 12)),))
    update(model, OptimizerStep(rows, 200))  # compares its head with its own forward, once
    positions: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: positions.append(args[0].numel())
    )
    for cost, expected in ((None, 47 + 49 + 52), (ALWAYS, 40 + 7 + 9 + 12)):
        positions.clear()
        step = OptimizerStep(rows, 200, row_cost=cost)
        update(model, step)
        assert sum(positions) == step.padding().positions == expected


def test_rows_that_nobody_shares_are_as_ever() -> None:
    """Bit for bit: no mask and no positions are passed."""
    model, batch = make_model("Qwen3"), next(iter(OptimizerStep(make_rows(), 1000)))
    before, after = forward(model, batch)[0], None
    batch.completion_rows = torch.arange(len(batch.prompt_lengths))
    after = forward(model, batch)[0]
    torch.testing.assert_close(before, after, rtol=0, atol=1e-7)
    batch.completion_rows = None
    called = {}
    model.model.register_forward_pre_hook(lambda m, a, kw: called.update(kw), with_kwargs=True)
    assert torch.equal(forward(model, batch)[0], before)
    assert called.keys() == {"input_ids", "use_cache"}


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("Mistral", {"sliding_window": 32}, "window of 32 tokens"),
        ("Mistral", {"sliding_window": 64}, None),
        ("Mistral", {"sliding_window": None}, None),
        ("Gemma2", {"head_dim": 8, "sliding_window": 8}, "sliding_attention"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention"),
        ("Qwen2", {}, None),
        ("GPT2", {}, "no rotary embeddings"),
        ("Bloom", {}, "no `position_ids`"),
        ("Falcon", {"alibi": True}, "no `position_ids`"),
        ("Mamba", {}, "linear_attention"),
    ],
)
def test_what_a_config_shows(family: str, settings: dict[str, Any], why: str | None) -> None:
    found = shared_prefix.obstacle(make_model(family, **settings))
    if why is None:
        assert found is None
    else:
        assert found is not None and why in found


def test_a_model_of_other_code_repeats_prompts() -> None:
    model = make_model("Qwen3")
    model.__class__ = type("Other", (type(model),), {"__module__": "modeling_other"})
    assert shared_prefix.obstacle(model) == "its code is not part of transformers"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", sorted(set(FAMILIES) - {*LOOK_AHEAD, *NOT_TINY, *HEADS_OF_LAYERS})
)
def test_every_family_that_shares_prompts_gets_them_right(family: str) -> None:
    model = make_family(family)
    if shared_prefix.obstacle(model) is None:
        with torch.no_grad():  # no token is so unlikely that it has no gradient
            model.get_output_embeddings().weight.div_(10)
        check_equal(model, make_rows(((40, (7, 12, 9)),)), 1e-3, 1e-3)


def test_what_a_row_costs() -> None:
    model = make_model("Qwen3")
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    cost = shared_prefix.row_cost(model)
    assert cost.position == 2 * (3 * layer + 16)  # and the last norm
    assert cost.masked == 2 * cost.causal == pytest.approx(1.4 * 4 * 3 * 2 * 8)
    experts = make_model("Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=1)
    used = sum(
        p.numel() / (4 if ".experts." in name else 1)
        for name, p in experts.model.named_parameters()
    )
    assert shared_prefix.row_cost(experts).position == 2 * (used - VOCAB * 16)


# In a run.

LONG = [
    {"prompt": f"{'abcdefghij' * 12}{a}+{b}=", "answer": str(a + b)}
    for a in range(6)
    for b in range(6)
]
RUN: dict[str, Any] = {"train_data": LONG, "micro_batch_tokens": 1024}


class Steps(Callback):
    """Positions of each optimizer step and how many of its micro-batches share prompts."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.shared: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.positions.append(batch.padding().positions)
        self.shared.append(sum(b.completion_rows is not None for b in batch))


@pytest.mark.mostly_slow("GRPOModule-settings0-data0")
@pytest.mark.parametrize(
    ("make", "settings", "data"),
    [
        (GRPOModule, {}, {}),
        (GRPOModule, {"beta": 0.1}, {"steps_per_round": 2, "num_iterations": 2}),
        (GRPOModule, {"lora_rank": 2, "gradient_checkpointing": True}, {}),
        (RLOOModule, {"beta": 0.05}, {}),
    ],
)
def test_the_same_weights_shared_and_repeated(
    fit: Any, tiny_model: str, make: Any, settings: dict[str, Any], data: dict[str, Any]
) -> None:
    trained, steps = [], []
    for shared in (None, False):
        counted = Steps()
        seed_everything(0)  # of the adapters
        module = make(tiny_model, learning_rate=1e-3, shared_prefix=shared, **settings)
        double = {"max_epochs": 3, "precision": "64-true"}
        trainer, module, _ = fit(module, [counted], trainer=double, **RUN, **data)
        trained.append(vector(module))
        steps.append(counted)
        if not data:  # one step, which is the round
            assert trainer.callback_metrics["batch/positions"] == counted.positions[-1]
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=1e-6)
    assert all(steps[0].shared) and not any(steps[1].shared)
    assert sum(steps[0].positions) < 0.5 * sum(steps[1].positions)


def test_short_prompts_are_not_shared(fit: Any) -> None:
    steps = Steps()
    fit(callbacks=[steps])
    assert not any(steps.shared)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_in_bf16(fit: Any, tiny_model: str, precision: str) -> None:
    steps = Steps()
    trainer, _, _ = fit(
        GRPOModule(tiny_model, learning_rate=1e-3), [steps], trainer={"precision": precision}, **RUN
    )
    assert all(steps.shared) and torch.isfinite(trainer.callback_metrics["loss"])


def test_what_cannot_share_is_refused_where_sharing_was_asked_for(
    fit: Any, tiny_model: str, tmp_path: Any
) -> None:
    model = make_model("Mistral", torch.float32, sliding_window=32)
    model.save_pretrained(tmp_path / "window")
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "window")
    with pytest.raises(UsageError, match=r"`MistralForCausalLM` cannot share a prompt.*32 tokens"):
        fit(GRPOModule(str(tmp_path / "window"), shared_prefix=True))
    module = GRPOModule(str(tmp_path / "window"))
    module.configure_model()
    assert module.row_cost() is None
    GRPOModule(tiny_model, shared_prefix=True).configure_model()
