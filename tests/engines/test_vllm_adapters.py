"""LoRA adapters in vLLM's slot: the policy's log-probs, and what the slot cannot hold."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from lora_policy import with_lora
from transformers import AutoConfig, AutoModelForCausalLM

from lit_rlsched import GRPOModule
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines._vllm_args import LORA_RANKS, engine_args
from lit_rlsched.engines._vllm_guest import naming_settings
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import AdapterSpec, EngineSpec, Sizes
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import adapter_spec, load_policy, named_adapters
from lit_rlsched.training.weight_sync import PolicyReader, WeightSync
from lit_rlsched.types import Completion, Prompt, Request, Sampling

peft = pytest.importorskip("peft")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

PROMPTS = [Prompt(str(i), "", (5, 14, 6, 18, 33 + i)) for i in range(2)]
TOKENS = 40


class Synced:
    """An engine with the adapters of a policy, and the difference of its log-probs."""

    def __init__(self, model, policy, engine=None, dtype=torch.float32):
        self.engine = engine or VLLMEngine(enable_lora=True)
        self.spec = EngineSpec(model, 4, 128, (), dtype, adapters=adapter_spec(policy))
        self.sync = WeightSync(self.engine, self.spec, policy, probe=PROMPTS)
        self.versions = 0

    def __enter__(self):
        self.engine.start(self.spec)
        return self

    def __exit__(self, *_):
        self.engine.close()

    def load(self, policy):
        self.versions += 1
        self.engine.sync_weights(named_adapters(policy), self.versions)

    def gap(self, policy):
        drawn = self.sync._draw(self.engine, self.versions, TOKENS)
        theirs = WeightSync(self.engine, self.spec, policy, probe=PROMPTS)
        return theirs._gap(drawn).mean().item()


@needs_vllm
def test_the_engine_decodes_with_the_adapters_of_the_last_sync(tiny_model, tiny_policy):
    policy, other = with_lora(tiny_model), with_lora(tiny_model, seed=1)
    with Synced(tiny_model, policy) as synced:
        assert synced.gap(tiny_policy) < 1e-5, "the base model before the first sync"
        for trained, old in ((policy, tiny_policy), (other, policy), (policy, other)):
            synced.load(trained)
            assert synced.gap(trained) < 1e-5
            assert synced.gap(old) > 1e-2, "prefixes, noise and adapters are the new ones"

        request = Request("r", PROMPTS[0].token_ids, 0, Sampling(TOKENS))
        whole = draw(synced.engine, request)
        parts = draw(synced.engine, replace(request, pause_at=9))
        parts += draw(synced.engine, replace(request, prefix_ids=tuple(parts)))
        assert parts == whole

        lost = [(name.replace("layers.1", "layers.7"), t) for name, t in named_adapters(other)]
        with pytest.raises(UsageError, match=r"no LoRA slot for 7 layers .* `model\.layers\.7\."):
            synced.engine.sync_weights(lost, 9)

        assert synced.sync(9)["sync/max_logp_diff"] < 1e-4
        with torch.no_grad():
            policy.get_submodule("model.model.layers.1.mlp.down_proj").lora_B["default"].weight *= 2
        with pytest.raises(RuntimeError, match="does not decode with the weights that are trained"):
            synced.sync.check(10)


def draw(engine, request):
    drawn = Completion(0)
    engine.submit([request])
    while drawn.finish_reason is None:
        for event in engine.step():
            drawn.take(event, 0)
    return [*drawn.token_ids]


@pytest.fixture(scope="module")
def families(tmp_path_factory, tiny_model):
    """Other models of the same sizes: layers with biases, an untied head, two heads of keys."""

    def make(family):
        tiny = AutoConfig.from_pretrained(tiny_model)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        names += ("num_attention_heads", "max_position_embeddings", "initializer_range")
        config = AutoConfig.for_model(
            family,
            **{name: getattr(tiny, name) for name in names},
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
        folder = tmp_path_factory.mktemp(family)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter)
            model.save_pretrained(folder)
        return str(folder)

    return make


CASES = {
    "qwen2, rslora": ("qwen2", {"use_rslora": True}, torch.float32, {}),
    "llama, some layers, several ranks": (
        "llama",
        {
            "target_modules": r".*layers\.1\.self_attn\.(q|o)_proj|.*layers\.0\.mlp\.up_proj",
            "rank_pattern": {"o_proj": 9},
            "alpha_pattern": {"up_proj": 1},
        },
        torch.float32,
        {},
    ),
    "llama, LM head": ("llama", {"target_modules": ["q_proj", "lm_head"]}, torch.float32, {}),
    "qwen2, split": ("qwen2", {}, torch.float32, {"tensor_parallel_size": 2}),
    "llama, bfloat16": ("llama", {}, torch.bfloat16, {}),
}


@needs_vllm
@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("family", "lora", "dtype", "settings"), CASES.values(), ids=CASES)
def test_other_families_and_adapters(families, family, lora, dtype, settings):
    model = families(family)
    policy, base = with_lora(model, dtype, **lora), load_policy(model, dtype)
    with Synced(model, policy, VLLMEngine(enable_lora=True, **settings), dtype) as synced:
        synced.load(policy)
        gap = synced.gap(policy)
        assert gap < (1e-5 if dtype == torch.float32 else 0.05)
        assert synced.gap(base) > max(1e-2, 3 * gap)


ENGINES = {
    "in a process": lambda: ProcessEngine(VLLMEngine(enable_lora=True)),
    "two engines": lambda: EnginePool.of(VLLMEngine(enable_lora=True), 2),
}


@needs_vllm
@pytest.mark.slow
def test_a_run_is_that_with_merged_weights(fit, tiny_model, sums, tmp_path):
    """In this process, in another, with two engines, and stopped and resumed."""

    def run(engine, epochs=3, **more):
        torch.manual_seed(0)  # of the adapters
        module = GRPOModule(tiny_model, learning_rate=1e-2, lora_rank=4, lora_alpha=6)
        trainer, module, _ = fit(
            module,
            engine=engine,
            trainer={"max_epochs": epochs},
            max_completion_length=12,
            val_data=sums[80:84],
            **more,
        )
        weights = torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])
        return trainer, weights

    merged, expected = run(VLLMEngine())
    trainer, weights = run(VLLMEngine(enable_lora=True), epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, weights = run(VLLMEngine(enable_lora=True), ckpt_path=tmp_path / "two.ckpt")
    runs = [(resumed, weights), *(run(make()) for make in ENGINES.values())]
    for trainer, weights in runs:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)
        assert trainer.callback_metrics["sync/max_logp_diff"] < 1e-4
        assert trainer.callback_metrics["val/reward"] == merged.callback_metrics["val/reward"]


def test_weights_that_are_not_sent_are_not_checked(tiny_model):
    policy = with_lora(tiny_model)
    with torch.no_grad():
        next(policy.parameters())[0] = torch.nan
    sent = dict(PolicyReader(policy, enable_lora=True).weights())
    assert len(sent) == 2 * 7 * 2 and all("lora_" in name for name in sent)
    with torch.no_grad():
        policy.get_submodule("model.model.layers.1.mlp.up_proj").lora_A["default"].weight[0] = (
            torch.inf
        )
    with pytest.raises(FloatingPointError, match=r"1 tensors.*up_proj\.lora_A"):
        PolicyReader(policy, enable_lora=True).weights()


REFUSED = {
    "DoRA": ({"use_dora": True}, "proj` has an adapter of type `DoraLinearVariant`"),
    "biases": ({"lora_bias": True}, r"lora_B.default.bias` is trained too"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"lm_head.* is trained too"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "embed_tokens` has an adapter of type `Em"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'` changes the base"),
}


@pytest.mark.parametrize(("lora", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_slot_cannot_hold_is_refused(tiny_model_untied, lora, message):
    policy = with_lora(tiny_model_untied, **lora)
    with pytest.raises(UsageError, match=f"`enable_lora=True`.*{message}.*Leave `enable_lora` out"):
        adapter_spec(policy)


def test_several_active_adapters_are_refused(tiny_model):
    policy = with_lora(tiny_model)
    policy.add_adapter("other", peft.LoraConfig(target_modules="all-linear"))
    assert adapter_spec(policy).rank == 4, "the other one is not active"
    policy.base_model.set_adapter(["default", "other"])
    with pytest.raises(UsageError, match="q_proj` has 2 active adapters"):
        adapter_spec(policy)


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (32, 32), (257, 320), (512, 512)])
def test_the_slot_is_of_a_rank_that_vllm_has(tiny_model, rank, slot):
    spec = EngineSpec(tiny_model, 2, 64, (), adapters=AdapterSpec(rank, ("q_proj",), 100))
    args = engine_args(VLLMEngine(enable_lora=True), spec)
    assert args["enable_lora"] and args["max_lora_rank"] == slot in LORA_RANKS
    assert args["lora_target_modules"] == ["q_proj"]
    assert "enable_lora" not in engine_args(VLLMEngine(), replace(spec, adapters=None))


def test_adapters_are_counted_in_place_of_what_is_handed_over(tiny_model):
    adapters = AdapterSpec(4, ("q_proj",), 1000)
    spec = EngineSpec(tiny_model, 2, 64, (), torch.bfloat16, adapters=adapters)
    sizes, engine = Sizes(50_000, 512, 1 << 30), VLLMEngine(enable_lora=True)
    on_cpu = ProcessEngine(engine).footprint(spec, sizes)
    assert (on_cpu.weights, on_cpu.handed_over, on_cpu.asleep) == (2 * 52_000, 2 * 1000, 0)
    assert "LoRA slot of rank 8" in on_cpu.how_weights
    spec = replace(spec, device=torch.device("cuda", 0))
    assert EnginePool.of(engine, 2).footprint(spec, sizes).asleep == 2 * 2 * 52_000
    assert VLLMEngine().footprint(replace(spec, adapters=None), sizes).asleep == 0


def test_only_the_engine_with_the_slot_asks_for_adapters():
    assert not ProcessEngine(TransformersEngine()).enable_lora
    assert ProcessEngine(VLLMEngine(enable_lora=True)).enable_lora
    assert EnginePool.of(VLLMEngine(enable_lora=True), 2).enable_lora


@pytest.mark.parametrize(
    ("enabled", "message"), [(True, r"^`VLLM.*\(GPT2.*merged"), (False, "^GPT2")]
)
def test_a_model_for_which_vllm_has_no_lora_is_refused(enabled, message):
    spec = EngineSpec("", 2, 8, (1,))
    with pytest.raises(ValueError, match=message), naming_settings(spec, enabled):
        raise ValueError("GPT2LMHeadModel does not support LoRA yet.")


class Slept:
    """What a sleeping engine is told."""

    def __init__(self):
        self.told = []

    def sleep(self, level):
        self.told.append(level)


@pytest.mark.parametrize(("lora", "told"), [(True, [1]), (False, [2])])
def test_base_weights_outlive_the_sleep(lora, told):
    engine = VLLMEngine(enable_lora=lora)
    engine._engine, engine._spec = Slept(), EngineSpec("", 2, 64, (), device=torch.device("cuda"))
    engine.sleep()
    assert engine._engine.told == told
