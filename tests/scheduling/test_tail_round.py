"""Tail batching: what a round takes, who wins, and what a long round is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def group(name, *scores, deferred=0, dropped=()):
    """One with a score for each completion; `None`: not scored yet."""
    completions = [
        Completion(
            i,
            [5] * (i + 1),
            [-1.0] * (i + 1),
            [(0, i + 1)],
            "stop",
            scores=None if score is None else [score],
            dropped="nonfinite_logprob" if i in dropped else None,
        )
        for i, score in enumerate(scores)
    ]
    return Group(f"{name}@0", Prompt(name, name, (1,)), Sampling(8), completions, deferred)


def fresh(n):
    return [group(f"f{i:02}", None, None) for i in range(n)]


def lost(n):
    return [group(f"l{i:02}", None, None, deferred=1 + i % 3) for i in range(n)]


def ready(names, **settings):
    return [group(name, 1.0, 0.0, **settings) for name in names]


def state_of(decoded, patient=True, finished=None, groups=5):
    done = sum(len(g.completions) for g in decoded)
    return RoundState(fresh(groups), decoded, done, finished or {}, patient=patient)


def names(groups):
    return "".join(g.prompt.uid for g in groups)


# What a round takes.


@pytest.mark.parametrize(
    ("ratio", "update", "raced"),
    [
        (1.25, 4, 5),
        (1.25, 8, 10),
        (1.25, 2, 3),
        (1.0, 4, 4),
        (1, 4, 4),
        (1.5, 3, 5),
        (1.1, 50, 55),  # 55.00000000000001
        (1.15, 100, 115),  # 114.99999999999999
        (1.4, 5, 7),
        (2.0, 1, 2),
        (1.01, 1, 2),
    ],
)
def test_a_ratio_is_rounded_up_and_float_noise_is_not(ratio, update, raced):
    rule = TailRound(update, 2, prompt_ratio=ratio)
    assert rule.most_prompts() == rule.fresh_prompts([]) == raced
    assert rule.ends_early == (raced > update)
    assert rule.most_deferred == (update - 1 if raced > update else 0)
    by_completion = TailRound(4, update, completion_ratio=ratio)
    assert by_completion.launched(update) == raced
    assert by_completion.stops_groups == (raced > update)
    assert TailRound(4, update).launched(update) == update


def test_a_short_round_takes_fresh_prompts_whatever_has_lost():
    rule = TailRound(4, 2)
    assert [rule.fresh_prompts(lost(n)) for n in range(4)] == [5, 5, 5, 5]
    assert names(rule.plan([*lost(3), *fresh(5)])) == names(fresh(5))


def test_a_long_round_takes_no_fresh_prompts():
    rule = TailRound(4, 2)
    assert [rule.fresh_prompts(lost(n)) for n in (4, 5, 9)] == [0, 0, 0]
    assert rule.fresh_prompts([*fresh(2), *lost(4)]) == 0
    assert names(rule.plan([*lost(4), *fresh(3)])) == names(lost(4))


def test_what_a_round_that_was_cut_short_has_drawn_is_taken_first():
    rule = TailRound(4, 2)
    assert [rule.fresh_prompts(fresh(n)) for n in (1, 4, 5, 7)] == [4, 1, 0, 0]
    assert rule.fresh_prompts([*lost(3), *fresh(2)]) == 3
    pool = [*fresh(3), *lost(2), *fresh(7)[3:]]
    assert names(rule.plan(pool)) == names(fresh(7)[:5])


def test_the_oldest_that_lost_come_first():
    rule = TailRound(3, 2)
    pool = [*fresh(1), *lost(5)]
    assert names(rule.plan(pool)) == "l00l01l02"
    assert names(rule.plan(pool[4:] + pool[1:4])) == "l03l04l00"  # the order of the pool
    assert rule.is_long(rule.plan(pool)) and not rule.is_long(rule.plan(pool[:3]))
    assert not rule.is_long([])
    assert rule.metrics(pool) == {"tail_batching/long_round": 1.0}


def test_a_cycle_ends_with_a_long_round():
    rule = TailRound(2, 2)
    assert rule.ends_cycle(lost(2), lost(1))
    assert rule.ends_cycle(fresh(3), [])
    assert not rule.ends_cycle(fresh(3), lost(1))


@pytest.mark.parametrize(("prompts", "ratio", "fits"), [(8, 1.25, True), (7, 1.25, False)])
def test_prompts_that_wait_and_those_that_race_must_be_there(prompts, ratio, fits):
    rule = TailRound(4, 2, ratio)
    if fits:
        return rule.check_enough(prompts)
    message = (
        r"up to 3 prompts waiting for a long round and 5 prompts in a race, and `train_data` "
        r"holds 7\. "
        r"Use a lower `prompts_per_round` or `prompt_ratio`\."
    )
    with pytest.raises(UsageError, match=message):
        rule.check_enough(prompts)


# Who wins.


def test_what_lost_again_counts_it():
    rule = TailRound(1, 2)
    a, b = group("a", 1.0, 0.0, deferred=3), group("b", None, None, deferred=2)
    _, left = rule.split([a, b], state_of([a]))
    assert [(g.prompt.uid, g.deferred) for g in left] == [("b", 3)]
    assert b.deferred == 2  # a copy


def test_a_round_with_patience_waits_for_those_that_are_ahead():
    rule = TailRound(2, 2)
    slow, a, b = group("s", 1.0, None), *ready("ab")
    state = state_of([slow, a, b])
    assert not rule.done(state) and rule.awaits(state)
    slow.completions[1].scores = [0.0]
    assert rule.done(state) and not rule.awaits(state)
    trained, left = rule.split([a, b, slow], state)
    assert names(trained) == "as" and names(left) == "b"


def test_without_patience_whoever_is_scored_overtakes():
    rule = TailRound(2, 2)
    slow, a, b = group("s", 1.0, None), *ready("ab")
    state = state_of([slow, a, b], patient=False)
    assert rule.done(state) and not rule.awaits(state)
    trained, left = rule.split([slow, a, b], state)
    assert names(trained) == "ab" and names(left) == "s"
    assert not rule.done(state_of([slow, a], patient=False))


def test_a_group_is_not_useless_before_its_last_score():
    """Its scores may yet say why it is dropped."""
    rule, half = TailRound(1, 2), group("h", 1.0, None, dropped=(0, 1))
    state = state_of([half, *ready("a")])
    assert rule.awaits(state) and not rule.done(state)


# Completions that race.


def race(update=2, size=2, **settings):
    return TailRound(update, size, completion_ratio=2, **settings)


def test_the_first_that_finished_are_enough_and_stand_in_their_places():
    rule, a = race(size=3), group("a", *[1.0] * 6)
    state = state_of([], finished={"a@0": [a.completions[i] for i in (4, 1)]})
    assert rule.enough(a, state) is None
    for last in (0, 5):
        state.finished["a@0"].append(a.completions[last])
        assert [c.index for c in rule.enough(a, state)] == [0, 1, 4]
        assert TailRound(2, 3).enough(a, state) is None, "only whole groups race"
    assert rule.enough(group("b", 1.0), state) is None


def test_a_group_without_spare_completions_does_not_race():
    rule, a = race(), group("a", 1.0, None)
    state = state_of([], True, {a.id: a.completions})
    state.planned = [a]
    assert not rule.awaits(state)


@pytest.mark.parametrize("patient", [True, False])
def test_bad_completions_do_not_race(patient):
    rule, a = race(), group("a", *[1.0] * 4, dropped=(2, 3))
    finished = {"a@0": [a.completions[i] for i in (3, 1, 2)]}
    assert rule.enough(a, state_of([], patient, finished)) is None
    finished["a@0"].append(a.completions[0])
    assert [c.index for c in rule.enough(a, state_of([], patient, finished))] == [0, 1]


def test_patience_with_single_completions():
    rule, a = race(), group("a", 1.0, None, 1.0, 1.0)
    patient = state_of([], True, {"a@0": [a.completions[i] for i in (1, 3, 0)]})
    hasty = state_of([], False, patient.finished)
    patient.planned = hasty.planned = [a]
    assert rule.enough(a, patient) is None and rule.awaits(patient)
    assert [c.index for c in rule.enough(a, hasty)] == [0, 3]
    assert not rule.awaits(hasty)
    a.completions[1].scores = [0.0]
    assert [c.index for c in rule.enough(a, patient)] == [1, 3]
    assert not rule.awaits(patient)


def test_what_lost_keeps_as_many_completions_as_are_trained_on():
    rule = race(update=1, size=2)
    a, b = group("a", 1.0, 0.0), group("b", None, None, None, None)
    b.completions = b.completions[1:]
    trained, left = rule.split([a, b], state_of([a]))
    assert names(trained) == "a" and [c.index for c in left[0].completions] == [1, 2]
    assert len(b.completions) == 3


def test_a_loser_may_get_back_what_was_stopped():
    rule, state = race(update=1, size=2), state_of(ready("a"))
    b = group("b", None, None, None)
    state.stopped = {b.id: b.completions[:1], "a@0": []}
    b.completions = b.completions[1:]
    _, (left,) = rule.split([*state.decoded, b], state)
    assert [c.index for c in left.completions] == [0, 1]


# Everything at once.
kinds = st.lists(st.sampled_from(["ready", "late", "useless"]), max_size=9)


@given(kinds, st.randoms(), st.integers(1, 4), st.booleans())
def test_settling_is_a_partition(kinds, random, update, patient):
    made = {
        "ready": lambda name: group(name, 1.0, 0.0),
        "late": lambda name: group(name, 1.0, None),
        "useless": lambda name: group(name, 1.0, 0.0, dropped=(0, 1)),
    }
    groups = [made[kind](str(i)) for i, kind in enumerate(kinds)]
    decoded = random.sample(groups, random.randint(0, len(groups)))
    rule, state = TailRound(update, 2), state_of(decoded, patient, groups=len(groups))
    trained, left = rule.split(groups, state)
    assert sorted(names(trained) + names(left)) == sorted(names(groups))
    assert names(trained) == "".join(sorted(names(trained)))
    assert names(left) == "".join(sorted(names(left)))
    useful = [g for g in trained if not all(c.dropped for c in g.completions)]
    assert len(useful) <= update and all(g.complete for g in trained)
    assert all(g.deferred == 1 for g in left) and not any(g.deferred for g in trained)
    of_value = [g for g in decoded if kinds[int(g.prompt.uid)] != "useless"]
    if patient:
        assert rule.done(state) == (
            len(of_value) >= update and all(g.complete for g in of_value[:update])
        )
    else:
        assert rule.done(state) == (sum(g.complete for g in of_value) >= update)
    if rule.done(state):
        first = [g for g in of_value if patient or g.complete][:update]
        assert sorted(names(useful)) == sorted(names(first))
