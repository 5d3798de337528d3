import pytest
from seen_rounds import At

from lit_rlsched import engines
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, Sampling


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
