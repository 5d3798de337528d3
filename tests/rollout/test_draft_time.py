"""What a rollout measures."""

from types import SimpleNamespace

import pytest
from bare_rollout import hooks_of, rollout_on

from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.result import DraftAudit
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def test_the_time_of_drafts_includes_those_of_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        Group(f"{n}@0", Prompt(n, n, (1,)), Sampling(8), [Completion(0, [5], [-1.0], [(2, 1)])])
        for n in ("a", "b")
    )
    now = 0.0

    def verify(groups, version):
        nonlocal now
        now += 10.0
        for completion in (c for group in groups for c in group.completions):
            completion.draft = None
        return DraftAudit(tokens=3)

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("lit_rlsched.rollout.rollout.time", clock)
    others = iter([second])
    hooks = hooks_of(verify=verify, replaces=True, another=lambda *of: next(others, None))
    engine = SimulatedEngine(lengths=lambda request: 2)
    engine.start(EngineSpec("", slots=4, max_model_len=64, eos_token_ids=(1,)))
    worker = engine.make_worker(Admission(4))
    rollout = rollout_on(worker, Unscored(), [first], WindowRound(1, 1, 0), version=3, hooks=hooks)
    rollout.run()
    result = rollout.result()
    assert result.planned == [first, second]
    assert result.drafts.tokens == 6
    assert result.metrics["time/drafts"] == 20.0
