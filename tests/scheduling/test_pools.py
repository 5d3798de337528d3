"""Idle slots of a pool. The simulation is the round loop of a run, so figures by hand suffice."""

from hypothesis import example, given
from hypothesis import strategies as st

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.simulation.loop import Visit, simulated_rounds, simulated_session
from lit_rlsched.types import LengthOnly, Prompt, Sampling

targets = st.sampled_from([0.0, 0.03, 0.05, 0.2, 0.5])


def pool_bubble_ratio(lengths, update, slots, mode, limit=200):
    """Idle slot-steps over all of a pool: equation 4 of SortedRL, with steps as time."""
    groups = [of if isinstance(of, list) else [of] for of in lengths]
    visits = [Visit(Prompt(str(i), "", LengthOnly(1)), str(i)) for i in range(len(groups))]
    known = {f"{i}/{j}": n for i, of in enumerate(groups) for j, n in enumerate(of)}
    engine = SimulatedEngine(known, length_only=True, stream=False)
    session = simulated_session(engine, slots, limit + 1, lambda: Admission(slots))
    rule, size = SortedRound(update, len(groups), len(groups[0]), "group", mode), len(groups[0])
    drawn = simulated_rounds(session, visits, Sampling(limit), size, lambda number: rule)
    traces = [result.trace for result in drawn]
    total = sum(trace.slot_steps for trace in traces)
    return (total - sum(trace.busy_slot_steps for trace in traces)) / total


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), targets, st.integers(1, 10))
@example([1] * 19 + [19], 0.5, 1)  # the longest last: 18 of 2 * 28 idle
def test_slots_that_are_sure_in_any_order(lengths, target, update):
    sure = int(1 + target / (1 - target) * sum(lengths) / max(lengths) * (1 - 1e-12))
    slots = min(len(lengths), sure)
    assert pool_bubble_ratio(lengths, update, slots, "partial", 200) <= target


def test_bubble_ratio_by_hand():
    # 3 and 1 run, then 4 for 2 steps; 4 goes on or begins anew, beside 2
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "partial") == 0
    assert pool_bubble_ratio([3, 1, 4, 2], 2, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([[3, 1], [4, 2]], 1, 2, "on_policy") == 2 / 14
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 2, "on_policy") == 0  # one round
    assert pool_bubble_ratio([3, 1, 4, 2], 4, 8, "on_policy") == 22 / 32  # slots without any
    assert pool_bubble_ratio([1] * 19, 19, 10, "partial") == 0.05
