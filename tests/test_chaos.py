"""Real processes die in the middle of a run, and it goes on."""

import math
import os
import signal

import pytest
from seen_rounds import Rounds

from lit_rlsched.callbacks import (
    AdaptiveTimeouts,
    StreamedTraining,
    TailBatching,
)
from lit_rlsched.engines import ProcessEngine, TransformersEngine


class Kill(Rounds):
    """Kills the engine's process while it decodes, in a short round and in a long one."""

    def __init__(self):
        super().__init__()
        self.pids, self.left = [], 0

    def on_round_start(self, trainer, pl_module, plan):
        super().on_round_start(trainer, pl_module, plan)
        self.left = 1 if len(self.planned) in (2, 3) else 0

    def on_completion_end(self, trainer, pl_module, completion):
        data = trainer.datamodule
        if self.left and data.run.session.worker.busy:
            self.left -= 1
            self.pids.append(data.run.settings.engine.pid)
            os.kill(data.run.settings.engine.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_engine_is_killed_in_a_short_and_in_a_long_round(fit, sums):
    kill = Kill()
    callbacks = [kill, TailBatching(1.5), StreamedTraining(start=0), AdaptiveTimeouts()]
    engine = ProcessEngine(TransformersEngine())
    settings = {"max_completion_length": 64, "num_generations": 2, "prompts_per_round": 2}
    trainer, _, data = fit(
        callbacks=callbacks,
        trainer={"max_epochs": 5},
        engine=engine,
        val_data=sums[80:],
        **settings,
    )
    assert trainer.global_step == 5
    assert len(set(kill.pids)) == len(kill.pids) == engine.restarts == 2
    assert [len(plan) for plan in kill.planned[:3]] == [3, 3, 2], "the third round is long"
    assert data.run.settings.engine.pid is None, "the last process was closed"
    drawn = {name for plan in kill.planned for name in plan}
    trained = [group.id for round in kill.rounds for group in round.groups]
    assert len(trained) == len(set(trained)) == 10
    assert set(trained) | {group.id for group in data.run.pool} == drawn
    for round in kill.rounds:
        for completion in round.completions:
            assert completion.finished and completion.scored and not completion.dropped
            assert sum(n for _, n in completion.segments) == len(completion.token_ids)
            assert {version for version, _ in completion.segments} == {round.version}
            assert all(map(math.isfinite, completion.logprobs))
        # a restarted engine has the weights of the round: what it drew has their log-probs
        assert round.metrics["rollout/engine_restarts"] == sum(
            len(plan) > 0 for plan in kill.planned[1 : round.number + 1][:2]
        )
    assert all(r.metrics.get("sync/max_logp_diff", 0) < 1e-4 for r in kill.rounds)


@pytest.mark.slow
def test_rewards_that_hang_fork_and_die_cost_their_completions(fit):
    def wild(prompts, completions, completion_ids, **kwargs):
        import os
        import signal
        import time

        # noise that follows from the completion: which ones go wrong is known afterwards
        kind = sum(completion_ids[0]) % 5
        if kind == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == 1:
            time.sleep(600)
        if kind == 2:
            os._exit(1)
        if kind == 3 and os.fork() == 0:
            return [1e9]  # in a copy of the worker
        return [float(kind)]

    seen = Rounds()
    trainer, _, data = fit(
        callbacks=[seen, TailBatching()], reward_funcs=[wild], reward_workers=2, reward_timeout=2
    )
    assert trainer.global_step == 2
    kinds = []
    for completion in (c for round in seen.rounds for c in round.completions):
        kind = sum(completion.token_ids) % 5
        kinds.append(kind)
        assert completion.scores == [None if kind < 3 else float(kind)]
    assert {0, 1, 2, 3} <= set(kinds), "each went wrong at least once"
    counters = data.run.counters
    assert counters["rewards/wild/crashes"] >= kinds.count(0) + kinds.count(2)
    assert counters["rewards/wild/timeouts"] >= kinds.count(1)
