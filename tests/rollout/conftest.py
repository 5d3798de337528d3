import pytest

from lit_rlsched.rewards.scheduler import RewardScheduler


@pytest.fixture(scope="module")
def scheduler():
    def reward(prompts, completions, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    with RewardScheduler([reward]) as scheduler:
        yield scheduler
