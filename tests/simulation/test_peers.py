"""Worked examples of the peers' rules: prompts of one completion each, two in an update."""

import pytest

from lit_rlsched.simulation.costs import Costs, StepCosts
from lit_rlsched.simulation.peers import PEERS
from lit_rlsched.simulation.pipeline import Machine, Pipeline
from lit_rlsched.simulation.workload import Workload

LENGTHS = [4, 2, 6, 1, 3, 5, 2, 2, 7, 1, 1, 4]
UNIT = StepCosts(base=1.0, running=0.0, kv=0.0, prefill=0.0)


def rounds(name, slots, lengths=LENGTHS, number=2, update=0.0, step=UNIT, prompts=2):
    """Rounds of a peer; a decode step takes a second, and so does nothing else."""
    work = Workload([[n] for n in lengths], [10] * len(lengths), 99)
    costs = Costs(step, update=update, position=0.0, verify=0.0, sync=0.0, other=0.0)
    machine, peer = Machine(slots, rank_correlation=1.0), PEERS[name]
    schedule, keeps = peer.schedule(prompts), peer.keeps_cache
    return Pipeline(schedule, work, costs, machine, 1, keeps_cache=keeps).run(number)


def figures(outcome, *names):
    return [tuple(getattr(each, name) for name in names) for each in outcome.rounds]


def test_all_are_awaited_first_come_first_served():
    """4 and 2 begin, then 6 and 1: four steps, then six."""
    outcome = rounds("fcfs_all", slots=2)
    assert figures(outcome, "decode_steps", "trained_tokens", "idle_slot_steps") == [
        (4, 6, 2),
        (6, 7, 5),
    ]
    assert outcome.length_bias == 1 and outcome.stale_share == outcome.discarded_share == 0


def test_the_slowest_of_three_are_dropped():
    """Of 4, 2 and 6 the first two end, after 4 steps, and 4 of the 6 tokens are lost. Then 1 and 3
    end before the 5."""
    outcome = rounds("oversample_abort", slots=3)
    assert figures(outcome, "decode_steps", "trained_tokens", "discarded_tokens") == [
        (4, 6, 4),
        (3, 4, 3),
    ]
    assert outcome.length_bias == pytest.approx((10 / 4) / (21 / 6))


def test_the_slowest_of_three_go_on_first():
    """6 has 4 tokens after the first round, and ends with the second step of the next."""
    outcome = rounds("oversample_partial", slots=3, number=3)
    assert figures(outcome, "decode_steps", "ages")[:2] == [(4, {0: 6}), (2, {0: 3, 1: 4})]
    assert outcome.discarded_share == 0


@pytest.mark.parametrize("name", ["group_fifo", "in_flight"])
def test_the_first_that_are_complete_are_taken(name):
    """Four prompts are in flight: 2 and 1 end first, in two steps; 4 and 6 go on beside 3 and 5,
    and 4 and 3 are next, after two and three steps. The rollout is beside the update."""
    outcome = rounds(name, slots=4, number=3, update=2.5)
    assert figures(outcome, "decode_steps", "trained_tokens")[:2] == [(2, 3), (3, 7)]
    # the first rollout, and the longer of each update and the rollout beside it
    assert figures(outcome, "seconds")[:2] == [(2 + 3.0,), (2.5,)]


def test_what_is_computed_again_when_weights_change_in_flight():
    step = StepCosts(0.0, 0.0, 0.0, prefill=1.0)
    again = rounds("group_fifo", slots=4, step=step)
    kept = rounds("in_flight", slots=4, step=step)
    # prompts of 10 tokens: four; then two new ones, and two with two tokens each
    assert again.rounds[0].seconds == 4 * 10 + 2 * 10 + 2 * 12
    assert kept.rounds[0].seconds == 4 * 10 + 2 * 10


def test_the_next_batch_is_drawn_during_the_update():
    """Rollouts take 4, 6, 5 and 2 steps, updates 5.5 seconds."""
    outcome = rounds("one_step_off", slots=2, number=3, update=5.5)
    assert figures(outcome, "seconds") == [(4 + 6,), (5.5,), (5.5,)]
    assert figures(outcome, "ages") == [({0: 6},), ({1: 7},), ({1: 8},)]


def test_ready_prompts_overtake_within_a_window():
    """Three are in flight and the window is two: one of the ready ones may overtake the 9, but not
    both that an update needs."""
    outcome = rounds("windowed_fifo", slots=3, lengths=[9, 1, 1, 1, 1, 1], number=1)
    assert figures(outcome, "decode_steps", "trained_tokens") == [(9, 10)]
    outcome = rounds("group_fifo", slots=3, lengths=[9, 1, 1, 1, 1, 1], number=1)
    assert figures(outcome, "decode_steps", "trained_tokens") == [(1, 2)]


def test_groups_that_are_too_old_are_thrown_away():
    """Four prompts are in flight. The 9 is not ready four updates later, and not drawn again. An
    update that takes as long as four prompts leaves three of them behind in the long run."""
    lengths = [9] + [1] * 99
    quick = rounds("discard_stale", slots=8, lengths=lengths, number=40, prompts=1)
    assert max(each.discarded_tokens for each in quick.rounds) >= 9
    assert {each.trained_tokens for each in quick.rounds} == {1} and quick.oldest <= 4
    slow = rounds("discard_stale", slots=1, lengths=[1], number=20, prompts=1, update=4.0)
    assert figures(slow, "seconds", "discarded_tokens", "ages")[-9:] == [(4, 3, {4: 1})] * 9
