"""Scores of completions that have waited for their round: nobody is asked twice."""

from types import SimpleNamespace

from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.types import Completion, Group, Prompt, Sampling

GROUP = Group("g", Prompt("g", "?", (1,)), Sampling(9), [])


def test_a_completion_that_has_its_scores_keeps_them():
    asked = []
    scheduler = SimpleNamespace(
        names=["first", "second"], submit=lambda name, **_: asked.append(name), poll=list
    )
    scorer = Scorer(scheduler, lambda ids: " ".join(map(str, ids)))
    known = Completion(0, [5, 6], [-1.0, -1.0], [(3, 2)], "stop", scores=[0.5, None])
    dropped = Completion(1, [7], [-1.0], [(3, 1)], "stop", dropped="nonfinite_logprob")
    for completion in (known, dropped, Completion(2, [8], [-1.0], [(3, 1)], "stop")):
        scorer.submit(GROUP, completion)
    assert asked == ["g/2"] and scorer.pending == 3
    scorer.wait()  # for nobody
    assert [completion.index for _, completion in scorer.poll()] == [0, 1]
    assert (known.scores, known.text) == ([0.5, None], "5 6")
    assert dropped.scores == [None, None] and scorer.pending == 1
