"""What the Trainer's precision does to weights, rotary tables and adapters."""

import warnings
from typing import Any, get_args

import pytest
import torch
import transformers
from causal_families import FAMILIES, LOOK_AHEAD, NOT_TINY, make_config
from lightning import LightningModule
from lightning.fabric.connector import _PRECISION_INPUT_STR
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, HalfPrecision, Precision
from plain_module import Plain
from seen_rounds import Rounds
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lit_rlsched import GRPOModule
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import add_lora, base_model
from lit_rlsched.training.policy import load_policy, named_weights
from lit_rlsched.training.precision import (
    PASSES,
    KeepsFloat32,
    check_precision,
    to_like,
)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "Llama": transformers.LlamaConfig(**SIZES),
    "Qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "Gemma3": transformers.Gemma3TextConfig(
        **SIZES, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
}


class Module(KeepsFloat32, LightningModule):
    """A user's, with the mixin."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(path)
    return str(path)


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 64, (1, 600), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def same_buffers(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = (dict(m.named_buffers()) for m in (model, other))
    assert ours.keys() == theirs.keys() and ours
    for name, buffer in theirs.items():
        assert ours[name].dtype == buffer.dtype, name
        assert torch.equal(ours[name], buffer), name


def test_a_cast_model_is_what_transformers_loads_in_bfloat16(folder):
    """Tables, and so logits at every position; the reference model too."""
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    module = GRPOModule(folder, beta=0.1)
    module.configure_model()  # in float32: no Trainer says otherwise
    HalfPrecision("bf16-true").convert_module(module)
    (reference,) = module._reference
    assert to_like(reference, next(module.parameters())) is reference
    for model in (module.model, reference):
        same_buffers(model, expected)
        assert torch.equal(logits(model), logits(expected))


def test_adapters_stay_in_float32_on_a_half_base(folder):
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    module = GRPOModule(folder, lora_rank=4)
    module.configure_model()
    HalfPrecision("bf16-true").convert_module(module)
    same_buffers(base_model(module.model), expected)
    assert torch.equal(logits(module.model), logits(expected))  # B is zero
    for name, parameter in module.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
        assert parameter.requires_grad == ("lora_" in name)


def test_other_casts_are_torchs(folder):
    module = Module(load_policy(folder))
    assert {b.dtype for b in module.double().buffers()} == {torch.float64}
    module = Module(load_policy(folder)).half()
    assert module.model.dtype == torch.float16
    same_buffers(module.model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16))
    model = load_policy(folder)
    assert to_like(model, torch.empty(0)) is model and model.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(LOOK_AHEAD) - set(NOT_TINY)))
def test_every_family_is_cast_as_transformers_would(family):
    config = make_config(family)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32)
    before = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    Module(model).to(torch.bfloat16)
    strict = expected._keep_in_fp32_modules_strict or ()
    theirs = {n: t.dtype for n, t in [*expected.named_parameters(), *expected.named_buffers()]}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kept = any(f".{part}." in f".{name}." for part in strict)
        assert tensor.dtype == (before[name].dtype if kept else theirs[name]), name
        if tensor.dtype == torch.float32:
            assert torch.equal(tensor, before[name]), name


# Whole runs.


def test_a_module_of_ones_own_is_told_of_rounded_tables(fit, tiny_model):
    with pytest.raises(UsageError, match=r"`model.rotary_emb.inv_freq` of `Qwen3ForCausalLM` was"):
        fit(Plain(tiny_model), trainer={"precision": "bf16-true"})

    class Kept(KeepsFloat32, Plain):
        """As the message says."""

    trainer, module, _ = fit(Kept(tiny_model), trainer={"precision": "bf16-true", "max_epochs": 1})
    assert module.lm.model.rotary_emb.inv_freq.dtype == torch.float32
    assert trainer.global_step == 1


@pytest.mark.mostly_slow("bf16-mixed-4-True", "bf16-true-0-True")
@pytest.mark.parametrize(
    ("precision", "lora_rank", "half"),
    [
        ("32-true", 0, False),
        ("32-true", 4, False),
        ("bf16-mixed", 0, False),
        ("bf16-mixed", 4, True),
        ("bf16-true", 0, True),
        ("bf16-true", 4, True),
    ],
)
def test_what_is_held_in_which_precision(fit, tiny_model, precision, lora_rank, half):
    """And who is warned: only whoever trains weights in half precision."""
    module = GRPOModule(tiny_model, lora_rank=lora_rank, learning_rate=1e-2)
    before: dict[str, Tensor] = {}

    class Trained(GRPOModule):
        def on_train_start(self) -> None:
            before.update({n: p.detach().clone() for n, p in self.named_parameters()})

    module.__class__ = Trained
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer, _, _ = fit(module, trainer={"precision": precision, "max_epochs": 1})
    base = next(base_model(module.model).parameters())
    assert base.dtype == (torch.bfloat16 if half else torch.float32)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    in_half = {p.dtype for p in trained.values()} == {torch.bfloat16}
    assert in_half == (precision == "bf16-true" and not lora_rank)
    assert in_half == any("in which most updates" in str(w.message) for w in said)
    assert any(not torch.equal(p, before[n]) for n, p in trained.items())
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, before[n]) for n, p in frozen.items())
    assert torch.isfinite(trainer.callback_metrics["loss"])


def test_adapters_are_merged_in_float32(tiny_model):
    base = load_policy(tiny_model, dtype=torch.bfloat16)
    exact = {n: p.detach().double() for n, p in base.named_parameters()}
    policy = add_lora(base, 4, 32, "all-linear")
    layers = {
        n.removeprefix("base_model.model."): m
        for n, m in policy.named_modules()
        if hasattr(m, "get_delta_weight")
    }
    for layer in layers.values():
        nn.init.normal_(layer.lora_B["default"].weight, std=1e-3)
    for name, weight in named_weights(policy):
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            assert weight.dtype == torch.bfloat16
            continue
        a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
        merged = exact[name] + b @ a * layer.scaling["default"]
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight.double(), merged, rtol=1e-6, atol=1e-7)


# The engine's precision.


def test_every_precision_is_one_of_an_engine_or_is_refused():
    """None falls back to another one in silence."""
    lightnings = set(get_args(_PRECISION_INPUT_STR))
    refused = {"transformer-engine", "transformer-engine-float16"}
    assert lightnings == PASSES.keys() | refused
    for precision in lightnings:
        plugin = Precision()
        plugin.precision = precision
        if precision not in refused:
            check_precision(plugin)
            continue
        with pytest.raises(UsageError, match=f"`precision={precision}` trains in a precision that"):
            check_precision(plugin)
    quantises = object.__new__(BitsandbytesPrecision)  # which bitsandbytes would make
    with pytest.raises(UsageError, match="`BitsandbytesPrecision` trains in a precision that no"):
        check_precision(quantises)


@pytest.mark.parametrize("engines", ["process", "two"])
def test_an_engine_of_its_own_decodes_in_float64_where_the_trainer_does(fit, exact_model, engines):
    runs = []
    for kind in ("trainer", engines):
        engine = ProcessEngine(TransformersEngine()) if kind == "process" else TransformersEngine()
        seen, module = Rounds(), GRPOModule(exact_model, learning_rate=1e-3)
        trainer, _, data = fit(
            module,
            [seen],
            engine=engine,
            num_engines=2 if kind == "two" else 1,
            trainer={"precision": "64-true", "max_epochs": 3},
        )
        assert trainer.callback_metrics["sync/max_logp_diff"] < 1e-12
        assert trainer.callback_metrics["sampling/sampling_logp_difference/max"] < 1e-12
        assert data.run.startup.spec.dtype == data.run.settings.engine.cache_dtype(
            data.run.startup.spec
        )
        runs.append([c for round in seen.rounds for c in round.completions])
    for ours, theirs in zip(*runs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [*ours.logprobs] == pytest.approx([*theirs.logprobs], rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("precision", "engine", "told"),
    [
        ("32-true", TransformersEngine(), False),
        ("bf16-mixed", TransformersEngine(), True),
        ("bf16-mixed", ProcessEngine(TransformersEngine()), False),
    ],
)
def test_two_precisions_are_said(fit, precision, engine, told):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, _, data = fit(engine=engine, trainer={"precision": precision, "max_epochs": 1})
    texts = [str(w.message) for w in said if " decodes in torch.float" in str(w.message)]
    assert len(texts) == told
    assert not told or "`precision=bf16-mixed` computes in torch.bfloat16" in texts[0]
    theirs = data.run.settings.engine.cache_dtype(data.run.startup.spec)
    assert (theirs != data.run.startup.spec.dtype) == told
