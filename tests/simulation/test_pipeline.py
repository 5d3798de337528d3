"""Seconds of rounds by hand: what waits for what, what overlaps, and what drafts cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.simulation.costs import Costs, StepCosts
from lit_rlsched.simulation.peers import PEERS, FirstReadyRound
from lit_rlsched.simulation.pipeline import Machine, Pipeline
from lit_rlsched.simulation.workload import Length, Workload
from lit_rlsched.training.schedule import Schedule

UNIT = StepCosts(base=1.0, running=0.0, kv=0.0, prefill=0.0)
TOKENS, PROMPT = 8, 10
NOTHING = {"update": 0.0, "position": 0.0, "verify": 0.0, "sync": 0.0, "other": 0.0}


EIGHT = Machine(8)


def outcome(schedule, lengths, number, machine=EIGHT, step=UNIT, steps=1, limit=99, **costs):
    """Rounds of prompts with these completions, two to a prompt."""
    work = Workload(lengths, [PROMPT] * len(lengths), limit)
    costs = Costs(step, **NOTHING | costs)
    return Pipeline(schedule, work, costs, machine, len(lengths[0]), steps).run(number)


@pytest.mark.parametrize(
    ("slowdown", "expected"),
    [(1.0, 8.0), (1.5, 8 + 0.5 * 5), (2.0, 13.0)],
)
def test_both_are_slower_while_both_work(slowdown, expected):
    """At a slowdown of 2 nothing is gained: 8 and 5 seconds one after the other."""
    schedule = PEERS["one_step_off"].schedule(2)
    machine = Machine(8, slowdown=slowdown)
    found = outcome(schedule, [[8, 8]], 4, machine, update=5.0, sync=1.0)
    assert [each.seconds for each in found.rounds[1:]] == [expected + 1] * 3
    assert found.rounds[0].seconds == expected + 8 + 1  # with the first rollout
    assert [each.ages for each in found.rounds] == [{0: 32}, {1: 32}, {1: 32}, {1: 32}]


@pytest.mark.parametrize(("steps", "updates"), [(1, 5.0), (3, 15.0)])
def test_an_update_has_its_optimizer_steps(steps, updates):
    found = outcome(Schedule(FullRound(2)), [[8, 8]], 2, steps=steps, update=5.0)
    assert [each.seconds for each in found.rounds] == [8 + updates] * 2
    assert found.stale_share == 0


def test_gradients_are_computed_once_places_are_certain():
    """Prompts end in steps 2, 4 and 9; gradients of the first two take until 8.5. In a run a place
    is certain one step later, and the simulated engine's next step may be far away."""
    schedule = Schedule(FullRound(3), streaming=0.2)
    found = outcome(schedule, [[2, 2], [4, 4], [9, 9]], 1, position=1 / 8)
    assert found.rounds[0].seconds == pytest.approx(9 + 2 * (PROMPT + 9) / 8)


class Verified(FirstReadyRound):
    """What is not ready is a draft for the next round."""

    def __init__(self, update_prompts, prompts):
        super().__init__(update_prompts, prompts)
        self.max_staleness, self.verifies_from = None, 1


@pytest.mark.parametrize(
    ("accepted", "kept", "passes"), [(1.0, 3, 1), (0.0, None, 2), ((0.0, 1.0), None, 2)]
)
def test_what_a_draft_costs(accepted, kept, passes):
    """Two prompts of one completion; the second has 3 of 7 tokens when the first is ready.

    A draft that is cut is read by the policy that drew it, too.
    """
    lengths = [[3], [7], [9], [9]]
    machine = Machine(8, accepted=accepted)
    first, second = outcome(Schedule(Verified(1, 2)), lengths, 2, machine, verify=1.0).rounds
    assert first.seconds == first.decode_steps == 3 and first.around == 0
    assert second.around == passes * (PROMPT + 3)
    if kept is not None:
        assert second.decode_steps == 7 - kept
    else:
        assert 4 < second.decode_steps <= 7
    assert second.ages == {0: 7} and second.discarded_tokens == 3 - (7 - second.decode_steps)


def test_each_policy_that_drew_a_draft_reads_it_if_it_is_cut():
    """A prompt of 99 tokens goes on for two rounds; verified from an age of two on."""
    rule = Verified(1, 2)
    rule.verifies_from = 2
    machine = Machine(8, accepted=0.0)
    found = outcome(Schedule(rule), [[99], [3], [4], [5], [6]], 3, machine, verify=1.0)
    assert [each.around for each in found.rounds] == [0, 0, (1 + 2) * (PROMPT + 3 + 4)]


@pytest.mark.parametrize(
    ("accepted", "shares"),
    [(0.9, (1, 0.9, 0.81, 0.9**3)), ((0.9, 0.7), (1, 0.9, 0.7, 0.7**1.5)), (1.0, (1, 1, 1, 1))],
)
def test_older_drafts_are_accepted_less_often(accepted, shares):
    machine = Machine(accepted=accepted)
    assert [machine.accepts(age) for age in range(4)] == pytest.approx(shares)


def test_prompts_of_siblings_are_in_the_cache():
    """Of four prompts of 10 tokens two are spared, for the share that is cached."""
    step = StepCosts(0.0, 0.0, 0.0, prefill=1.0, cached=0.5)
    found = outcome(Schedule(FullRound(2)), [[8, 8]], 1, step=step)
    assert found.rounds[0].seconds == (2 + 2 * 0.5) * PROMPT


def test_several_engines_share_slots_and_wait_for_each_other():
    """Prompts of 4, 6 and 2 steps on two engines of one slot: one engine has two of them."""
    found = outcome(Schedule(FullRound(3)), [[4], [6], [2]], 1, Machine(2, 2))
    assert found.rounds[0].decode_steps == found.rounds[0].seconds == 6
    assert found.rounds[0].slot_steps == 12 and found.rounds[0].idle_slot_steps == 0


def test_scores_are_awaited():
    """Four completions end together, and two workers take 3 seconds for each."""
    costs = {"reward": (3.0,), "reward_workers": 2}
    found = outcome(Schedule(FullRound(2)), [[8, 8]], 1, **costs)
    assert found.rounds[0].seconds == 8 + 2 * 3


RULES = [FullRound(2), Verified(2, 4), FirstReadyRound(2, 4, most_age=1)]
RULES += [FirstReadyRound(2, 4, keeps) for keeps in ("all", "unfinished", "nothing")]


@given(st.lists(st.integers(1, 20), min_size=5, max_size=9), st.sampled_from(RULES))
def test_each_token_is_trained_on_discarded_or_kept(lengths, rule):
    work = Workload([[n] for n in lengths], [PROMPT] * len(lengths), 99)
    pipeline = Pipeline(Schedule(rule), work, Costs(UNIT), Machine(3, accepted=0.5), 1)
    rounds = pipeline.run(6).rounds
    known = sum(each.trained_tokens + each.discarded_tokens for each in rounds)
    assert sum(each.drawn_tokens for each in rounds) == known + pipeline._pool.tokens


def calling(drawn, seconds, reply=1):
    """A completion that waits so long for a reply after each of its parts but the last."""
    turns = [n for part in drawn for n in (part, -reply)][:-1]
    return Length.of(sum(drawn), turns, seconds * (len(drawn) - 1))


PARTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
COMPLETIONS = st.lists(st.tuples(PARTS, st.integers(0, 20)), min_size=2, max_size=6)


@given(COMPLETIONS, st.sampled_from([1, 2]))
def test_a_round_lasts_until_all_have_drawn_and_waited(completions, engines):
    lengths, machine = [[calling(*of)] for of in completions], Machine(12, engines)
    found = outcome(Schedule(FullRound(len(lengths))), lengths, 2, machine)
    last = max(sum(drawn) + seconds * (len(drawn) - 1) for drawn, seconds in completions)
    tokens = sum(sum(drawn) for drawn, _ in completions)
    for of in found.rounds:
        assert (of.seconds, of.trained_tokens, of.drawn_tokens) == (last, tokens, tokens)


def test_who_waits_for_a_tool_holds_no_slot():
    """3 steps; 4 of the other; a second in which both are over or wait; 2 steps."""
    found = outcome(Schedule(FullRound(2)), [[calling([3, 2], 5)], [4]], 1, Machine(1))
    assert found.rounds[0].seconds == 3 + 4 + 1 + 2 and found.rounds[0].decode_steps == 9


def test_tools_run_on_between_two_rounds():
    """The call after 2 steps takes until second 12; the first round ends after 4, its update 5
    seconds later, and the next round 3 seconds and 3 steps after that."""
    rule = Schedule(FirstReadyRound(1, 3))
    lengths = [[calling([2, 3], 10)], [4], [40], [40]]
    first, second = outcome(rule, lengths, 2, update=5.0).rounds
    assert (first.seconds, second.seconds) == (4 + 5, 3 + 3 + 5)
    assert second.ages == {1: 2, 0: 3}


def test_what_is_read_when_a_reply_comes():
    """The prompt; the reply, as the rest is in the cache; and nothing of one that does not fit."""
    step = StepCosts(0.0, 0.0, 0.0, prefill=1.0, cached=1.0)
    length = calling([3, 2, 4], 0, reply=4)
    found = outcome(Schedule(FullRound(1)), [[length]], 1, step=step, limit=13)
    assert found.rounds[0].seconds == PROMPT + 4 and found.rounds[0].trained_tokens == 3 + 2
