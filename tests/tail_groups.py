"""Groups in every state that tail batching tells apart."""

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def group(name, *scores, deferred=0, dropped=()):
    """One with a score for each completion; `None`: not scored yet."""
    completions = [
        Completion(
            i,
            [5] * (i + 1),
            [-1.0] * (i + 1),
            [(0, i + 1)],
            "stop",
            scores=None if score is None else [score],
            dropped="nonfinite_logprob" if i in dropped else None,
        )
        for i, score in enumerate(scores)
    ]
    return Group(f"{name}@0", Prompt(name, name, (1,)), Sampling(8), completions, deferred)


def fresh(n):
    return [group(f"f{i:02}", None, None) for i in range(n)]


def lost(n):
    return [group(f"l{i:02}", None, None, deferred=1 + i % 3) for i in range(n)]


def ready(names, **settings):
    return [group(name, 1.0, 0.0, **settings) for name in names]


def state_of(decoded, patient=True, finished=None, groups=5):
    done = sum(len(g.completions) for g in decoded)
    return RoundState(fresh(groups), 2 * groups, decoded, done, finished or {}, patient=patient)


def names(groups):
    return "".join(g.prompt.uid for g in groups)
