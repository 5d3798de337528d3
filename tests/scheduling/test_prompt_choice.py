"""What is known of prompts, and which of them are drawn."""

import io
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.data.source import DomainSource
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.scheduling.prompt_choice import Chooser
from lit_rlsched.scheduling.prompt_statistics import DECAY, PRIOR, PromptStatistics
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.types import Completion, Group, Prompt, Sampling

RULES = st.sampled_from(["thompson", "skip_solved", "uniform"])


def group(uid, lengths):
    completions = [Completion(i, [7] * n) for i, n in enumerate(lengths)]
    return Group(f"{uid}@0", Prompt(uid, "", (1,)), Sampling(64), completions)


def observed(*rounds):
    """Statistics after rounds of prompts with their rewards."""
    statistics = PromptStatistics()
    for number, rewards in enumerate(rounds):
        groups = [group(uid, [2] * len(row)) for uid, row in rewards.items()]
        statistics.observe(number, groups, [*rewards.values()])
    return statistics


class Run:
    """Rounds of a pool whose prompts get rewards by chance."""

    def __init__(self, prompts, size, rule, explore, seed, domains=1):
        self.rule, self.statistics = FullRound(size), PromptStatistics()
        made = [Prompt(f"{i}", "", (1,), {"d": str(i % domains)}) for i in range(prompts)]
        self.prompts = {prompt.uid: prompt for prompt in made}
        self.pool = Pool(Sampling(8), 2, DomainSource(made, seed, True, None))
        self.pool.chooser = Chooser(rule, 0.5, explore, seed)
        self.pool.chooser.connect(self.statistics)
        self.seed, self.number = seed, 0

    def round(self):
        groups = self.pool.plan(self.rule)
        for completion in (c for g in groups for c in g.completions):
            completion.token_ids, completion.finish_reason = [7], "stop"
        noise = np.random.default_rng([self.seed, self.number])
        rewards = noise.integers(0, 2, (len(groups), 2)).astype(float).tolist()
        self.statistics.observe(self.number, groups, rewards)
        self.pool.commit(RoundResult(groups, groups, [], [], []), self.rule)
        self.number += 1
        return [g.id for g in groups]

    def state(self):
        file = io.BytesIO()
        torch.save([self.pool.state_dict(), self.statistics.state_dict()], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, state, number):
        self.pool.load_state_dict(state[0], self.prompts.__getitem__)
        self.statistics.load_state_dict(state[1])
        self.number = number


@given(st.data(), RULES, st.integers(1, 30), st.integers(0, 99))
def test_every_prompt_is_drawn_in_time_and_none_twice_in_a_round(data, rule, prompts, seed):
    size = data.draw(st.integers(1, prompts))
    explore = data.draw(st.sampled_from([0.1, 0.3, 1 / 3, 0.7, 1.0]))
    run, ids = Run(prompts, size, rule, explore, seed), []
    for _ in range(math.ceil(prompts / (explore * size))):
        drawn = run.round()
        assert len({name.partition("@")[0] for name in drawn}) == size == len(drawn)
        ids += drawn
    assert {name.partition("@")[0] for name in ids} == run.prompts.keys()
    assert len({*ids}) == len(ids)  # each draw has a name of its own
    in_order = [name for name in ids if "@c" not in name]
    assert len(in_order) == (len(ids) if rule == "uniform" else int(len(ids) * explore + 1e-9))
    plain = DomainSource([*run.prompts.values()], seed, True, None)
    assert in_order[:prompts] == [draw.key for draw in plain.draw(prompts)][: len(in_order)]


@given(RULES, st.integers(0, 5), st.integers(0, 99))
def test_a_choice_goes_on_from_a_checkpoint(rule, rounds, seed):
    run = Run(12, 4, rule, 0.25, seed)
    for _ in range(rounds):
        run.round()
    other = Run(12, 4, rule, 0.25, seed)
    other.load(run.state(), run.number)
    assert [run.round() for _ in range(4)] == [other.round() for _ in range(4)]


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.3, math.nan]), max_size=5), max_size=6))
def test_sums_by_their_definition(rows):
    """Each completion with its weight."""
    rounds = [{"a": row, "b": [1.0]} for row in rows]
    statistics = observed(*rounds)
    later = [sum(map(len, rows[i + 1 :])) for i in range(len(rows))]
    pairs = [(r, DECAY**n) for row, n in zip(rows, later, strict=True) for r in row if r == r]
    known, weights = [r for r, _ in pairs], [w for _, w in pairs]
    record = statistics.prompts["a"] if rows else None
    if record is not None:
        assert record.scored == pytest.approx(sum(weights))
        assert record.reward == pytest.approx(sum(np.multiply(weights, known)))
        assert record.square == pytest.approx(sum(np.multiply(weights, np.square(known))))
        assert (record.groups, record.round) == (len(rows), len(rows) - 1)
        of_run = statistics.run.reward / statistics.run.scored
        expected = (record.reward + PRIOR * of_run) / (record.scored + PRIOR)
        assert statistics.means(["a", "new"]) == pytest.approx([expected, of_run])
    assert statistics.binary == (0.3 not in known)


def test_equal_rewards_are_counted_until_they_differ():
    rounds = [{"a": [1.0, 1.0]}, {"a": [0.0, 0.0]}, {"a": [math.nan] * 2}, {"a": [0.0, 1.0]}]
    counts = [observed(*rounds[:n]).equal(["a", "new"]).tolist() for n in range(5)]
    assert counts == [[0, 0], [1, 0], [2, 0], [2, 0], [0, 0]]


def test_a_success_rate_has_the_law_of_its_posterior():
    statistics, noise = observed({"a": [1.0, 0.0, 1.0, 1.0]}), np.random.default_rng(0)
    record = statistics.prompts["a"]
    good, bad = 1 + record.reward, 1 + record.scored - record.reward
    drawn = statistics.sample_success(["a"] * 20_000 + ["new"] * 20_000, noise).reshape(2, -1)
    mean = good / (good + bad)
    assert drawn[0].mean() == pytest.approx(mean, abs=0.01)
    assert drawn[0].var() == pytest.approx(mean * (1 - mean) / (good + bad + 1), rel=0.05)
    assert drawn[1].mean() == pytest.approx(0.5, abs=0.01)
    assert drawn[1].var() == pytest.approx(1 / 12, rel=0.05)


def chosen(statistics, uids, rule="thompson", target=0.5, times=4000):
    """How often each prompt is the one that is chosen."""
    counts = dict.fromkeys(uids, 0)
    for seed in range(times):
        chooser = Chooser(rule, target, 0.001, seed)
        chooser.connect(statistics)
        assert chooser.explored(0, 1) == 0
        counts[uids[chooser.choose(uids, (), 1, None, 0)[0]]] += 1
    return {uid: count / times for uid, count in counts.items()}


def test_prompts_near_the_target_are_chosen():
    rounds = [{"solved": [1.0] * 8, "half": [0.0, 1.0] * 4, "hopeless": [0.0] * 8}] * 5
    uids, statistics = [*rounds[0]], observed(*rounds)
    assert chosen(statistics, uids, times=200)["half"] > 0.9
    assert chosen(statistics, uids, target=1.0, times=200)["solved"] > 0.9
    share = chosen(statistics, [*uids, "new"], times=2000)
    assert share["new"] > 0.05 and share["half"] > share["new"]


def test_other_rewards_are_chosen_by_their_spread():
    rounds = [{"same": [2.5] * 8, "wide": [0.0, 7.0] * 4, "narrow": [3.0, 3.5] * 4}] * 5
    uids, statistics = [*rounds[0]], observed(*rounds)
    assert not statistics.binary
    assert chosen(statistics, uids, times=200)["wide"] == 1
    assert chosen(statistics, [*uids, "new"], times=2000)["new"] > 0.05


def test_a_prompt_is_passed_over_by_the_number_of_times_without_a_signal():
    statistics = observed({"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 1.0]}, {"a": [1.0, 1.0]})
    assert statistics.equal("abc").tolist() == [2, 1, 0]
    share = chosen(statistics, ["a", "c"], "skip_solved")
    # it comes first with chance 1/2, and is not passed over with chance 1/4
    assert share["a"] == pytest.approx(1 / 8, abs=0.02)
    assert chosen(statistics, ["b", "c"], "skip_solved")["b"] == pytest.approx(1 / 4, abs=0.02)


@pytest.mark.parametrize("rule", ["thompson", "skip_solved"])
def test_if_nothing_teaches_prompts_come_at_random_and_it_is_said_once(rule):
    statistics = observed({"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 1.0]})
    chooser = Chooser(rule, 0.5, 0.1, 0)
    chooser.connect(statistics)
    with pytest.warns(UserWarning, match="of the 3 prompts had equal rewards.*harder or easier"):
        assert 1 not in chooser.choose(["a", "b", "c"], {1}, 2, None, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chooser.choose(["a", "b", "c"], (), 2, None, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        share = chosen(statistics, ["a", "b", "c"], rule)
    assert all(each == pytest.approx(1 / 3, abs=0.03) for each in share.values())


def test_what_is_left_teaching_nothing_is_no_warning(recwarn):
    """Prompts that teach may be taken already, by a window."""
    statistics = observed({"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 1.0]})
    chooser = Chooser("thompson", 0.5, 0.1, 0)
    chooser.connect(statistics)
    assert sorted(chooser.choose("abc", {2}, 2, None, 0)) == [0, 1]
    assert not recwarn.list


def test_single_completions_are_not_equal():
    statistics = observed(*[{"a": [1.0], "b": [0.0]}] * 4)
    assert not statistics.equal("ab").any()
    share = chosen(statistics, [*"ab"], target=1.0, times=500)
    assert share["a"] > 0.9


@given(RULES, RULES, st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.1, 0.5, 1.0]))
def test_a_resumed_run_may_choose_otherwise(rule, other_rule, explore, other_explore):
    run = Run(12, 4, rule, explore, 0)
    for _ in range(3):
        run.round()
    other = Run(12, 4, other_rule, other_explore, 0)
    other.load(run.state(), run.number)
    for _ in range(10):
        drawn = other.round()
        assert len(drawn) == 4 == len({name.partition("@")[0] for name in drawn})
    share = 1.0 if other_rule == "uniform" else other_explore
    in_order = sum("@c" not in name for _ in range(5) for name in other.round())
    assert abs(in_order - 20 * share) <= 1


def test_the_prompts_trained_on_last_are_remembered(monkeypatch):
    monkeypatch.setattr("lit_rlsched.scheduling.prompt_statistics.MOST", 2)
    statistics = observed({"a": [1.0]}, {"b": [1.0]}, {"a": [0.0]}, {"c": [1.0]})
    assert [*statistics.prompts] == ["a", "c"]
