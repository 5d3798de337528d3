import pytest
from seen_rounds import Rounds

from lit_rlsched.callbacks import AdaptiveTimeouts


class Limits(Rounds):
    def setup(self, trainer, pl_module, stage):
        rewards = trainer.datamodule.run.settings.rewards
        self.submitted, submit = [], rewards.submit

        def watched(job_id, **settings):
            self.submitted.append((job_id, settings["timeout"]))
            submit(job_id, **settings)

        rewards.submit = watched


@pytest.mark.slow
def test_what_hangs_is_killed_as_soon_as_correct_ones_show_how_long_it_takes(fit, sums):
    def hangs_later(prompts, completions, **kwargs):
        """Correct at once, but for a third of the lengths, where it never ends."""
        import time

        time.sleep(60 * (len(completions[0]) % 3 == 0))
        return [1.0]

    timeouts, limits = AdaptiveTimeouts(minimum=0.3, maximum=2.0), Limits()
    _, _, data = fit(
        callbacks=[timeouts, limits],
        train_data=sums[:1],
        prompts_per_round=1,
        reward_funcs=[hangs_later],
        reward_timeout=50.0,
        trainer={"max_epochs": 2},
    )
    assert {seconds for _, seconds in limits.submitted[:4]} == {2.0}
    completions = [c for r in limits.rounds for c in r.completions]
    hung = [c for c in completions if c.scores == [None]]
    assert 0 < len(hung) < len(completions)
    assert data.run.counters["rewards/hangs_later/timeouts"] == len(hung)
    assert all(timeouts.timeouts.of(p.prompt.uid) < 1 for p in limits.rounds[-1].groups)
    assert any(seconds < 1 for _, seconds in limits.submitted)
    again = AdaptiveTimeouts(minimum=0.3, maximum=2.0)
    again.load_state_dict(timeouts.state_dict())
    uid = limits.rounds[0].groups[0].prompt.uid
    assert again.timeouts.of(uid) == timeouts.timeouts.of(uid)


def test_without_the_callback_the_limit_is_the_data_modules(fit):
    limits = Limits()
    fit(callbacks=[limits], trainer={"max_epochs": 1})
    assert {seconds for _, seconds in limits.submitted} == {None}
