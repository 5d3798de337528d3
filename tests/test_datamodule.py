import csv
import json
import warnings
from dataclasses import replace

import psutil
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from seen_rounds import At, Rounds, logged, vector

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule
from lit_rlsched.callbacks import MicroGroupSampling, PromptBudget, RNGState, RolloutLogger
from lit_rlsched.engines import TransformersEngine, VLLMEngine


@pytest.mark.parametrize(("transfer", "first"), [(None, 0), ("nccl", 1)])
def test_engines_with_gpus_of_their_own_begin_after_the_trainers(fit, transfer, first):
    class Looking(TransformersEngine):
        weight_transfer = transfer

        def start(self, spec):
            assert spec.first_gpu == first
            super().start(spec)

    fit(engine=Looking(), trainer={"max_epochs": 1})


def test_one_epoch_is_one_round(fit):
    recorder, calls = Rounds(), []
    hooks = ("train_epoch_start", "round_start", "round_end", "train_batch_start")
    order = [At(lambda *_, name=name: calls.append(name), f"on_{name}") for name in hooks]
    trainer, _, data = fit(
        callbacks=[recorder, *order], steps_per_round=2, num_iterations=2, trainer={"max_epochs": 3}
    )
    assert calls == [*hooks, *["train_batch_start"] * 3] * 3
    assert [len(plan) for plan in recorder.planned] == [4] * 3
    assert len(recorder.completions) == 48 and len(recorder.groups) == 12
    assert trainer.global_step == 12
    assert [r.number for r in recorder.rounds] == [0, 1, 2]
    assert [r.version for r in recorder.rounds] == [0, 4, 8]
    assert data.run.counters["num_completions"] == 48


@pytest.mark.mostly_slow("setting2")
@pytest.mark.parametrize("setting", [{"slots": 1}, {"slots": 3, "refill": "rounds"}, {"slots": 7}])
def test_slots_change_nothing_that_is_learned(fit, setting):
    recorder, plain, double = Rounds(), Rounds(), {"precision": "64-true"}
    _, module, _ = fit(callbacks=[recorder, MicroGroupSampling(**setting)], trainer=double)
    _, reference, _ = fit(callbacks=[plain], trainer=double)
    for a, b in zip(recorder.rounds, plain.rounds, strict=True):
        assert [c.token_ids for c in a.completions] == [c.token_ids for c in b.completions]
        assert [c.advantage for c in a.completions] == [c.advantage for c in b.completions]
    torch.testing.assert_close(vector(module), vector(reference), rtol=0, atol=1e-9)
    assert max(recorder.rounds[0].trace.steps["running"]) == setting["slots"]


@pytest.mark.parametrize(
    ("precision", "completions"), [("32-true", 3), ("64-true", 1), ("bf16-mixed", 5)]
)
def test_a_memory_budget_holds_for_the_cache_of_our_own_engine(fit, precision, completions):
    class Watched(TransformersEngine):
        peak = 0

        def step(self):
            events = super().step()
            layers = self._cache._layers.values()
            size = sum(tensor.nbytes for layer in layers for tensor in layer)
            self.peak = max(self.peak, size)
            return events

    # 2 layers, 1 head of 32, keys and values; 4 + 24 tokens a completion
    budget = completions * 28 * 128 * (8 if precision == "64-true" else 4)
    engine, recorder = Watched(), Rounds()
    slots = MicroGroupSampling(memory_budget=budget)
    fit(
        callbacks=[recorder, slots],
        engine=engine,
        trainer={"precision": precision, "max_epochs": 1},
    )
    assert recorder.rounds[0].metrics["rollout/peak_running"] == completions
    assert budget / 2 < engine.peak <= budget


def test_log_probs_of_the_trainer_are_taken_before_the_first_step(fit, tiny_model, make_policy):
    recorder = Rounds()
    fit(callbacks=[recorder], num_iterations=2)
    for completion in recorder.rounds[0].completions:
        torch.testing.assert_close(
            torch.tensor(completion.old_logprobs),
            torch.tensor(completion.logprobs),
            atol=1e-5,
            rtol=0,
        )
    recorder = Rounds()
    fit(callbacks=[recorder])
    assert all(c.old_logprobs is None for c in recorder.rounds[0].completions)


def test_leaving_zero_advantage_out_changes_no_gradient(fit, tiny_model, sums):
    def flat(prompts, completions, completion_ids, answer, **kwargs):
        return [float(c.startswith(a)) for c, a in zip(completions, answer, strict=True)]

    class Everything(GRPOModule):
        skip_zero_advantage = False

    recorder = Rounds()
    settings = {"reward_funcs": [flat], "num_generations": 8}
    _, module, _ = fit(GRPOModule(tiny_model, learning_rate=1e-3), [recorder], **settings)
    _, reference, _ = fit(Everything(tiny_model, learning_rate=1e-3), **settings)
    trained = sum(len(rows) for rows in recorder.steps[0].micro_batches)
    assert trained < 32
    torch.testing.assert_close(vector(module), vector(reference), rtol=0, atol=1e-6)


def test_weights_of_several_rewards(fit, digits):
    def length(prompts, completions, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    async def later(prompts, completions, completion_ids, **kwargs):
        return [2.0 for _ in completions]

    recorder = Rounds()
    fit(callbacks=[recorder], reward_funcs=[digits, length, later], reward_weights=[1.0, 0.5, 0.0])
    round = recorder.rounds[0]
    expected = [c.scores[0] + 0.5 * len(c.token_ids) for c in round.completions]
    assert round.metrics["reward"] == pytest.approx(sum(expected) / 16)
    assert round.metrics["rewards/later/mean"] == 2.0


@pytest.mark.mostly_slow("TransformersEngine")
@pytest.mark.parametrize("engine", [TransformersEngine, VLLMEngine])
def test_validation(fit, sums, engine):
    baseline = At(logged, "on_sanity_check_end")
    trainer, _, _ = fit(
        callbacks=[baseline],
        engine=engine(),
        val_data=sums[80:],
        val_num_generations=2,
        trainer={"num_sanity_val_steps": -1},
    )
    figures = trainer.callback_metrics
    for name in ("accuracy", "greedy_accuracy", "mean@2", "pass@2", "reward"):
        assert 0 <= baseline.seen[0][f"val/{name}"] <= 1
        assert 0 <= figures[f"val/{name}"] <= 1
    assert figures["val/accuracy"] == figures["val/mean@2"] <= figures["val/pass@2"]


@pytest.mark.slow
def test_the_baseline_has_a_point_of_its_own_and_a_part_of_the_prompts_gives_none(
    fit, sums, tmp_path
):
    def validated(name, **settings):
        logger = CSVLogger(tmp_path, name=name, version=0)
        fit(val_data=sums[80:84], trainer={"logger": logger, "log_every_n_steps": 1, **settings})
        logger.save()
        with (tmp_path / name / "version_0" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [int(row["step"]) for row in rows if row.get("val/accuracy")]

    assert validated("whole", num_sanity_val_steps=-1) == [0, 1, 2]
    assert validated("lightnings_default", num_sanity_val_steps=2) == [1, 2]
    limited = {"num_sanity_val_steps": -1, "limit_val_batches": 2}
    assert validated("limited", **limited) == [0, 1, 2], "the same two prompts each time"


def test_a_reward_that_never_counts_as_correct_is_said_once(fit, sums):
    def half(completions, **kwargs):
        return [0.5] * len(completions)

    def fractions(**settings):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer, _, _ = fit(reward_funcs=[half], val_data=sums[80:82], **settings)
        said = [w for w in caught if "val_accuracy_threshold" in str(w.message)]
        return len(said), float(trainer.callback_metrics["val/accuracy"])

    assert fractions() == (1, 0.0)
    assert fractions(val_accuracy_threshold=0.5) == (0, 1.0)


def test_validation_does_not_change_training(fit, sums):
    _, module, _ = fit(val_data=sums[80:], val_num_generations=1)
    _, reference, _ = fit()
    assert torch.equal(vector(module), vector(reference))


def test_a_limit_on_validation_takes_the_first_prompts(fit, sums):
    held = At(lambda trainer, _, batch, *__: batch.greedy.prompt.uid, "on_validation_batch_start")
    rows = [{**row, "uid": str(i)} for i, row in enumerate(sums[80:])]
    fit(callbacks=[held], val_data=rows, trainer={"limit_val_batches": 3, "max_epochs": 1})
    assert held.seen == ["0", "1", "2"]


def test_rloo_with_the_kl_in_the_reward(fit, tiny_model):
    recorder = Rounds()
    module = RLOOModule(tiny_model, learning_rate=1e-2, beta=0.5)
    trainer, *_ = fit(module, [recorder], trainer={"max_epochs": 2})
    first, second = recorder.rounds
    for completion in first.completions:  # nothing trained yet: policy and reference are one
        torch.testing.assert_close(completion.old_logprobs, completion.ref_logprobs)
    kl = torch.tensor([sum(c.old_logprobs) - sum(c.ref_logprobs) for c in second.completions])
    assert kl.abs().max() > 1e-3
    rewards = torch.tensor([c.scores[0] for c in second.completions]) - 0.5 * kl
    rewards = rewards.view(4, 4)
    expected = (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3).flatten()
    got = torch.tensor([c.advantage for c in second.completions])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    trained = got != 0
    tokens = torch.tensor([len(c.token_ids) for c in second.completions])
    mean = float(kl[trained].sum() / tokens[trained].sum())
    assert float(trainer.callback_metrics["kl"]) == pytest.approx(mean, rel=1e-3)
    trainer, *_ = fit(RLOOModule(tiny_model, beta=0.0), trainer={"max_epochs": 1})
    assert "kl" not in trainer.callback_metrics


def test_log_probs_of_the_engine_and_of_the_update_agree_on_vllm(fit):
    trainer, _, _ = fit(engine=VLLMEngine(), trainer={"max_epochs": 3})
    assert trainer.callback_metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert trainer.callback_metrics["sync/max_logp_diff"] < 1e-4


@pytest.mark.logs("digits")
def test_what_reward_functions_log_is_logged(fit, tmp_path):
    def talkative(prompts, completions, completion_ids, log_extra, log_metric, **kwargs):
        log_extra("first", [c[:1] for c in completions])
        log_metric("digits", sum(c.isdigit() for c in completions[0]))
        return [1.0]

    recorder = Rounds()
    trainer, _, _ = fit(
        callbacks=[recorder, RolloutLogger()],
        reward_funcs=[talkative],
        trainer={"default_root_dir": tmp_path, "max_epochs": 1},
    )
    texts = [c.text for c in recorder.rounds[0].completions]
    digits = sum(c.isdigit() for text in texts for c in text) / len(texts)
    assert trainer.callback_metrics["digits"] == pytest.approx(digits)
    rows = [json.loads(r) for r in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [row["first"] for row in rows] == [text[:1] for text in texts]


def test_a_reward_that_always_fails_stops_the_run_and_says_why(fit, caplog):
    def broken(prompts, completions, completion_ids, **kwargs):
        raise KeyError("solution")

    def no_opinion(completions, **kwargs):
        return [None] * len(completions)

    with pytest.raises(RuntimeError, match="None of the 16 completions of round 1 has") as error:
        fit(reward_funcs=[no_opinion, broken])
    assert "16 failed, and for 0 every" in str(error.value)
    assert "The first failure: `broken`: raised: KeyError: 'solution' (" in str(error.value)
    assert "test_datamodule.py:" in str(error.value)
    for callbacks, number in (([], 16), ([PromptBudget(2)], 8)):
        with pytest.raises(
            RuntimeError, match=rf"for {number} every reward function ret.* None\.$"
        ):
            fit(reward_funcs=[no_opinion], callbacks=callbacks)
    assert any("`broken`" in r.message and "KeyError" in r.message for r in caplog.records)


def test_validate_and_test_without_training(tiny_model, sums, digits, tmp_path):
    data = RolloutDataModule(
        sums[:80],
        [digits],
        val_data=sums[80:],
        engine=TransformersEngine(),
        max_completion_length=16,
    )
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    module = GRPOModule(tiny_model)
    (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    assert validated["val/greedy_accuracy"] == tested["test/greedy_accuracy"]
    assert validated["val/accuracy"] == validated["val/greedy_accuracy"]


def test_every_validation_draws_with_the_same_noise(fit, sums):
    settings = {"val_data": sums[80:], "val_num_generations": 2}
    trainer, module, data = fit(**settings)
    after = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
    (alone,) = trainer.validate(module, datamodule=data, verbose=False)
    assert trainer.global_step == 2 and {k: alone[k] for k in after} == pytest.approx(after)
    fresh = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (again,) = fresh.validate(module, datamodule=data, verbose=False)
    assert fresh.global_step == 0 and again == alone


def test_fitting_on_goes_on_where_it_was(fit, tiny_model, sums, digits, tmp_path):
    recorder = Rounds()
    trainer, module, data = fit(callbacks=[recorder], val_data=sums[80:])
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=data)
    uids = [g.prompt.uid for r in recorder.rounds for g in r.groups]
    assert len(recorder.rounds) == 4 and len(set(uids)) == 16


def test_testing_a_checkpoint_leaves_the_run_as_it_is(fit, sums, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "c", save_last=True, every_n_epochs=1)
    trainer, module, data = fit(
        callbacks=[checkpoint], val_data=sums[80:], trainer={"enable_checkpointing": True}
    )
    before = dict(data.run.counters)
    data.run.settings = replace(data.run.settings, num_generations=8)  # of no concern to a test
    trainer.test(module, datamodule=data, ckpt_path=tmp_path / "c" / "last.ckpt", verbose=False)
    assert dict(data.run.counters) == before and data.run.resumed is None


@pytest.mark.slow
def test_a_limit_on_batches_resumes_exactly_and_counts_what_it_cuts(fit, tmp_path):
    cut = {"limit_train_batches": 1, "enable_checkpointing": True}

    def run(epochs, folder, ckpt_path=None):
        checkpoint = ModelCheckpoint(tmp_path / folder, save_last=True, every_n_train_steps=1)
        return fit(
            callbacks=[RNGState(), checkpoint],
            steps_per_round=2,
            trainer={**cut, "max_epochs": epochs},
            ckpt_path=ckpt_path,
        )

    _, whole, data = run(4, "whole")
    run(2, "part")
    _, resumed, other = run(4, "part", tmp_path / "part" / "last.ckpt")
    assert torch.equal(vector(whole), vector(resumed))
    assert data.run.counters == other.run.counters
    assert data.run.counters["dropped/limit_train_batches"] == 4 * 8


def test_the_engine_sleeps_between_rollouts(fit, sums):
    class Sleeper(TransformersEngine):
        awake = None

        def wake(self):
            self.awake = True

        def sleep(self):
            self.awake = False

    engine, hooks = Sleeper(), ("on_train_batch_start", "on_validation_end")
    awake = At(lambda *_: engine.awake, *hooks)
    fit(
        callbacks=[awake],
        engine=engine,
        val_data=sums[80:],
        steps_per_round=2,
        trainer={"val_check_interval": 1},
    )
    assert awake.seen and not any(awake.seen)


def test_truncated_sampling_switches_importance_sampling_off(fit):
    with pytest.warns(UserWarning, match="importance sampling is off"):
        trainer, _, _ = fit(top_p=0.7)
    assert "sampling/importance_sampling_ratio/mean" not in trainer.callback_metrics
    assert trainer.callback_metrics["grad_norm"] > 0.1


def test_the_length_audit_sees_what_is_masked(fit):
    recorder = Rounds()
    fit(callbacks=[recorder], mask_truncated_completions=True)
    completions = recorder.rounds[0].completions
    kept = [len(c.token_ids) for c in completions if c.finish_reason == "stop"]
    drawn = sum(len(c.token_ids) for c in completions) / len(completions)
    audit = recorder.rounds[0].metrics["rollout/trained_over_drawn_length"]
    assert audit == pytest.approx(sum(kept) / len(kept) / drawn)
    assert audit < 1


def test_bf16_true_keeps_advantages_in_float32(fit, tiny_model):
    class Dtypes(GRPOModule):
        def loss(self, batch):
            assert batch.advantages.dtype == batch.rollout_logp.dtype == torch.float32
            return super().loss(batch)

    module = Dtypes(tiny_model, beta=0.1)
    # vLLM has weights and tables of its own: our own engine would share whatever is wrong
    trainer, _, _ = fit(module, engine=VLLMEngine(), trainer={"precision": "bf16-true"})
    assert module._reference[0].dtype == torch.bfloat16
    assert 1e-5 < trainer.callback_metrics["sync/max_logp_diff"] < 0.5
    assert torch.isfinite(trainer.callback_metrics["kl"])


@pytest.mark.slow
def test_a_run_without_end(fit):
    trainer, _, _ = fit(trainer={"max_epochs": -1, "max_time": {"seconds": 1}})
    assert trainer.global_step > 0


def test_engine_and_workers_are_closed_where_the_engine_does_not_start(fit):
    class Broken(TransformersEngine):
        def start(self, spec):
            raise OSError("no memory")

    before = set(psutil.Process().children())
    with pytest.raises(OSError, match="no memory"):
        fit(engine=Broken())
    assert set(psutil.Process().children()) <= before
