"""Weights that change while completions are drawn: each token has the log-prob of its version."""

import copy
import os
import random
import signal
import time

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from seen_rounds import At, Rounds, vector
from slow_parts import slowly

from examples.own_engine import PlainEngine
from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    InFlightUpdates,
    RolloutLogger,
)
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.rollout.meetings import Meetings
from lit_rlsched.settings import UsageError
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.round_metrics import cache_divergence

STEPS = 2


class Policies(Rounds):
    """Keeps the policy of each version, too."""

    def __init__(self):
        super().__init__()
        self.policies = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.policies.setdefault(trainer.global_step, copy.deepcopy(pl_module.model).eval())

    on_train_start = on_train_batch_end

    @property
    def drawn(self):
        logprobs = [[x for c in r.completions for x in c.logprobs] for r in self.rounds]
        return [*zip(super().drawn, logprobs, strict=True)]


def run(fit, tiny_model, *callbacks, how=None, trainer=None, ckpt_path=None, decoder=None, **data):
    seen = Policies()
    how = {"turns": 3, "max_staleness": 2, **(how or {})}
    _, module, _ = fit(
        GRPOModule(tiny_model, learning_rate=1e-2),
        [*callbacks, InFlightUpdates(**how), seen],
        {"max_epochs": 4, **(trainer or {})},
        ckpt_path,
        engine=ProcessEngine(decoder or TransformersEngine()),
        **{"num_generations": 3, "steps_per_round": STEPS, **data},
    )
    return seen, vector(module)


@torch.no_grad()
def logprobs(policy, group, completion):
    prompt = group.prompt.token_ids
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    sizes = torch.tensor([len(prompt)]), torch.tensor([len(completion.token_ids)])
    return completion_logprobs(policy, ids, *sizes, temperature=1.0)[0][0]


def gaps_of(seen, group, completion):
    """How far the log-prob of each token is from that of the policy of its version."""
    spans = completion.segments
    versions = [version for version, tokens in spans for _ in range(tokens)]
    expected = {v: logprobs(seen.policies[v], group, completion) for v, _ in spans}
    drawn = enumerate(zip(completion.logprobs, versions, strict=True))
    return [abs(logp - float(expected[version][i])) for i, (logp, version) in drawn]


@pytest.mark.mostly_slow("TransformersEngine")
@pytest.mark.parametrize("decoder", [TransformersEngine, VLLMEngine])
def test_each_token_was_drawn_by_its_version(fit, tiny_model, decoder):
    seen, _ = run(fit, tiny_model, decoder=decoder())
    gaps, several = [], 0
    for round in seen.rounds:
        assert len(round.groups) == 4, "an update's prompts, as no two are ready in the same turn"
        for group in round.groups:
            for completion in group.completions:
                spans = completion.segments
                versions = [version for version, tokens in spans for _ in range(tokens)]
                assert versions == sorted(versions) and len(versions) == len(completion.token_ids)
                assert 0 <= round.version - versions[0] <= 2 * STEPS
                several += len(spans) > 2
                gaps += gaps_of(seen, group, completion)
    assert max(gaps) < 1e-4
    assert several > 4, "the weights have changed twice while they were drawn"
    first, *later = (round.metrics for round in seen.rounds)
    assert "in_flight/updates" not in first
    for metrics in later:
        assert 1 <= metrics["in_flight/updates"] <= STEPS
        assert metrics["in_flight/engine_wait_seconds"] >= 0
        assert metrics["in_flight/trainer_wait_seconds"] >= 0
        assert 0 < metrics["staleness/mean"] <= 2 * STEPS
    assert seen.rounds[-1].metrics["rollout/pool_prompts"] > 0, "others were still being drawn"


@pytest.mark.mostly_slow("TransformersEngine")
@pytest.mark.parametrize("decoder", [TransformersEngine, VLLMEngine])
def test_what_would_be_too_old_is_verified(fit, tiny_model, decoder):
    """Each token is then of the version that verified it, or was drawn since."""

    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    how = {"max_staleness": 1, "too_old": "verify"}
    seen, _ = run(fit, tiny_model, decoder=decoder(), how=how, reward_funcs=[length])
    verified, several, gaps = 0, 0, []
    for round in seen.rounds:
        verified += round.metrics.get("drafts/tokens", 0)
        assert "dropped/stale" not in round.metrics or not round.metrics["dropped/stale"]
        for group in round.groups:
            for completion in group.completions:
                assert completion.scores == [float(len(completion.text))]
                spans = completion.segments
                assert sum(tokens for _, tokens in spans) == len(completion.token_ids)
                assert 0 <= round.version - spans[0][0] <= STEPS
                several += len(spans) > 1
                gaps += gaps_of(seen, group, completion)
    assert max(gaps) < 1e-4
    assert verified > 20 and several > 4
    assert sum("time/drafts" in round.metrics for round in seen.rounds) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_staleness": 1, "too_old": "verify"}])
def test_a_run_does_not_depend_on_timing_and_a_resumed_run_is_the_same(
    fit, tiny_model, tmp_path, monkeypatch, settings
):
    """From the middle of a round and from its end: with a round that was drawn in part."""
    on = {"enable_checkpointing": True}

    def run_once(saver, **more):
        arguments = {"how": settings, "trainer": on, "reward_funcs": [slowly()], **more}
        return run(fit, tiny_model, saver, **arguments)

    saver = ModelCheckpoint(tmp_path / "c", "{step}", save_top_k=-1, every_n_train_steps=3)
    seen, whole = run_once(saver)
    assert settings == {} or any("drafts/tokens" in round.metrics for round in seen.rounds)
    update = GRPOModule.training_step

    def dawdle(self, *args):
        time.sleep(random.random() * 0.1)
        return update(self, *args)

    monkeypatch.setattr(GRPOModule, "training_step", dawdle)
    saver = ModelCheckpoint(tmp_path / "d", "{step}", save_top_k=-1, every_n_train_steps=3)
    again, same = run_once(saver)
    assert again.drawn == seen.drawn and torch.equal(same, whole)
    for step in (3, 6):
        path = str(tmp_path / "c" / f"step={step}.ckpt")
        saver = ModelCheckpoint(tmp_path / "e", "{step}", save_top_k=-1, every_n_train_steps=3)
        rest, same = run_once(saver, ckpt_path=path)
        assert rest.drawn == seen.drawn[-len(rest.rounds) :]
        assert torch.equal(same, whole), f"from step {step}"
        for now, then in zip(rest.rounds, seen.rounds[-len(rest.rounds) :], strict=True):
            assert not now.metrics.keys() ^ then.metrics.keys()
            assert now.metrics["rollout/tokens"] == then.metrics["rollout/tokens"]


def test_a_free_run_is_replayed(fit, tiny_model, tmp_path, monkeypatch):
    """It meets the trainer at any turns; which ones is in the traces."""
    chance, free = random.Random(1), {"pace": "free", "turns": 2}
    with monkeypatch.context() as patched:
        patched.setattr(Meetings, "_stops", lambda self, turn: chance.random() < 0.3)
        logger = CSVLogger(tmp_path / "run", name="", version="")
        saving = RolloutLogger(report_every_n_rounds=99)
        seen, whole = run(fit, tiny_model, saving, how=free, trainer={"logger": logger})
    updates = [update for round in seen.rounds for update in round.trace.updates]
    assert len({turn for _, turn, _ in updates}) > 2
    assert all(turn % 2 == 0 and 1 <= new - began <= STEPS for began, turn, new in updates)
    replay = str(tmp_path / "traces")
    again, same = run(fit, tiny_model, how={**free, "replay": replay})
    assert again.drawn == seen.drawn and torch.equal(same, whole)
    assert updates == [update for round in again.rounds for update in round.trace.updates]
    with pytest.raises(UsageError, match=r"holds no traces. Give the folder of a run"):
        InFlightUpdates(pace="free", replay=str(tmp_path / "none"))


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_caches_of_older_weights_change_what_is_drawn(fit, tiny_model, cache, monkeypatch):
    """By how much is logged, and nothing of it where they are recomputed."""
    if cache == "recompute":  # which does not measure it
        monkeypatch.setattr(
            InFlightUpdates,
            "on_round_end",
            lambda self, trainer, module, round: round.metrics.update(
                cache_divergence(round, trainer.datamodule.run.startup.policy_reader, 1.0)
            ),
        )
    seen, _ = run(fit, tiny_model, how={"cache": cache}, trainer={"max_epochs": 3})
    found = [r.metrics["in_flight/cache_kl"] for r in seen.rounds[1:]]
    assert len(found) == 2
    assert max(found) < 1e-9 if cache == "recompute" else min(found) > 1e-7
    versions = [v for r in seen.rounds for c in r.completions for v, _ in c.segments]
    assert {*versions} == {0, 1, 2, 3, 4}


def test_an_engine_that_dies_after_an_update_goes_on_with_its_weights(fit, tiny_model, tmp_path):
    """The noise of this engine has no state, so what is drawn is what would have been drawn."""
    seen, _ = run(fit, tiny_model, trainer={"max_epochs": 3})

    def kill(trainer, *_):
        if trainer.global_step == 3:
            os.kill(trainer.datamodule.run.settings.engine.pid, signal.SIGKILL)

    kills = At(kill, "on_train_batch_end")
    # a checkpoint at the end of a round changes nothing either
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=STEPS)
    trainer = {"max_epochs": 3, "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="another one takes its place"):
        again, _ = run(fit, tiny_model, kills, saver, trainer=trainer)
    for (same, logprobs), (drawn, found) in zip(seen.drawn, again.drawn, strict=True):
        assert drawn == same and found == pytest.approx(logprobs, abs=1e-4)


def test_an_engine_that_cannot_go_on_with_a_cache_is_refused(fit):
    with pytest.raises(UsageError, match="engine=ProcessEngine`: this engine cannot go on"):
        fit(callbacks=[InFlightUpdates(cache="keep")], engine=ProcessEngine(PlainEngine()))
