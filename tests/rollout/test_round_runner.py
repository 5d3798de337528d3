"""What the round runner measures."""

from collections import Counter
from types import SimpleNamespace

import pytest

from lit_rlsched.rollout import round_runner
from lit_rlsched.rollout.audit import DraftAudit, Harvest
from lit_rlsched.rollout.round_runner import RoundHooks, RoundRunner
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.scheduling.timeline import Timeline
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
        return DraftAudit(tokens=3)

    def rollout(groups, version, rule, salt, predict, feedback):
        yield feedback.more(groups[0])

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(round_runner, "time", clock)
    monkeypatch.setattr(round_runner, "settle", lambda *state: Harvest([], [], [], []))
    controller = SimpleNamespace(state=None, lengths=None)
    session = SimpleNamespace(rollout=rollout, controller=controller, trace=None, metrics=dict)
    session.failures, session.scorer, session.control_tokens = Counter, Unscored(), None
    session.timeline = Timeline()
    planner = SimpleNamespace(
        plan=lambda rule, rounds: [first], replacement=lambda group, groups, rule: second
    )
    hooks = RoundHooks()
    hooks.verify, hooks.is_replaced = verify, lambda group: True
    hooks.max_num_gen_batches = 2
    drawn = RoundRunner(planner).run(session, WindowRound(1, 1, 0), 0, 3, hooks)
    assert drawn.planned == [first, second]
    assert drawn.harvest.drafts.tokens == 6
    assert drawn.metrics["time/drafts"] == 20.0
