"""What a user gets wrong, and what they are told."""

import gzip
import time
from importlib.util import find_spec
from types import SimpleNamespace

import datasets
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from transformers import AutoTokenizer

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule
from lit_rlsched.callbacks import (
    DownSampling,
    DynamicSampling,
    LengthPrediction,
    MicroBatchAccumulation,
    MicroGroupSampling,
    RolloutCallback,
    SortedBatching,
)
from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.rows import load_rows
from lit_rlsched.engines import SimulatedEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines._vllm_guest import check_head_size
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.rewards.functions import reasoning_gym_reward
from lit_rlsched.settings import UsageError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, r"`num_generations=1`: use 2 or more"),
        ({"prompts_per_round": 0}, r"`prompts_per_round=0`: use 1 or more"),
        (
            {"steps_per_round": 3},
            r"`steps_per_round=3` does not divide .*=4`. Use one of \[1, 2, 4\]",
        ),
        ({"num_iterations": 0}, r"`num_iterations=0`"),
        ({"num_engines": 0}, r"`num_engines=0`: use 1 or more"),
        ({"num_engines": 5}, r"`num_engines=5` is more than `prompts_per_round=4`.* Use 4 or less"),
        ({"max_completion_length": 0}, r"`max_completion_length=0`"),
        ({"temperature": 0.0}, r"`temperature=0.0`: use more than 0"),
        ({"val_temperature": 0.0}, r"`val_temperature=0.0`: use more than 0"),
        ({"top_p": 1.5}, r"`top_p=1.5`"),
        ({"reward_weights": [1.0, 2.0]}, r"reward_weights"),
        ({"reward_timeout": 0.0}, r"timeout"),
        ({"reward_funcs": []}, r"reward_funcs"),
        ({"train_data": []}, r"empty"),
        ({"train_data": [{"text": "1+1="}]}, r"row 0.*`prompt`"),
        ({"train_data": "no/such/file.jsonl"}, r"no file `no/such/file.jsonl`"),
        (
            {"prompts_per_round": 100},
            r"`prompts_per_round=100` is more than `train_data` holds: 80",
        ),
        ({"max_completion_length": 512}, r"`max_completion_length=512` leaves no room"),
        ({"micro_batch_tokens": 20}, r"`micro_batch_tokens=20` cannot hold .* Use 28 or more"),
        ({"val_data": [{"prompt": "1"}], "val_greedy": False}, r"leaves nothing to validate"),
        ({"tokenizer": "./nowhere"}, r"nowhere"),
        (
            {"reward_funcs": [reasoning_gym_reward]},
            r"`reasoning_gym_reward` requires `task`, and row 0 of `train_data`",
        ),
        (
            {
                "reward_funcs": [reasoning_gym_reward],
                "train_data": [
                    {"prompt": str(n), "task": "new_task", "metadata": {}} for n in range(80)
                ],
            },
            r"`reasoning_gym_reward` refuses the row `0 of .*`task='new_task'`.* reviewed",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_data_that_cannot_work(fit, settings, message):
    with pytest.raises(UsageError, match=message):
        fit(**settings)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            '{"prompt": "1"}\n\n{"prompt": "caf\u00e9"}'.encode("latin-1"),
            r"line 3 is not UTF-8 \(byte 0xe9",
        ),
        ('{"prompt": "1"}'.encode("utf-16"), r"line 1: the file is UTF-16.*iconv"),
        (gzip.compress(b'{"prompt": "1"}'), r"line 1: the file is compressed with gzip.*gunzip"),
        (b'{"prompt": "1"}\n\n{"prompt": "\\ud83d"}', r"line 3 has half of a surrogate pair"),
        (
            b'{"prompt": [{"role": "user", "content": "\\udc00!"}]}',
            r"line 1 has half of a surrogate pair in its `prompt` \('\\udc00' at character 0\)",
        ),
        (b'{"prompt": "1"}\n{"prompt": ""}', r"line 2 has an empty `prompt`"),
    ],
    ids=["latin-1", "utf-16", "gzip", "surrogate", "surrogate in a chat", "empty"],
)
def test_a_file_of_another_kind_is_named_with_the_line(tmp_path, raw, message):
    (tmp_path / "prompts.jsonl").write_bytes(raw)
    with pytest.raises(UsageError, match=r"prompts\.jsonl`, " + message):
        load_rows(tmp_path / "prompts.jsonl")


def test_a_list_in_latin_1_is_named_with_the_line(tmp_path):
    (tmp_path / "prompts.json").write_bytes(
        '[{"prompt": "1"},\n{"prompt": "\u00e9"}]'.encode("latin-1")
    )
    with pytest.raises(UsageError, match=r"prompts\.json`, line 2 is not UTF-8"):
        load_rows(tmp_path / "prompts.json")


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "\u00e9"}', encoding="utf-8-sig")
    assert list(load_rows(tmp_path / "prompts.jsonl")) == [{"prompt": "\u00e9"}]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("stage", ["train", "val", "stream"])
def test_a_token_that_the_model_has_no_embedding_for(fit, sums, tiny_model, tmp_path, stage):
    """Where the prompt is known, before the engine starts; of a stream when the row is drawn."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["QQQ"])
    tokenizer.save_pretrained(tmp_path / "other")
    rows = [{"prompt": f"row {i}", "answer": "1"} for i in range(6)]
    rows[4]["prompt"] = "row QQQ"
    began = []
    engine = TransformersEngine()
    engine.start = began.append
    data = {"train_data": sums[:9], "tokenizer": str(tmp_path / "other"), "prompts_per_round": 2}
    token = (
        r"has the token 66 \('QQQ'\) of the tokenizer `.*other`.*for 0 to 65\. Use the model's own"
    )
    if stage == "stream":
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
        with pytest.raises(UsageError, match=rf"row 4 of pass 0 .*cannot be tokenised: it {token}"):
            fit(**data | {"train_data": stream, "shuffle": False}, trainer={"max_epochs": 3})
        return
    with pytest.raises(
        ValueError, match=rf"`{stage}_data`: The prompt of row 4 \(uid .*\) {token}"
    ):
        fit(**data | {f"{stage}_data": rows, "engine": engine})
    assert not began
    for first in (rows[:4], rows[5:]):  # the tokenizer may know more than the prompts need
        assert make_prompts(first, tokenizer, max_prompt_length=99, embeddings=66)
    assert make_prompts(rows, tokenizer, max_prompt_length=99, embeddings=128)


def test_heads_that_vllm_has_not_on_cpu():
    with pytest.raises(UsageError, match=r"heads have a size of 48, .*32, 64.*TransformersEngine"):
        check_head_size(SimpleNamespace(head_dim=None, hidden_size=96, num_attention_heads=2))
    check_head_size(SimpleNamespace(head_dim=64))


def test_two_prompts_of_one_uid(fit):
    rows = [
        {"prompt": f"{i}+1=", "answer": "1", "uid": "same" if i in (2, 5) else str(i)}
        for i in range(8)
    ]
    with pytest.raises(UsageError, match=r"Rows 2 and 5 have the same `uid` 'same'"):
        fit(train_data=rows)


def test_the_same_prompt_twice_is_kept_once_and_said(fit, sums):
    with pytest.warns(UserWarning, match="5 of 25 rows repeat an earlier row"):
        _, _, data = fit(train_data=[*sums[:20], *sums[:5]])
    assert len(data.run.startup.prompts.train) == 20


def test_a_prompt_longer_than_the_context_is_named_and_never_cut(fit, sums):
    rows = [*sums[:8], {"prompt": "7" * 500, "answer": "7", "uid": "endless"}]
    with pytest.raises(UsageError, match=r"endless.*500.*488"):
        fit(train_data=rows)


@pytest.mark.parametrize("model", ["./no/such/model", "/no/such/model", "no/such"])
def test_a_model_that_is_not_there(fit, model):
    with pytest.raises(UsageError, match=model):
        fit(GRPOModule(model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPOModule("m", loss_type="ppo"), "ppo"),
        (lambda: GRPOModule("m", beta=-1.0), "beta=-1.0"),
        (lambda: GRPOModule("m", loss_type="rloo", beta=0.1), "RLOOModule"),
        (lambda: GRPOModule("m", loss_type="cispo"), "epsilon_high"),
        (lambda: RLOOModule("m", learning_rate=-1.0), "learning_rate=-1.0"),
        (lambda: GRPOModule("m", importance_sampling_mode="token"), "token"),
        (lambda: MicroGroupSampling(slots=0), r"slots=0\)`: must be a whole number, 1 or more"),
        (lambda: MicroGroupSampling(), "exactly one"),
        (lambda: MicroGroupSampling(slots=2, memory_budget="1GiB"), "exactly one"),
        (lambda: MicroGroupSampling(memory_budget="much"), "memory_budget='much'"),
        (lambda: MicroGroupSampling(slots=2, refill="sometimes"), "sometimes"),
        (
            lambda: MicroGroupSampling(slots=2, order="longest"),
            r"'longest'\)` is unknown.*'planned'",
        ),
        (lambda: MicroGroupSampling(slots=2.5), r"slots=2.5\)`: must be a whole number"),
        (lambda: MicroGroupSampling(memory_budget=0.5), "memory_budget=0.5"),
        (lambda: LengthPrediction(probe_tokens="3"), "probe_tokens='3'"),
        (
            lambda: MicroGroupSampling(slots=2, refill="rounds", order="planned"),
            "order='longest_first'",
        ),
        (
            lambda: LengthPrediction(probe_tokens=-1),
            r"probe_tokens=-1\)`: must be a whole number, 0 or",
        ),
        (lambda: GRPOModule("m", advantage="ppo"), r"advantage='ppo'` is unknown.*'reinforce\+\+'"),
        (
            lambda: GRPOModule("m", advantage="reinforce++", scale_rewards="none"),
            r"scale_rewards='none'` has no effect on `advantage='reinforce\+\+'`",
        ),
        (
            lambda: RLOOModule("m", old_logprobs="engine"),
            r"`old_logprobs='engine'` with `loss_type='rloo'`",
        ),
        (lambda: GRPOModule("m", old_logprobs="rollout"), r"old_logprobs='rollout'` is unknown"),
        (lambda: SortedBatching(pool_rounds=0), r"pool_rounds=0\)`: must be a whole number, 1 or"),
        (lambda: SortedBatching(pool_rounds=None), r"pool_rounds=None\)`: must be a whole number"),
        (lambda: SortedBatching(update_prompts=2.0), r"update_prompts=2.0\)`: must be a whole"),
        (lambda: SortedBatching(mode="off_policy"), r"mode='off_policy'\)` is unknown.*'partial'"),
        (
            lambda: SortedBatching(mode="partial", max_staleness=0),
            r"max_staleness=0\)`.*use `mode='verified'`",
        ),
        (lambda: SortedBatching(max_staleness=2), r"max_staleness=2, mode='on_policy'\)`.*partial"),
        (
            lambda: SortedBatching(mask_stale_tokens=True),
            r"mask_stale_tokens=True, mode='on_policy'\)`.*or leave `mask_stale_tokens` out",
        ),
        (lambda: SortedBatching(oversubscribe=0.5), r"oversubscribe=0.5\)`: must be 1 or more"),
        (lambda: SortedBatching(oversubscribe=float("nan")), r"oversubscribe=nan"),
        (lambda: DownSampling(keep=1), r"keep=1\)`: must be a whole number, 2 or more"),
        (lambda: DownSampling(keep=2.0), r"keep=2.0\)`: must be a whole number"),
        (lambda: DownSampling(4, rule="max_std"), r"rule='max_std'\)` is unknown.*'percentile'"),
        (lambda: DownSampling(4, advantage_scope="all"), r"scope='all'\)` is unknown.*'full'"),
        (
            lambda: DownSampling(4, early_stop=True, rule="random"),
            r"early_stop=True, rule='random'\)`.*Use `rule='max_variance'`, or leave `early_stop`",
        ),
        (
            lambda: DownSampling(4, reward_range=(1, 0)),
            r"reward_range=\(1, 0\)\)`: give the smallest",
        ),
        (
            lambda: DownSampling(4, early_stop=True, reward_range=(0, float("inf"))),
            r"reward_range=\(0, inf\)\)`",
        ),
        (lambda: DownSampling(4, min_length_ratio=0), r"without `early_stop=True`: they have no"),
        (lambda: DownSampling(4, reward_range=(0, 2)), r"without `early_stop=True`: they have no"),
        (lambda: DownSampling(4, min_length_ratio=1.5), r"min_length_ratio=1.5\)`: use 0"),
        (
            lambda: DynamicSampling(max_num_gen_batches=1),
            r"max_num_gen_batches=1\)`: must be a whole number, 2 or more",
        ),
        (lambda: DynamicSampling(2.5), r"max_num_gen_batches=2.5\)`: must be a whole number"),
    ],
)
def test_settings_that_cannot_work(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_budget_smaller_than_one_completion(fit):
    with pytest.raises(UsageError, match="less than one completion may take"):
        fit(callbacks=[MicroGroupSampling(memory_budget="1KiB")])


@pytest.mark.parametrize("order", ["shortest_first", "longest_first", "planned"])
def test_an_order_without_predictions(fit, order):
    with pytest.raises(UsageError, match=f"order='{order}'.*`LengthPrediction"):
        fit(callbacks=[MicroGroupSampling(slots=2, order=order)])


@pytest.mark.parametrize(
    ("batching", "settings", "message"),
    [
        (
            {"pool_rounds": 2, "update_prompts": 9},
            {},
            r"update_prompts=9\)`.*`pool_rounds=2` times `prompts_per_round=4` is 8 prompts.*Use 8",
        ),
        (
            {"pool_rounds": 2},
            {"steps_per_round": 2},
            r"`steps_per_round=2` with `SortedBatching`.*`SortedBatching\(update_prompts=2\)`",
        ),
        (
            {"mode": "partial"},
            {"engine": SimulatedEngine()},
            r"mode='partial'\)` with `SimulatedEngine`.*Use `VLLMEngine` or `TransformersEngine`",
        ),
        ({"mode": "partial"}, {"top_p": 0.9}, r"mode='partial'\)` with `top_p=0.9.*truncated"),
        (
            {"mode": "partial", "max_staleness": 1},
            {"num_iterations": 2},
            r"max_staleness=1\)` with `num_iterations=2`.*Use 2 or more",
        ),
        (
            {"pool_rounds": 21},
            {},
            r"`SortedBatching` loads 84 prompts .*`train_data` holds 80. Use fewer `pool_rounds`",
        ),
    ],
    ids=lambda value: (
        ""
        if isinstance(value, str)
        else " ".join(f"{k}={v}" for k, v in value.items() if k != "engine")
    ),
)
def test_sorted_batching_that_cannot_work(fit, batching, settings, message):
    with pytest.raises(UsageError, match=message):
        fit(callbacks=[SortedBatching(**batching)], **settings)


@pytest.mark.parametrize(
    ("callbacks", "settings", "message"),
    [
        (
            [DownSampling(5)],
            {},
            r"`DownSampling\(keep=5\)` of `num_generations=4`.*Use 4 or less, or more `num_gen",
        ),
        (
            [DownSampling(4, early_stop=True)],
            {},
            r"early_stop=True, keep=4\)` of `num_generations=4`.*Keep fewer, or leave `early_stop`",
        ),
        (
            [DynamicSampling(5)],
            {"prompts_per_round": 20},
            r"max_num_gen_batches=5\)` with `train_data` of 80 prompts: .*draw 100. Use 4 or less",
        ),
        (
            [DynamicSampling(2)],
            {"prompts_per_round": 50},
            r"max_num_gen_batches=2\)` with .* of 80 prompts: .*draw 100. (?!Use 1).*prompts_per_r",
        ),
        (
            [SortedBatching(2), DynamicSampling()],
            {},
            r"`DynamicSampling` with `SortedBatching`.*Remove one of them",
        ),
    ],
)
def test_sampling_that_cannot_work(fit, callbacks, settings, message):
    with pytest.raises(UsageError, match=message):
        fit(callbacks=callbacks, **settings)


def test_uninformative_prompts_where_there_are_none(fit, tiny_model):
    module = GRPOModule(tiny_model, advantage="reinforce++")
    with pytest.raises(UsageError, match=r"`DynamicSampling` with .*`advantage='reinforce\+\+'`"):
        fit(module, [DynamicSampling()])


def test_two_callbacks_that_select(fit):
    class Mine(DownSampling):
        pass

    for callbacks in ([DownSampling(2), Mine(3)], [DynamicSampling(), DynamicSampling()]):
        names = " and ".join(f"`{type(c).__name__}`" for c in callbacks)
        message = f"2 callbacks that decide which .*: {names}.*Remove all but one"
        with pytest.raises(UsageError, match=message):
            fit(callbacks=callbacks)
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `DownSampling"):
        fit(callbacks=[DownSampling(2), DownSampling(3)])  # Lightning's own


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"engine": SimulatedEngine()}])
def test_a_ratio_to_log_probs_that_are_not_there(fit, tiny_model, settings):
    module = GRPOModule(tiny_model, old_logprobs="engine")
    with pytest.raises(UsageError, match=r"`old_logprobs='engine'` with `(top_p|SimulatedEngine)"):
        fit(module, **settings)


def test_two_callbacks_that_end_rounds(fit):
    class TailBatching(RolloutCallback):
        sets = SortedBatching.sets

    message = (
        "2 callbacks that decide when a round ends: `SortedBatching` and `TailBatching`.*"
        "Remove all but one"
    )
    for callbacks in ([SortedBatching(), TailBatching()], [SortedBatching(), SortedBatching()]):
        with pytest.raises(
            UsageError,
            match=message.replace("TailBatching", type(callbacks[1]).__name__),
        ):
            fit(callbacks=callbacks)


def test_a_probe_as_long_as_a_completion(fit):
    with pytest.raises(UsageError, match=r"probe_tokens=24.*max_completion_length=24"):
        fit(callbacks=[LengthPrediction(probe_tokens=24)])


def test_slots_that_engines_cannot_share(fit):
    with pytest.raises(UsageError, match=r"`MicroGroupSampling\(slots=7\)` .* Use 6 slots"):
        fit(callbacks=[MicroGroupSampling(slots=7)], num_engines=3)


def test_two_numbers_of_engines(fit):
    pool = EnginePool([SimulatedEngine(), SimulatedEngine()])
    with pytest.raises(UsageError, match=r"`num_engines=3` with `engine=EnginePool\(...\)`"):
        fit(engine=pool, num_engines=3)


def test_more_slots_than_the_engine_has_room_for(fit):
    engine = SimulatedEngine(kv_capacity=100)
    with pytest.raises(UsageError, match=r"slots=8.*`slots=3`.*`memory_budget`"):
        fit(callbacks=[MicroGroupSampling(slots=8)], engine=engine, verify_sync=False)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_more_slots_than_vllm_has_room_for(fit):
    engine = VLLMEngine(kv_cache_gib=5 * 32 * 512 / 2**30)  # 4 blocks and one that vLLM keeps
    with pytest.raises(UsageError, match=r"slots=8.*Use `slots=4`"):
        fit(callbacks=[MicroGroupSampling(slots=8)], engine=engine)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_budget_that_vllms_own_block_breaks(fit):
    with pytest.raises(UsageError, match="budget"):
        fit(callbacks=[MicroGroupSampling(memory_budget=32 * 512)], engine=VLLMEngine())


def test_a_callback_without_rollouts(tiny_policy):
    from lightning import LightningModule, Trainer

    class Plain(LightningModule):
        def training_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            pass

    trainer = Trainer(logger=False, callbacks=[MicroGroupSampling(2)], accelerator="cpu")
    with pytest.raises(UsageError, match="Fit with `datamodule=RolloutDataModule"):
        trainer.fit(Plain(), train_dataloaders=[1, 2])


def test_accumulation_of_a_module_that_does_it_itself(fit):
    with pytest.raises(UsageError, match="Remove `MicroBatchAccumulation`"):
        fit(callbacks=[MicroBatchAccumulation()])


def test_several_processes(sums, digits):
    data = RolloutDataModule(sums, [digits], engine=TransformersEngine())
    data.trainer = SimpleNamespace(world_size=2, strategy=FSDPStrategy())
    with pytest.raises(UsageError, match=r"FSDPStrategy.*2 processes.*ddp"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_generations": 8}, r"`num_generations=4`, this run has `num_generations=8`"),
        ({"seed": 4}, r"`seed=3`, this run has `seed=4`"),
    ],
)
def test_a_checkpoint_of_another_configuration(fit, tmp_path, change, message):
    fit(
        callbacks=[ModelCheckpoint(tmp_path / "c", save_last=True)],
        trainer={"enable_checkpointing": True, "max_epochs": 1},
    )
    with pytest.raises(UsageError, match=message):
        fit(ckpt_path=tmp_path / "c" / "last.ckpt", **change)


def test_a_checkpoint_of_other_data_or_another_model(fit, tmp_path, sums, tiny_model):
    fit(
        callbacks=[ModelCheckpoint(tmp_path / "c", save_last=True)],
        trainer={"enable_checkpointing": True, "max_epochs": 1},
    )
    last = tmp_path / "c" / "last.ckpt"
    with pytest.raises(UsageError, match=r"data set|prompts"):
        fit(ckpt_path=last, train_data=sums[:40])
    with pytest.raises(UsageError, match="of another configuration"):
        fit(GRPOModule(tiny_model, lora_rank=2), ckpt_path=last)


def spoiled(kind):
    """A reward that goes wrong for completions of odd length, about half of them."""

    def spoiled(prompts, completions, completion_ids, **kwargs):
        if len(completion_ids[0]) % 2:
            if kind == "raises":
                raise RuntimeError("broken")
            if kind == "hangs":
                time.sleep(60)
            if kind == "wrong number":
                return [1.0, 2.0]
            if kind == "not a number":
                return ["good"]
        return [float(len(completion_ids[0]))]

    return spoiled


@pytest.mark.parametrize(
    ("kind", "counter"),
    [
        ("raises", "raised"),
        ("wrong number", "bad_returns"),
        ("not a number", "bad_returns"),
        ("hangs", "timeouts"),
    ],
)
def test_a_reward_that_fails_costs_its_completion_and_not_the_run(fit, kind, counter):
    slow = {"reward_timeout": 0.3} if kind == "hangs" else {}
    trainer, module, _ = fit(reward_funcs=[spoiled(kind)], trainer={"max_epochs": 1}, **slow)
    assert trainer.global_step == 1
    figures = trainer.callback_metrics
    assert figures[f"rewards/spoiled/{counter}"] == figures["rewards/unscorable"] > 0
    assert torch.isfinite(figures["reward"])
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_nothing_is_built_where_the_engine_would_not_start(sums, digits):
    data = RolloutDataModule(sums, [digits], engine=TransformersEngine())
    data.run.close()
    data.run.close()
