"""Seconds of rounds by hand: what waits for what, and what overlaps."""

import pytest

from lit_rlsched.callbacks import (
    AheadRollout,
    InFlightUpdates,
    LengthPrediction,
    MicroGroupSampling,
)
from lit_rlsched.cli.simulate import facts_of
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.simulation.costs import Costs
from lit_rlsched.simulation.decoder import Engines, Item, StepCosts
from lit_rlsched.simulation.pipeline import Machine, Pipeline
from lit_rlsched.simulation.workload import Workload

UNIT = StepCosts(base=1.0, running=0.0, kv=0.0, prefill=0.0)
PROMPTS, TOKENS, PROMPT = 2, 8, 10
SIZES = {"prompts_per_round": PROMPTS, "num_generations": 2, "max_completion_length": TOKENS}


def rounds(*callbacks, number=4, step=UNIT, accepted=1.0, given=None, sizes=(), **costs):
    """Rounds of two prompts with two completions of eight tokens, each of which has a slot."""
    work = Workload([[TOKENS] * 2] * 99, [PROMPT] * 99, TOKENS)
    nothing = {"update": 0.0, "position": 0.0, "verify": 0.0, "sync": 0.0, "other": 0.0}
    about = SIZES | dict(sizes)
    schedule = make_schedule([*callbacks], facts_of(about))
    machine = Machine(8, slowdown=given, accepted=accepted)
    steps = about.get("steps_per_round", 1)
    pipeline = Pipeline(schedule, work, Costs(step, **nothing | costs), machine, 2, steps)
    return [each.seconds for each in pipeline.run(number).rounds]


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (2.0, 3 + 1 + 5 + 1),  # the trainer waits for the third turn
        (4.0, 4 + 1 + 5 + 1),  # the engine waits for the update
    ],
)
def test_engine_and_trainer_meet_where_weights_go_in(update, expected):
    """A sync there, and one at the end of the round."""
    seconds = rounds(InFlightUpdates(turns=3), update=update, sync=1.0)
    assert seconds[1:] == [expected] * 3


def test_what_runs_is_prefilled_again_where_weights_go_in():
    step = StepCosts(1.0, 0.0, 0.0, prefill=0.25)
    mean = 4 * (PROMPT + (TOKENS - 1) / 2)  # tokens in the cache in a step
    seconds = rounds(InFlightUpdates(turns=3), step=step)
    assert seconds[1] == pytest.approx(8 + 0.25 * 4 * PROMPT + 0.25 * mean)
    seconds = rounds(InFlightUpdates(turns=3, cache="keep"), step=step)
    assert seconds[1] == pytest.approx(8 + 0.25 * 4 * PROMPT)


def test_no_weights_go_into_a_rollout_that_is_over():
    assert rounds(InFlightUpdates(turns=8), update=2.0, sync=1.0)[1:] == [8 + 1] * 3


@pytest.mark.parametrize(
    ("measured", "given", "expected"),
    [(None, None, 8.0), (1.5, None, 8 + 0.5 * 5), (1.5, 2.0, 13.0), (None, 2.0, 13.0)],
)
def test_both_are_slower_while_both_work(measured, given, expected):
    """At a slowdown of 2 nothing is gained: 8 and 5 seconds one after the other."""
    callback = AheadRollout(correction="importance")
    seconds = rounds(callback, update=5.0, given=given, slowdown=measured)
    assert seconds[1:] == [expected] * 3


def test_what_has_no_advantage_is_verified_by_a_pass_of_its_own():
    """Drafts of 8 steps beside the passes over a quarter of the positions, and the update."""
    positions = 4 * (PROMPT + TOKENS)
    work = {"verify": 0.25, "trained_share": 0.75, "update": 1.0, "position": 0.0}
    seconds = rounds(AheadRollout(), **work)
    assert seconds[1:] == [max(8, positions / 4 * 0.25 + 1)] * 3
    seconds = rounds(AheadRollout(), **work | {"verify": 1.0})
    assert seconds[1:] == [positions / 4 + 1] * 3


@pytest.mark.parametrize(("trained_share", "passes"), [(1.0, 5), (0.0, 2), (0.5, 3.5)])
def test_what_a_draft_that_is_cut_costs(trained_share, passes):
    """The table of the documentation: 5 forward passes more than an update, or 2."""
    shares = {"trained_share": trained_share, "verify": 1.0, "position": 3.0}
    seconds = rounds(AheadRollout(), accepted=0.0, **shares)
    assert seconds[1] == pytest.approx((passes + 3 * trained_share) * 4 * (PROMPT + TOKENS))


def test_nothing_is_beside_where_the_loop_decides_between_steps():
    """With lengths that are predicted and fewer slots than completions the engine waits."""
    both = [AheadRollout(), LengthPrediction(), MicroGroupSampling(slots=2)]
    passes, work = 2 * 4 * (PROMPT + TOKENS), {"verify": 1.0, "update": 100.0}
    assert rounds(*both, accepted=0.0, **work)[1] >= passes + 100
    assert rounds(*both, accepted=1.0, **work)[1] < passes + 100  # then none waits for a slot


def test_each_optimizer_step_has_weights_that_go_in():
    sizes = {"steps_per_round": 2}
    seconds = rounds(InFlightUpdates(turns=3), sizes=sizes, update=1.0, sync=1.0)
    assert seconds[1:] == [3 + 1 + 3 + 1 + 2 + 1] * 3
    free = rounds(InFlightUpdates(turns=3, pace="free"), sizes=sizes, update=4.0, sync=1.0)
    assert free[1:] == [2 * 1 + 8 + 1] * 3  # nobody waits


def test_the_log_has_each_time_in_a_slot():
    engines = Engines(1, 2, UNIT)
    log = engines.log = []
    engines.start_round()
    engines.submit(
        [Item(name, name, 5, 0, n, float(n), 9) for name, n in zip("abc", (3, 1, 4), strict=True)]
    )
    while engines.step():
        pass
    (spans,) = log
    assert [(item.id, start, end) for item, start, end in spans] == [
        ("b", 0, 1),
        ("a", 0, 3),
        ("c", 1, 5),
    ]
