"""Estimates against what the same run really holds: counted bytes, not resident memory."""

import gc
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback, Trainer
from lora_policy import with_lora
from transformers import Qwen3Config

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import AsyncRollout, MicroGroupSampling, StreamedTraining
from lit_rlsched.cli.estimate import LiveBytes, PlannedRun, report, storage_bytes, total
from lit_rlsched.engines import ProcessEngine, RayEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines._vllm_args import full_cache
from lit_rlsched.engines.spec import EngineSpec, Sizes
from lit_rlsched.settings import UsageError
from lit_rlsched.training.logprobs import CHUNK_BYTES
from lit_rlsched.training.optimizers import make_adamw
from lit_rlsched.training.precision import to_like

LIMIT = 96


@pytest.fixture
def plan(tiny_model, digits, sums):
    """Trainer, module and data module, anew at each call."""

    def plan(
        model=tiny_model, precision="32-true", engine=None, callbacks=(), trainer=None, **settings
    ):
        of_data = signature(RolloutDataModule).parameters.keys() & settings
        data_settings = {name: settings.pop(name) for name in of_data}
        trainer = Trainer(
            accelerator="cpu",
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **{"check_val_every_n_epoch": 10, "max_epochs": 2, **(trainer or {})},
        )
        data = RolloutDataModule(
            sums,
            [digits],
            engine=engine or TransformersEngine(),
            **{
                "prompts_per_round": 4,
                "num_generations": 4,
                "micro_batch_tokens": 800,
                "max_completion_length": LIMIT,
                **data_settings,
            },
        )
        return trainer, GRPOModule(model, **settings), data

    return plan


def planned(run, memory=2**40, device="cpu"):
    return PlannedRun(*run, device, memory)


def items(run):
    return {item.name: item for item in run.items()}


def peaks(run, place="trainer"):
    return total([item for item in run.items() if item.place == place])


SETTINGS = {
    "plain": {},
    "lora and checkpointing": {"lora_rank": 4, "gradient_checkpointing": True},
    "reference": {"beta": 0.1},
    "bf16-true": {"precision": "bf16-true"},
    "lora in bf16-mixed": {"precision": "bf16-mixed", "lora_rank": 4},
    "fused": {"optim": "adamw_torch_fused"},
}


@pytest.mark.mostly_slow("400-plain", "400-lora in bf16-mixed")
@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        *(pytest.param(400, settings, id=f"400-{name}") for name, settings in SETTINGS.items()),
        pytest.param(1600, {}, id="1600-plain"),
    ],
)
def test_a_step_takes_what_was_estimated(plan, settings, tokens):
    run = planned(plan(**settings, micro_batch_tokens=tokens))
    trainer, module, _ = plan(**settings, micro_batch_tokens=tokens)
    module.trainer = trainer
    module.configure_model()
    trainer.precision_plugin.convert_module(module)
    for reference in module._reference:
        to_like(reference, next(module.parameters()))
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_adamw(module, "optim" in settings)
    found = []
    for _ in range(2):
        batch = run.micro_batch()
        assert batch.input_ids.numel() == pytest.approx(tokens, rel=0.05)
        gc.collect()
        live = LiveBytes()
        with live, trainer.precision_plugin.forward_context():
            module.loss(batch).loss.backward()
        found.append(live.peak)
        optimizer.step()
    held = items(run)
    assert held["weights"].update == storage_bytes([*module.parameters(), *module.buffers()])
    assert held["gradients"].update == storage_bytes(p.grad for p in trainable)
    state = [t for s in optimizer.state.values() for t in s.values()]
    # AdamW also counts its steps
    assert held["optimizer state"].rollout == pytest.approx(storage_bytes(state), rel=0.01)
    passes = held["activations"].update + held["passes at their peak"].update
    assert passes == pytest.approx(found[1], rel=0.02)
    references = [p for r in module._reference for p in r.parameters()]
    assert ("reference model" in held) == bool(references)
    if references:
        assert held["reference model"].update == pytest.approx(storage_bytes(references), rel=0.01)


def test_an_adapter_is_estimated_as_its_settings_are(plan, tiny_model, tmp_path):
    with_lora(tiny_model).save_pretrained(tmp_path / "adapter")
    adapter, lora = (
        {
            name: (item.rollout, item.update)
            for name, item in items(planned(plan(*model, **settings))).items()
        }
        for model, settings in (((str(tmp_path / "adapter"),), {}), ((), {"lora_rank": 4}))
    )
    assert adapter == lora and "gradients" in lora


@pytest.mark.slow
def test_a_run_of_full_length_completions_holds_what_was_estimated(plan):
    held = items(planned(plan()))
    trainer, module, data = plan()
    measured = {"cache": 0, "gradients": 0, "step": 0}

    class Measure(Callback):
        def on_before_optimizer_step(self, *_):
            measured["gradients"] = storage_bytes(p.grad for p in module.parameters())

        def on_completion_end(self, *_):
            assert all(p.grad is None for p in module.parameters())
            stored = [t for pair in data.run.settings.engine._cache._layers.values() for t in pair]
            measured["cache"] = max(measured["cache"], storage_bytes(stored))

    trainer.callbacks.append(Measure())
    trainer.fit(module, datamodule=data)
    assert held["gradients"].update == measured["gradients"]
    assert held["gradients"].rollout == 0
    assert measured["cache"] == pytest.approx(held["key-value cache"].rollout, rel=0.02)
    state = trainer.optimizers[0].state.values()
    measured = storage_bytes(t for s in state for t in s.values())
    assert held["optimizer state"].rollout == pytest.approx(measured, rel=0.01)


def test_vllm_on_cpu_is_asked_for_its_cache(plan):
    engine = VLLMEngine()
    run = planned(plan(engine=engine))
    held, spec = items(run), run.spec
    assert held["key-value cache"].rollout == full_cache(engine, spec)
    assert held["engine weights"].update == held["engine weights"].rollout > 0  # it cannot sleep


@pytest.mark.slow
def test_slots_of_a_large_gpu_follow_from_its_cache(plan, monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    engine, memory = VLLMEngine(gpu_memory_utilization=0.0099), 2**30
    run = planned(plan(engine=engine, num_generations=128), memory, "cuda")
    assert run.slots == 314
    said = report(run)
    assert "Up to 314 of a round's 512 completions" in said and "vLLM sleeps in the update" in said
    held = [items(run)[name] for name in ("engine weights", "key-value cache")]
    assert sum(i.rollout for i in held) == int(memory * 0.0099) and not any(i.update for i in held)
    awake = planned(plan(engine=VLLMEngine(enable_sleep_mode=False)), memory, "cuda")
    assert items(awake)["key-value cache"].update > 0


@pytest.mark.slow
def test_engine_weights_are_in_the_engines_precision(plan):
    def engine(**settings):
        return items(planned(plan(engine=VLLMEngine(), **settings)))["engine weights"].rollout

    assert engine(precision="bf16-mixed") * 2 == engine() == engine(lora_rank=4)


@pytest.mark.slow
def test_log_probs_take_larger_chunks_on_a_gpu(plan, monkeypatch):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2**14)
    run = planned(plan(engine=VLLMEngine(), micro_batch_tokens=1600))
    kept = items(run)["activations"].update
    run.device = "cuda"
    # all logits are one chunk there, which is kept for the backward pass
    more = items(run)["activations"].update - kept
    assert more > 4 * 1400 * run.module.model.config.vocab_size
    assert CHUNK_BYTES["cpu"] == 2**14


@pytest.mark.slow
def test_the_cache_follows_the_slots_and_not_the_group(plan):
    slots = [MicroGroupSampling(slots=3)]
    few = items(planned(plan(callbacks=slots)))["key-value cache"].rollout
    many = items(planned(plan(callbacks=slots, num_generations=64)))["key-value cache"].rollout
    assert few == many == items(planned(plan()))["key-value cache"].rollout * 3 // 16


@pytest.mark.slow
def test_a_memory_that_is_too_small_says_what_helps(plan):
    run = planned(plan())
    run.memory = max(peaks(run)) + 1024
    assert "The run fits: the update needs the most and leaves 1.00 KiB." in report(run)
    run.memory -= 2048
    said = report(run)
    assert "The run does not fit: the update needs 1.00 KiB more" in said
    assert "gradient_checkpointing" in said


@pytest.mark.slow
def test_no_weights_are_needed_nor_allocated(plan, tmp_path, tiny_model):
    Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    run = planned(plan(str(tmp_path), tokenizer=tiny_model, lora_rank=8))
    held = items(run)
    assert held["weights"].rollout > 7 << 30
    assert held["gradients"].update < 64 << 20
    assert held["activations"].update > 100 << 20


def test_a_model_without_tokenizer_or_config_is_refused(plan, tmp_path):
    with pytest.raises(UsageError, match=r"the folder has no config\.json"):
        planned(plan(str(tmp_path)))
    Qwen3Config(num_hidden_layers=1, hidden_size=64, vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"--data\.tokenizer"):
        planned(plan(str(tmp_path)))


def test_what_fit_refuses_is_refused(plan):
    with pytest.raises(UsageError, match="`micro_batch_tokens=50`"):
        planned(plan(micro_batch_tokens=50))
    with pytest.raises(UsageError, match="`num_generations=1`"):
        planned(plan(num_generations=1))
    with pytest.raises(UsageError, match="kv_cache_gib"):
        planned(plan(engine=VLLMEngine(kv_cache_gib=1e-5)))
    slots = [MicroGroupSampling(slots=16)]
    with pytest.raises(UsageError, match="slots=16"):
        planned(plan(engine=VLLMEngine(kv_cache_gib=4e-4), callbacks=slots))


def test_live_bytes_forgets_what_is_freed():
    before = torch.zeros(1000)
    with LiveBytes() as live:
        before.add_(1)  # was there
        kept = before * 2
        dropped = kept.view(10, 100) + 1
        assert (live.now, live.peak) == (8000, 8000)
        del dropped
    assert (live.now, live.peak) == (4000, 8000)


@pytest.mark.slow
def test_several_engines_have_as_many_weights(plan):
    engine = TransformersEngine
    one = planned(plan(engine=ProcessEngine(engine())))
    run = plan(engine=engine(), num_engines=2)
    two, on_gpu = planned(run), planned(plan(engine=engine(), num_engines=2), 2**40, "cuda")
    assert two.slots == one.slots == 16
    for name, times in (("engine weights", 2), ("key-value cache", 1), ("weights handed over", 1)):
        assert items(two)[name].rollout == pytest.approx(times * items(one)[name].rollout, rel=0.1)
    assert items(on_gpu)["engine weights"].rollout == items(one)["engine weights"].rollout
    assert "2 engines, each " in items(two)["engine weights"].how


@pytest.mark.mostly_slow("VLLMEngine")
@pytest.mark.parametrize("engine", [TransformersEngine, VLLMEngine])
def test_an_engine_in_its_own_process_has_weights_of_its_own(plan, engine):
    inside = items(planned(plan(engine=engine())))
    apart = items(planned(plan(engine=ProcessEngine(engine()))))
    weights = pytest.approx(inside["weights"].rollout, rel=1e-2)  # which counts buffers too
    assert apart["weights handed over"].rollout == apart["weights handed over"].update == weights
    assert apart["engine weights"].update == apart["engine weights"].rollout == weights
    assert apart["key-value cache"].rollout == inside["key-value cache"].rollout
    assert "weights handed over" not in inside


@pytest.mark.slow
def test_engines_of_a_ray_cluster_have_gpus_of_their_own(plan):
    settings = {"num_engines": 4, "precision": "bf16-mixed"}
    memory = 2**30
    run = plan(engine=RayEngine(TransformersEngine(), {"CPU": 2}), **settings)
    cluster = planned(run, memory, "cuda")
    node = planned(plan(engine=TransformersEngine(), **settings), memory, "cuda")
    held, beside = items(cluster), items(node)
    engine = [held[name] for name in ("engine weights", "key-value cache")]
    assert [i.rollout for i in engine] == [beside[i.name].rollout for i in engine]
    assert all(i.place == "engine" for i in engine) and held["weights"].place == "trainer"
    alone = peaks(cluster)[0] + sum(i.rollout for i in engine)
    assert alone == peaks(node)[0] and peaks(cluster)[1] < peaks(node)[1]
    said, weights = report(cluster), held["weights handed over"]
    assert weights.place == "main memory" and weights.rollout == engine[0].rollout
    assert "The run fits: " in said and "An engine fits: " in said
    cluster.memory = engine[0].rollout
    assert "An engine does not fit: " in report(cluster)


@pytest.mark.parametrize(
    ("placement", "transfer", "apart"),
    [
        (ProcessEngine, None, False),
        (ProcessEngine, "nccl", True),
        (RayEngine, None, True),
        (RayEngine, "nccl", True),
    ],
)
def test_an_engine_has_a_gpu_of_its_own_if_it_cannot_share_the_trainers(
    tiny_model, placement, transfer, apart
):
    engine, sizes = placement(VLLMEngine(), weight_transfer=transfer), Sizes(1000, 10, 2**30)
    for device, there in (("cuda", apart), ("cpu", False)):
        spec = EngineSpec(tiny_model, 2, 64, (1,), device=torch.device(device))
        assert engine.footprint(spec, sizes).apart == there


@pytest.mark.slow
def test_gpus_of_an_engine_have_a_part_of_its_weights(plan):
    memory, held = 2**30, []
    for gpus in (1, 2):
        engine = VLLMEngine(gpu_memory_utilization=0.25, tensor_parallel_size=gpus)
        run = planned(plan(engine=RayEngine(engine)), memory, "cuda")
        held.append(items(run))
    one, two = held
    assert two["engine weights"].rollout == one["engine weights"].rollout // 2
    assert two["engine weights"].how.endswith("a part of 2")
    assert two["weights handed over"].rollout == one["weights handed over"].rollout
    for part in held:
        assert part["engine weights"].rollout + part["key-value cache"].rollout == memory // 4


@pytest.mark.slow
def test_gradients_of_streamed_training_are_in_the_rollout(plan):
    engine = ProcessEngine(TransformersEngine())
    plain = items(planned(plan(engine=engine)))
    streamed = items(planned(plan(engine=engine, callbacks=[StreamedTraining()])))
    for name in ("gradients", "activations", "passes at their peak"):
        assert plain[name].rollout == 0 < streamed[name].rollout <= streamed[name].update
        assert streamed[name].update == plain[name].update


@pytest.mark.slow
def test_an_engine_that_draws_ahead_is_in_the_update(plan):
    engine = ProcessEngine(TransformersEngine())
    plain = items(planned(plan(engine=engine)))
    ahead = items(planned(plan(engine=engine, callbacks=[AsyncRollout()])))
    for name in ("engine weights", "key-value cache"):
        assert 0 < ahead[name].update == ahead[name].rollout == plain[name].rollout
    copies = 3  # of the versions up to two rounds old, and of the newest
    assert ahead["weights of the drafts"].update == copies * ahead["gradients"].update
    assert "weights of the drafts" not in plain


@pytest.mark.slow
def test_with_fsdp2_a_rank_has_a_part(plan):
    alone = items(planned(plan()))
    four = items(planned(plan(trainer={"devices": 4, "strategy": "fsdp2"})))
    for name in ("weights", "gradients", "optimizer state"):
        assert four[name].update == pytest.approx(alone[name].update / 4, rel=1e-3)
    # embedding and head whole, two layers, and the gradient of one: below the whole policy here
    assert 0 < four["gathered weights"].update < 2 * alone["weights"].update
    assert "gathered weights" not in alone
    assert four["engine weights"].rollout and four["weights handed over"]  # its own process


def test_with_ddp_every_rank_has_all(plan):
    alone, two = (
        items(planned(plan(trainer={"devices": n, "strategy": s})))
        for n, s in ((1, "auto"), (2, "ddp"))
    )
    for name in ("weights", "gradients", "optimizer state", "activations"):
        assert two[name].update == alone[name].update
