"""Slots that idle at the end of a round begin the next one; rounds do not depend on drafts."""

import time

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from seen_rounds import Rounds, weights
from slow_parts import Sleepy, slowly

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    AdaptiveTimeouts,
    DownSampling,
    DrainFilling,
    DynamicSampling,
    LengthPrediction,
    MicroGroupSampling,
    RolloutCallback,
    SortedBatching,
    StreamedTraining,
    TailBatching,
)
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.scheduling.in_flight_updates import InFlight
from lit_rlsched.scheduling.sorted_batching import SortedSettings
from lit_rlsched.settings import UsageError
from lit_rlsched.training import draft_verifier
from lit_rlsched.training.prompt_rows import EncodedRows


def run(fit, model, *callbacks, drains=True, trainer=None, ckpt_path=None, rate=1e-2, **data):
    """Four rounds; returns what was seen, the trained weights and the data module."""
    seen = Rounds()
    on = [DrainFilling()] if drains else []
    _, module, datamodule = fit(
        GRPOModule(model, learning_rate=rate),
        [seen, *callbacks, *on],
        {"max_epochs": 5, **(trainer or {})},
        ckpt_path,
        **{"num_generations": 3, **data},
    )
    return seen, weights(module), datamodule


@pytest.mark.parametrize("pooled", [False, True])
def test_slots_that_a_round_leaves_free_begin_the_next_one(fit, tiny_model, pooled):
    sorting = [SortedBatching(pool_rounds=2, mode="partial"), MicroGroupSampling(slots=5)]
    callbacks = sorting if pooled else []
    seen, _, data = run(fit, tiny_model, *callbacks, max_completion_length=48)
    *rounds, last = seen.rounds
    begun = [r.metrics["rollout/drafts_begun"] for r in rounds]
    assert sum(begun) > 0 and "rollout/drafts_begun" not in last.metrics
    for round in rounds:
        drafts = round.metrics["rollout/draft_tokens"]
        assert bool(drafts) == bool(round.metrics["rollout/drafts_begun"])
        assert drafts <= round.metrics["rollout/tokens"]
        assert 0 <= round.metrics["rollout/useful_token_share"] <= 1
        assert 0 < round.metrics.get("pool/useful_token_share", 1) <= 1
    assert sum(r.metrics.get("drafts/tokens", 0) for r in seen.rounds) > 0
    if not pooled:
        told = [r.metrics.get("drafts/tokens", 0) for r in seen.rounds]
        assert told == [0, *(r.metrics["rollout/draft_tokens"] for r in rounds)]
        for round in seen.rounds:
            for c in round.completions:
                assert c.segments == [(round.version, len(c.token_ids))] and not c.attempts
        assert not list(data.run.pool)


def test_drafts_of_an_unchanged_policy_are_kept_whole(fit, tiny_model, monkeypatch):
    """Those of losers as well; some drafts of a prompt are read in one row."""
    read, states = [], draft_verifier.completion_states
    monkeypatch.setattr(
        draft_verifier, "completion_states", lambda p, *rows: read.append(rows) or states(p, *rows)
    )
    tail = TailBatching(1.5, completion_ratio=1.5, reuse_drafts=True)
    seen, _, _ = run(fit, tiny_model, tail, rate=0.0)
    shares = [
        r.metrics["drafts/accepted_share"] for r in seen.rounds if "drafts/tokens" in r.metrics
    ]
    assert shares and set(shares) == {1.0}
    assert any(rows.completion_rows is not None for rows in map(EncodedRows._make, read))


def test_a_run_does_not_depend_on_timing(fit, tiny_model, monkeypatch):
    """In the trainer's process and in one that runs ahead, which take any time."""
    settings = {"reward_funcs": [slowly()]}
    first = run(fit, tiny_model, engine=ProcessEngine(TransformersEngine()), **settings)
    update = GRPOModule.training_step

    def dawdle(self, *args):
        time.sleep(0.02)
        return update(self, *args)

    monkeypatch.setattr(GRPOModule, "training_step", dawdle)
    second = run(fit, tiny_model, engine=ProcessEngine(Sleepy()), **settings)
    third = run(fit, tiny_model, engine=Sleepy(), **settings)
    for seen, trained, _ in (second, third):
        assert seen.drawn == first[0].drawn
        # some CPUs' kernels round by where a tensor lies in memory
        torch.testing.assert_close(trained, first[1], rtol=0, atol=1e-6)


def test_a_resumed_run_is_the_same(fit, tiny_model, tmp_path):
    saver = ModelCheckpoint(tmp_path / "c", "{step}", save_top_k=-1, every_n_train_steps=1)
    on = {"enable_checkpointing": True}
    seen, whole, _ = run(fit, tiny_model, saver, trainer=on)
    for step in (1, 3):
        path = str(tmp_path / "c" / f"step={step}.ckpt")
        again, trained, _ = run(fit, tiny_model, ckpt_path=path)
        assert torch.equal(trained, whole), f"from step {step}"
        assert again.drawn == seen.drawn[-len(again.rounds) :]
        for now, then in zip(again.rounds, seen.rounds[-len(again.rounds) :], strict=True):
            assert not now.metrics.keys() ^ then.metrics.keys()
            for name in ("rollout/tokens", "rollout/draft_tokens", "pool/useful_token_share"):
                assert now.metrics.get(name) == then.metrics.get(name)


@pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param(lambda: [DynamicSampling(), TailBatching(1.5)], id="dynamic sampling"),
        pytest.param(lambda: [MicroGroupSampling(slots=5), LengthPrediction()], id="predictions"),
        pytest.param(lambda: [DownSampling(2), AdaptiveTimeouts()], id="selection"),
    ],
)
def test_other_callbacks(fit, tiny_model, callbacks):
    seen, _, _ = run(fit, tiny_model, *callbacks())
    assert sum(r.metrics.get("drafts/accepted_tokens", 0) for r in seen.rounds) > 0


@pytest.mark.slow
def test_gradients_are_streamed(fit, tiny_model):
    settings = {"engine": ProcessEngine(TransformersEngine()), "micro_batch_tokens": 64}
    settings["trainer"] = {"precision": "64-true"}
    seen, plain, _ = run(fit, tiny_model, **settings)
    again, streamed, _ = run(fit, tiny_model, StreamedTraining(start=0), **settings)
    assert again.drawn == seen.drawn
    torch.testing.assert_close(streamed, plain, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_several_engines(fit, tiny_model):
    seen, _, _ = run(fit, tiny_model, num_engines=2)
    assert all(r.metrics["rollout/drafts_begun"] for r in seen.rounds[:-1])
    crowded, _, _ = run(fit, tiny_model, MicroGroupSampling(slots=4), num_engines=2)
    assert not any(r.metrics["rollout/drafts_begun"] for r in crowded.rounds[:-1])


class Answers(RolloutCallback):
    """Keeps what validations draw."""

    def __init__(self):
        self.drawn = []

    def on_validation_batch_start(self, trainer, pl_module, item, *args):
        self.drawn.append([[*c.token_ids] for c in item.completions])


def validated(fit, model, sums, drains, *callbacks, **settings):
    answers, trainer = Answers(), {"num_sanity_val_steps": -1, **settings.pop("trainer", {})}
    seen, trained, data = run(
        fit,
        model,
        answers,
        *callbacks,
        drains=drains,
        trainer=trainer,
        val_data=sums[80:84],
        **settings,
    )
    return answers.drawn, seen, trained, data


@pytest.mark.slow
def test_slots_that_a_validation_leaves_free_begin_the_next_round(fit, tiny_model, sums):
    """It is the round's own policy, so all of them are kept; the validation is the same."""
    answers, seen, *_ = validated(fit, tiny_model, sums, drains=True)
    others, plain, *_ = validated(fit, tiny_model, sums, drains=False)
    assert answers[:4] == others[:4] and len(answers) == len(others) == 6 * 4
    first = seen.rounds[0].metrics
    assert first["drafts/tokens"] > 0 and first["drafts/accepted_share"] == 1
    assert "drafts/tokens" not in plain.rounds[0].metrics


def test_a_validation_in_the_middle_of_a_round_begins_nothing(fit, tiny_model, sums):
    """The next round begins with other weights."""
    data = {"steps_per_round": 2, "trainer": {"num_sanity_val_steps": 0, "val_check_interval": 1}}
    data["trainer"]["max_epochs"] = 2
    _, seen, *_ = validated(fit, tiny_model, sums, True, **data)
    other = {"steps_per_round": 2, "trainer": {"num_sanity_val_steps": 0, "max_epochs": 2}}
    _, after, *_ = validated(fit, tiny_model, sums, True, **other)
    assert seen.rounds[1].metrics["drafts/tokens"] == after.rounds[1].metrics["drafts/tokens"]


@pytest.mark.slow
def test_a_run_that_is_resumed_after_a_validation_is_the_same(fit, tiny_model, sums, tmp_path):
    saves = ModelCheckpoint(
        dirpath=tmp_path / "c", monitor="val/accuracy", mode="max", save_top_k=-1, filename="{step}"
    )
    trainer = {"enable_checkpointing": True}
    _, seen, trained, _ = validated(fit, tiny_model, sums, True, saves, trainer=trainer)
    path = str(tmp_path / "c" / "step=2.ckpt")
    _, again, others, _ = validated(fit, tiny_model, sums, True, ckpt_path=path)
    assert torch.equal(others, trained)
    assert again.drawn == seen.drawn[2:]


def test_a_memory_budget_without_races_is_fine(fit, tiny_model):
    run(fit, tiny_model, MicroGroupSampling(memory_budget=2**20))


@pytest.mark.parametrize(
    ("settings", "in_flight"), [((), InFlight()), ((1,), None)], ids=["in flight", "stale"]
)
def test_drafts_of_several_versions_are_refused(fit, settings, in_flight):
    """No callback of the package does this; a rule of one's own may."""

    class Own(RolloutCallback):
        def setup(self, trainer, pl_module, stage):
            rule = SortedSettings(2, mode="verified").rule(4, 4, "group")
            if settings:
                (rule.max_staleness,) = settings
            trainer.datamodule.run.schedule.rule = rule
            trainer.datamodule.run.schedule.in_flight = in_flight

    with pytest.raises(UsageError, match="tokens of several policy versions"):
        fit(callbacks=[Own()])
