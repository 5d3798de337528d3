"""A rollout on a worker alone, without an engine's start and end."""

from collections import Counter
from types import SimpleNamespace

from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.scheduling.timeline import Timeline


def hooks_of(**given):
    """Hooks of which these are given."""
    hooks = RoundHooks()
    for name, hook in given.items():
        setattr(hooks, name, hook)
    return hooks


def rollout_on(worker, scorer, groups, rule, *, version=0, hooks=None, **session):
    """A rollout that may `decode`; `session` has `seed`, `lengths`, `probe_tokens` and others."""
    nothing = SimpleNamespace(wake=lambda: None, sleep=lambda: None, virtual_clock=True)
    given = {
        **{"worker": worker, "scorer": scorer, "engine": nothing, "seed": 0},
        **{"spec": SimpleNamespace(device=None), "timeline": Timeline(), "drops": Counter()},
        **{"lengths": None, "probe_tokens": 0, "turns": None, "control_tokens": None},
        **{"sync": lambda version: {}, "begin": lambda rollout: None, "failures": Counter},
        "check_interrupt": lambda: None,
    }
    rollout = Rollout(SimpleNamespace(**given | session), groups, version, rule, hooks)
    rollout.load_weights()
    return rollout
