from types import SimpleNamespace

import pytest

from lit_rlsched.callbacks import SortedBatching
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import Schedule


def rule(prompts, size=2, needs_group=True, **settings):
    facts = SimpleNamespace(
        settings=SimpleNamespace(prompts_per_round=prompts, num_generations=size),
        learner=SimpleNamespace(needs_group=needs_group),
        callbacks=(),
    )
    schedule = Schedule(FullRound(prompts))
    SortedBatching(**settings).apply(schedule, facts)
    return schedule.rule


def test_the_rule_is_the_settings():
    made = rule(4, needs_group=False, pool_rounds=3)
    assert (made.update_prompts, made.pool_prompts, made.num_generations) == (4, 12, 2)
    assert (made.unit, made.max_staleness, made.most_prompts()) == ("completion", 0, 12)
    settings = {"pool_rounds": 2, "mode": "partial", "max_staleness": 3, "oversubscribe": 1.5}
    made = rule(8, update_prompts=6, **settings)
    assert (made.update_prompts, made.pool_prompts, made.most_prompts()) == (6, 16, 9)
    assert (made.unit, made.max_staleness) == ("group", 3)
    assert rule(8, update_prompts=32).update_prompts == 32
    with pytest.raises(UsageError, match=r"`SortedBatching\(update_prompts=33\)` is more than"):
        rule(8, update_prompts=33)


def test_a_pool_must_be_there():
    rule = SortedRound(2, 6, 4)
    rule.check_enough(6)
    with pytest.raises(UsageError, match="6 prompts at a time, and `train_data` holds 5"):
        rule.check_enough(5)
    with pytest.raises(UsageError, match="`prompts_per_round=2` is more than `train_data` holds"):
        rule.check_enough(1)
