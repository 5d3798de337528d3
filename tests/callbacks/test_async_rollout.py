"""Rounds drawn during the update: each token has the log-prob of its version, and a bounded age."""

import random
import threading
import time

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from seen_rounds import At, Policies, Rounds, vector
from slow_parts import slowly

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    AsyncRollout,
    RoundCheckpoint,
)
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.remote import RemoteWorker
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.training.schedule import RunFacts

STEPS = 2


class Seen(Policies):
    """The log-probs of what was drawn, too."""

    @property
    def drawn(self):
        logprobs = [[x for c in r.completions for x in c.logprobs] for r in self.rounds]
        return [*zip(super().drawn, logprobs, strict=True)]


def run(fit, tiny_model, *callbacks, how=None, trainer=None, ckpt_path=None, decoder=None, **data):
    seen = Seen()
    _, module, datamodule = fit(
        GRPOModule(tiny_model, learning_rate=1e-2),
        [*callbacks, AsyncRollout(**(how or {})), seen],
        {"max_epochs": 5, **(trainer or {})},
        ckpt_path,
        engine=ProcessEngine(decoder or TransformersEngine()),
        **{"num_generations": 3, "steps_per_round": STEPS, "prompts_per_round": 2, **data},
    )
    return seen, vector(module), datamodule


@pytest.mark.mostly_slow("how0-TransformersEngine")
@pytest.mark.parametrize("decoder", [TransformersEngine, VLLMEngine])
@pytest.mark.parametrize(
    "how", [{"max_staleness": 1}, {}, {"max_staleness": 3, "too_old": "wait"}, {"too_old": "wait"}]
)
def test_each_token_was_drawn_by_its_version_and_none_is_too_old(fit, tiny_model, how, decoder):
    tails = {"max_completion_length": 100}  # cut at 24, groups end together, and none gets too old
    seen, _, data = run(fit, tiny_model, decoder=decoder(), how=how, **tails)
    most, gaps, ages = how.get("max_staleness", 2), [], set()
    for round in seen.rounds:
        assert len(round.groups) == 2 and not round.metrics.get("dropped/stale")
        for group in round.groups:
            for c in group.completions:
                versions = [version for version, tokens in c.segments for _ in range(tokens)]
                assert versions == sorted(versions) and len(versions) == len(c.token_ids)
                ages.add(round.version - versions[0])
                gaps += seen.gaps(group, c)
    assert max(gaps) < 1e-4 and max(ages) <= most * STEPS
    first, *later = seen.metrics
    assert "async_rollout/wait_seconds" not in first
    for metrics in later:
        assert metrics["async_rollout/rollout_seconds"] > 0 <= metrics["async_rollout/wait_seconds"]
        assert metrics["async_rollout/engine_wait_seconds"] >= 0
        assert STEPS <= metrics["staleness/mean"] <= most * STEPS
    verified = sum(m.get("drafts/tokens", 0) for m in seen.metrics)
    assert bool(verified) == (how.get("too_old") != "wait") and (most != 1 or verified)
    # hooks have seen what is trained on, once
    trained = [id(c) for r in seen.rounds for c in r.completions]
    assert sorted(trained) == sorted(map(id, seen.completions)) and len({*trained}) == len(trained)
    told = [{*seen.groups[i : i + 2]} for i in range(0, len(seen.groups), 2)]
    assert told == [{g.id for g in r.groups} for r in seen.rounds], "in the order of decoding"
    assert data.run.counters["num_completions"] == 5 * 6


def test_one_step_off_trains_on_whole_rounds_that_are_one_round_older(fit, tiny_model):
    seen, _, data = run(
        fit, tiny_model, how={"max_staleness": 1, "prompts_in_flight": 2, "too_old": "wait"}
    )
    for number, round in enumerate(seen.rounds):
        drew = max(0, number - 1) * STEPS
        assert {c.segments[0] for c in round.completions} == {
            (drew, len(c.token_ids)) for c in round.completions
        }
    assert not [*data.run.pool]
    both = [g for r in seen.rounds[:2] for g in r.groups]
    assert len({g.id for g in both}) == 4, "no prompt comes twice under the first version"


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"max_staleness": 1}, {"too_old": "wait"}])
def test_a_run_does_not_depend_on_timing_and_a_resumed_run_is_the_same(
    fit, tiny_model, tmp_path, monkeypatch, how
):
    """From the middle of a round and from its end, with a round that was drawn beside it."""
    on = {"enable_checkpointing": True}

    def once(folder, **more):
        saver = ModelCheckpoint(tmp_path / folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        return run(fit, tiny_model, saver, how=how, trainer=on, reward_funcs=[slowly()], **more)

    seen, whole, _ = once("c")
    update = GRPOModule.training_step

    def dawdle(self, *args):
        time.sleep(random.random() * 0.1)
        return update(self, *args)

    monkeypatch.setattr(GRPOModule, "training_step", dawdle)
    again, same, _ = once("d")
    assert again.drawn == seen.drawn and torch.equal(same, whole)
    for step in (3, 6):
        rest, same, _ = once("e", ckpt_path=str(tmp_path / "c" / f"step={step}.ckpt"))
        assert rest.drawn == seen.drawn[-len(rest.rounds) :]
        assert torch.equal(same, whole), f"from step {step}"


def test_a_round_that_was_drawn_beside_is_dropped_without_the_callback(fit, tiny_model, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=STEPS)
    run(fit, tiny_model, saver, trainer={"enable_checkpointing": True})
    plain = Rounds()
    fit(
        GRPOModule(tiny_model, learning_rate=1e-2),
        [plain],
        {"max_epochs": 3},
        str(tmp_path / f"step={2 * STEPS}.ckpt"),
        num_generations=3,
        steps_per_round=STEPS,
        prompts_per_round=2,
    )
    (round,) = plain.rounds
    assert all(c.segments == [(round.version, len(c.token_ids))] for c in round.completions)
    assert plain.counters[0]["num_discarded_tokens"] > 0


def test_an_error_in_training_ends_the_rollout_beside_it(fit, tiny_model):
    sessions = []

    def fail(trainer, *_):
        sessions.append(trainer.datamodule.run.session)
        if trainer.global_step == STEPS + 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fit, tiny_model, At(fail, "on_train_batch_end"))
    assert all(thread.name != "rollout_0" for thread in threading.enumerate())
    assert sessions[-1].engine.pid is None


def test_an_error_beside_training_is_raised(fit, tiny_model, monkeypatch):
    advance, main = RemoteWorker.advance, threading.main_thread()

    def breaks(self, most=None):
        if threading.current_thread() is not main:
            raise ZeroDivisionError
        return advance(self, most)

    monkeypatch.setattr(RemoteWorker, "advance", breaks)
    with pytest.raises(ZeroDivisionError):
        run(fit, tiny_model)


def test_saving_is_not_charged_for_the_rollout(fit, tiny_model, tmp_path, monkeypatch):
    """What a save costs decides how rare the next ones are."""
    saver, waits = RoundCheckpoint(tmp_path), []
    save = Trainer.save_checkpoint

    def note(trainer, *args, **kwargs):
        waits.append(trainer.datamodule.run.ahead is not None)
        return save(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "save_checkpoint", note)
    run(fit, tiny_model, saver, trainer={"enable_checkpointing": True})
    assert waits and not any(waits)


def sizes(facts, **how):
    rule = make_schedule([AsyncRollout(**how)], facts).rule
    return rule.prompts, rule.overtakes, rule.max_staleness, rule.verifies_from


def test_defaults(fit, tiny_model):
    _, _, data = run(fit, tiny_model, trainer={"max_epochs": 1})
    facts = RunFacts(data.run.settings)  # two prompts a round, two steps
    assert sizes(facts)[::3] == (6, 3) and sizes(facts)[2] == 4
    assert sizes(facts, too_old="wait") == (3, 1, 4, None)
    assert sizes(facts, max_staleness=1)[::3] == (4, 1)
    assert sizes(facts, max_staleness=1, too_old="wait") == (2, 0, 2, None)
    assert sizes(RunFacts(data.run.settings, sharded="FSDP2Strategy")) == (3, 1, 4, None)
    assert sizes(facts, prompts_in_flight=5, max_staleness=3, too_old="wait") == (5, 1, 6, None)
