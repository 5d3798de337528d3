from functools import partial

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlsched.callbacks import (
    DynamicSampling,
    RNGState,
    RolloutCallback,
    TailBatching,
)
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.settings import UsageError

SMALL = {"num_generations": 2, "max_completion_length": 48, "micro_batch_tokens": 256}
"""Four prompts of two completions, about half of which end by themselves."""

FIVE = [False, False, False, False, True]
"""Which rounds are long where five prompts race and four win."""


class Recorder(RolloutCallback):
    """Keeps rounds, what was planned for them, and what they left."""

    def __init__(self):
        self.rounds, self.plans, self.pools = [], [], []

    def on_round_start(self, trainer, pl_module, plan):
        self.plans.append([g.copy() for g in plan])

    def on_round_end(self, trainer, pl_module, round):
        data = trainer.datamodule
        assert not data.run.session.worker.busy and not data.run.session.scorer.pending
        self.rounds.append(round)
        self.pools.append([g.copy() for g in data.run.pool])

    @property
    def long(self):
        return [bool(r.metrics["tail_batching/long_round"]) for r in self.rounds]

    @property
    def trained(self):
        return [g.id for r in self.rounds for g in r.groups]


def check(recorder, update=4, size=2, raced=5):
    """Whole updates of the newest policy, each prompt once, and the losers in order."""
    queue, seen = [], set()
    for r, plan, pool in zip(recorder.rounds, recorder.plans, recorder.pools, strict=True):
        long = len(queue) >= update
        assert r.metrics["tail_batching/long_round"] == long
        ids = [g.id for g in plan]
        if long:
            assert ids == queue[:update] == [g.id for g in r.groups]
            queue = queue[update:]
        else:
            assert len(ids) == raced and not set(ids) & seen
            won = [g.id for g in r.groups]
            assert len(won) == update and [i for i in ids if i in won] == won
            queue = queue + [i for i in ids if i not in won]
        seen |= set(ids)
        assert queue == [g.id for g in pool] and r.metrics["rollout/pool_prompts"] == len(queue)
        assert all(g.deferred == 1 and len(g.completions) == size for g in pool)
        assert not any(c.token_ids for g in (*plan, *pool) for c in g.completions)
        for g in r.groups:
            places = [c.index for c in g.completions]
            assert len(places) == size == len(set(places)) and places == sorted(places)
            assert all(c.finished and c.scored for c in g.completions)
            assert all(c.segments == [(r.version, len(c.token_ids))] for c in g.completions)
        assert not any(k.startswith("staleness/") for k in r.metrics)
    assert len(recorder.trained) == len(set(recorder.trained))
    assert set(recorder.trained) | set(queue) == seen
    return queue


# Short rounds and long ones.


def test_four_short_rounds_and_a_long_one(fit):
    recorder = Recorder()
    _, _, data = fit(callbacks=[recorder, TailBatching()], trainer={"max_epochs": 11}, **SMALL)
    check(recorder)
    assert recorder.long == [*FIVE, *FIVE, False]
    assert [len(pool) for pool in recorder.pools] == [1, 2, 3, 4, 0] * 2 + [1]
    assert [len(plan) for plan in recorder.plans] == [5, 5, 5, 5, 4] * 2 + [5]
    assert data.run.counters["num_completions"] == 11 * 8
    assert not [name for name in data.run.counters if name.startswith("dropped/")]
    # the long ones are what was put off, and put off is what is long
    lengths = [r.metrics["completions/mean_length"] for r in recorder.rounds]
    short = [n for n, long in zip(lengths, recorder.long, strict=True) if not long]
    assert min(n for n, long in zip(lengths, recorder.long, strict=True) if long) > min(short)


def hangs():
    """For the prompts with one answer."""

    def hangs(prompts, completions, completion_ids, answer, **kwargs):
        import time

        if answer[0] == "7":
            time.sleep(100)
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    return hangs


def test_a_reward_function_that_hangs_does_not_hold_a_short_round(fit, sums, monkeypatch):
    hasty = partial(TailRound, patience=0.2)
    monkeypatch.setattr("lit_rlsched.callbacks.rollpacker.TailRound", hasty)
    recorder = Recorder()
    rows = [*sums[7:8], *(row for row in sums[10:] if row["answer"] != "7")]
    settings = {
        **SMALL,
        "train_data": rows,
        "shuffle": False,
        "reward_funcs": [hangs()],
        "reward_workers": 3,
        "reward_timeout": 8.0,
    }
    _, _, data = fit(callbacks=[recorder, TailBatching()], trainer={"max_epochs": 1}, **settings)
    hung = recorder.plans[0][0]
    assert hung.prompt.columns["answer"] == "7"
    assert [g.id for g in recorder.rounds[0].groups] == [g.id for g in recorder.plans[0][1:]]
    assert [g.id for g in data.run.pool] == [hung.id]
    assert recorder.rounds[0].metrics["time/rollout"] < 8.0


# Quotas of domains.


def of_domains(rows, names="ab"):
    return [{**row, "domain": names[i % len(names)]} for i, row in enumerate(rows)]


def only_of_a():
    """A reward that differs inside prompts of the domain a alone."""

    def parity(prompts, completions, domain, **kwargs):
        return [
            float(len(text) % 2) if d == "a" else 1.0
            for text, d in zip(completions, domain, strict=True)
        ]

    return parity


def test_each_domain_has_its_quota(fit, sums):
    recorder = Recorder()
    tail = TailBatching(1.5, per_domain={"a": 0.75, "b": 0.25})
    fit(
        callbacks=[recorder, tail],
        trainer={"max_epochs": 8},
        train_data=of_domains(sums[:80]),
        **SMALL,
    )
    assert recorder.long.count(True) > 1
    for round, plan, long in zip(recorder.rounds, recorder.plans, recorder.long, strict=True):
        assert len(round.groups) == 4
        if not long:
            won = [g.prompt.columns["domain"] for g in round.groups]
            assert (won.count("a"), won.count("b")) == (3, 1)
            assert len(plan) == 5 + 2
    assert len(recorder.trained) == len(set(recorder.trained)) == 8 * 4


def test_a_prompt_is_replaced_by_one_of_its_domain(fit, sums):
    """Only prompts of `a` teach something."""
    recorder = Recorder()
    tail = TailBatching(per_domain={"a": 0.5, "b": 0.5})
    data = {"train_data": of_domains(sums[:80]), "reward_funcs": [only_of_a()], **SMALL}
    fit(callbacks=[recorder, tail, DynamicSampling(2)], trainer={"max_epochs": 1}, **data)
    (round,) = recorder.rounds
    replaced = [g for g in round.groups if all(c.dropped for c in g.completions)]
    assert "b" in {g.prompt.columns["domain"] for g in replaced}
    domains = [g.prompt.columns["domain"] for g in [*round.groups, *recorder.pools[0]]]
    assert domains.count("b") > 3, "more of b were drawn in place of those"


@pytest.mark.parametrize(
    ("per_domain", "names", "why"),
    [
        ({"a": 0.5, "b": 0.25}, "ab", "must add up to 1, but add up to 0.75"),
        ({"a": 1.5, "b": -0.5}, "ab", "per_domain=.*use more than 0"),
        ({"a": 0.5, "b": 0.5}, "abc", "has the domain 'c'.*gives no share"),
        ({"a": 0.9, "b": 0.1}, "ab", "leaves no prompt of 'b' in a round of 4"),
        ({"a": 0.5, "b": 0.5}, "aaaaaaaaaaaaaaaaaaaab", "prompts of 'b' at once.*has only 3"),
        ({"a": 0.5, "b": 0.5}, None, "needs a column `domain` in `train_data`"),
    ],
)
def test_domains_that_do_not_fit_are_refused(fit, sums, per_domain, names, why):
    rows = sums[:80] if names is None else of_domains(sums[:80], names)
    with pytest.raises(UsageError, match=why):
        fit(callbacks=[TailBatching(per_domain=per_domain)], train_data=rows, **SMALL)


@pytest.mark.slow
def test_a_pool_of_domains_is_resumed_with_the_same_domains(fit, sums, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)

    def run(epochs, per_domain, **more):
        fit(
            callbacks=[TailBatching(per_domain=per_domain), RNGState(), checkpoint],
            trainer={"max_epochs": epochs, "enable_checkpointing": True},
            train_data=of_domains(sums[:80]),
            **SMALL,
            **more,
        )

    run(3, {"a": 0.5, "b": 0.5})
    with pytest.raises(UsageError, match=r"the domains \['a', 'b'\], this run draws from one"):
        run(8, None, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
