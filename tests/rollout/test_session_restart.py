from dataclasses import replace

import pytest
from seen_rounds import At

from lit_rlsched import engines
from lit_rlsched.callbacks import MicroGroupSampling, RolloutCallback
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Request, Sampling


@pytest.mark.parametrize("name", ["SimulatedEngine", "TransformersEngine"])
def test_an_engine_starts_anew_after_its_end(name, tiny_model, tiny_policy):
    engine, spec = getattr(engines, name)(), EngineSpec(tiny_model, 2, 64, (1,), policy=tiny_policy)
    drawn = []
    for _ in range(2):
        engine.start(spec)
        stats = engine.stats()
        assert (stats.decode_steps, stats.prefill_tokens, stats.kv_tokens) == (0, 0, 0)
        engine.submit([Request("r", [5, 6, 7], 3, Sampling(20))])
        drawn.append([event for _ in range(20) for event in engine.step()])
        engine.close()
    assert drawn[0] == drawn[1] and drawn[0]


def test_a_restart_inside_a_rollout_is_refused(fit):
    within = At(lambda trainer, *_: trainer.datamodule.run.session.restart(1), "on_completion_end")
    with pytest.raises(UsageError, match="cannot restart during a rollout"):
        fit(callbacks=[within], trainer={"max_epochs": 1})


class Between(RolloutCallback):
    """Draws the round's groups once more, in part, and then whole in another engine."""

    def __init__(self):
        self.drawn, self.again = [], []

    def on_round_end(self, trainer, pl_module, round):
        session = trainer.datamodule.run.session
        before, worker = session.controller.drops, session.controller.worker
        session.controller.drops["mine"] += 1

        def groups():
            return [
                replace(g, completions=[Completion(c.index) for c in g.completions])
                for g in round.groups
            ]

        rollout = session.rollout(groups(), round.version)
        next(rollout)
        assert worker.busy
        session.restart(1)
        assert not session.controller.worker.busy and session.controller.worker is not worker
        assert session.engine.stats().decode_steps == 0
        assert session.controller.drops is before and before["mine"] > 0
        drawn = {g.id: g for g in session.rollout(groups(), round.version)}
        self.drawn.append([c.token_ids for c in round.completions])
        self.again.append([c.token_ids for g in round.groups for c in drawn[g.id].completions])


@pytest.mark.slow
def test_a_rollout_that_a_restart_drops_is_drawn_again(fit):
    between = Between()
    fit(
        callbacks=[between, MicroGroupSampling(slots=2)],
        engine=TransformersEngine(),
        max_completion_length=100,
    )
    assert len(between.drawn) == 2 and between.drawn == between.again
