import pytest

from lit_rlsched import RolloutDataModule
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.training.learner import PlainLearner
from lit_rlsched.training.round import Round
from lit_rlsched.training.selection import Selection
from lit_rlsched.training.update import Update
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def update_of(selection=None, **settings):
    defaults = {"seed": 0, "prompts_per_round": 4, "micro_batch_tokens": 64}
    defaults["engine"] = TransformersEngine()
    run = RolloutDataModule([{"prompt": "p"}], len, **{**defaults, **settings}).run
    run.schedule.selection = selection
    return Update(run.settings, run.schedule, PlainLearner())


def group(name, *rewards):
    completions = [
        Completion(i, [7, 8], [-1.0, -0.5], [(0, 2)], "stop", scores=[reward])
        for i, reward in enumerate(rewards)
    ]
    return Group(name, Prompt(name, name, (1,)), Sampling(8), completions)


def round_of(*groups):
    return Round(0, 0, list(groups))


def ids(step):
    return sorted({row.group.id for row in step.samples})


def test_every_group_is_in_one_step_of_each_iteration():
    round = round_of(*(group(name, 0.0, 1.0) for name in "abcd"))
    update = update_of(steps_per_round=2, num_iterations=2)
    steps = [ids(update.step(round, i)) for i in range(update.settings.steps_per_epoch)]
    assert len(steps) == 4
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == ["a", "b", "c", "d"]


def test_steps_of_a_round_divide_by_their_average():
    round = round_of(*(group(name, 0.0, 1.0) for name in "abcd"))
    for at, one in enumerate(round.groups):
        for completion in one.completions:
            completion.token_ids = [7] * (at + 1)
            completion.logprobs, completion.segments = [-1.0] * (at + 1), [(0, at + 1)]
    round.groups[3].completions[1].dropped = "unscored"
    update = update_of(steps_per_round=2, num_iterations=2)
    steps = [update.step(round, i) for i in range(4)]
    assert {step.divisor.tokens for step in steps} == {(2 + 4 + 6 + 4) / 2}
    assert sum(step.totals.tokens for step in steps[:2]) == 16
    assert sum(step.divisor.sequences for step in steps[:2]) == 7
    assert next(iter(steps[0])).step_tokens == 8


def test_a_group_of_which_all_is_dropped_takes_no_place_in_a_step():
    groups = [group(name, 0.0, 1.0) for name in "abcd"]
    for completion in (*groups[0].completions, *groups[2].completions):
        completion.dropped = "uninformative"
    update = update_of(steps_per_round=2)
    steps = [ids(update.step(round_of(*groups), i)) for i in range(2)]
    assert sorted(steps) == [["b"], ["d"]]


@pytest.mark.parametrize("steps", [1, 2])
def test_old_logprobs_are_taken_where_the_weights_move_before_the_last_step(steps):
    some = group("a", 0.0, 1.0)
    update_of(steps_per_round=steps).assign_advantages(round_of(some))
    expected = None if steps == 1 else [-1.0, -0.5]
    assert [c.old_logprobs and list(c.old_logprobs) for c in some.completions] == [expected] * 2
    low, high = (c.advantage for c in some.completions)
    assert low == -high < 0


@pytest.mark.parametrize("full", [False, True])
def test_the_selected_are_compared_with_each_other_or_with_all(full):
    some = group("a", 0.0, 0.0, 0.0, 1.0)
    update_of(Selection(2, full_scope=full)).assign_advantages(round_of(some))
    kept = [c for c in some.completions if not c.dropped]
    assert len(kept) == 2
    assert (sum(c.advantage for c in kept) == pytest.approx(0.0)) != full


def test_parts_are_valued_as_the_whole_is():
    twins = [[group("a", 0.0, 0.5, 1.0), group("b", 1.0, 0.0, 0.0)] for _ in range(2)]
    update = update_of(Selection(2, "random"))
    update.assign_advantages(round_of(*twins[0]))
    for part in reversed(twins[1]):
        update.assign_advantages(round_of(part))
    update.assign_advantages(round_of())
    assert twins[0] == twins[1]


def test_a_part_of_a_step_divides_by_what_it_is_told():
    update, some = update_of(), round_of(group("a", 0.0, 1.0))
    part = update._step_of(some.groups, some.version, divisor=(8, 64))
    assert (part.divisor.sequences, part.divisor.tokens) == (8, 64)
    some.accumulated = [part]
    step = update.step(some, 0)
    assert step.accumulated == [part] and len(step) == 0 and len(step.samples) == 2
