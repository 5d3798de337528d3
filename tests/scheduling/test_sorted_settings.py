import pytest

from lit_rlsched.scheduling.sorted_batching import SortedRound, SortedSettings
from lit_rlsched.settings import UsageError


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pool_rounds": 1, "update_prompts": 1},
        {"oversubscribe": 1},
        {"mode": "partial"},
        {"mode": "partial", "max_staleness": 1, "mask_stale_tokens": True},
    ],
)
def test_settings_at_their_bounds(settings):
    SortedSettings(**settings)


def test_the_rule_is_the_settings():
    rule = SortedSettings(pool_rounds=3).rule(4, 2, "completion")
    assert (rule.update_prompts, rule.pool_prompts, rule.num_generations) == (4, 12, 2)
    assert (rule.unit, rule.max_staleness, rule.most_prompts()) == ("completion", 0, 12)
    settings = SortedSettings(2, 6, "partial", max_staleness=3, oversubscribe=1.5)
    rule = settings.rule(8, 2, "group")
    assert (rule.update_prompts, rule.pool_prompts, rule.most_prompts()) == (6, 16, 9)
    assert (rule.unit, rule.max_staleness) == ("group", 3)
    assert SortedSettings(update_prompts=32).rule(8, 2, "group").update_prompts == 32
    with pytest.raises(UsageError, match=r"`SortedBatching\(update_prompts=33\)` is more than"):
        SortedSettings(update_prompts=33).rule(8, 2, "group")


def test_a_pool_must_be_there():
    rule = SortedRound(2, 6, 4)
    rule.check_enough(6)
    with pytest.raises(UsageError, match="6 prompts at a time, and `train_data` holds 5"):
        rule.check_enough(5)
    with pytest.raises(UsageError, match="`prompts_per_round=2` is more than `train_data` holds"):
        rule.check_enough(1)
