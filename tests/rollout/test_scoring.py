"""Scores of drafts that have ended: kept only if the verified completion is the same."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lit_rlsched.rewards.jobs import ScoredJob
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

GROUP = Group("g", Prompt("g", "?", (1,), {"answer": "2"}), Sampling(9), [])


class Scheduler:
    """Scores a completion with its first token, when told to."""

    names, asked = ("first",), ()

    def __init__(self):
        self.jobs, self.calls = {}, 0

    def asks_for(self, argument):
        return argument in self.asked

    def submit(self, job_id, *, completion_ids, **_):
        assert job_id not in self.jobs
        self.calls += 1
        self.jobs[job_id] = completion_ids[0]

    def turn(self, seconds=0.0):
        self.done = [*self.jobs]

    def poll(self):
        self.turn()
        done = [(name, self.jobs.pop(name)) for name in self.done]
        return [ScoredJob(n, [float(s)], [None], [0.1], {}, {}) for n, s in done]

    def cancel(self, ids):
        for name in ids:
            self.jobs.pop(name, None)


def scorer(**settings):
    return Scorer(Scheduler(), lambda ids: " ".join(map(str, ids)), **settings)


def ended(*tokens):
    return Completion(0, [*tokens], [0.0] * len(tokens), [(1, len(tokens))], "stop")


@pytest.mark.parametrize("early", [True, False], ids=["scored before", "scored after"])
def test_a_draft_that_is_kept_whole_is_scored_once(early):
    of, completion = scorer(), ended(5, 6)
    of.submit_ahead(GROUP, ended(5, 6))
    assert of.scores_ahead and not of.pending
    if early:
        of.turn()
        assert not of.scores_ahead
    of.submit(GROUP, completion)
    of.forget_ahead()
    assert of.pending == 1 and not completion.scored
    if early:
        of.wait(60.0)  # there is nothing to wait for
    assert [c for _, c in of.poll()] == [completion]
    assert completion.scores == [5.0] and completion.text == "5 6"
    assert of.scheduler.calls == of.kept_ahead == 1 and not of.pending


@pytest.mark.parametrize("early", [True, False], ids=["scored before", "scored after"])
def test_the_score_of_a_draft_that_was_cut_is_not_used(early):
    of, completion = scorer(), ended(7, 6)
    of.submit_ahead(GROUP, ended(5, 6))
    if early:
        of.turn()
    of.submit(GROUP, completion)
    of.forget_ahead()
    assert [c.scores for _, c in of.poll()] == [[7.0]]
    assert of.scheduler.calls == 2 and not of.kept_ahead


def test_drafts_are_scored_before_they_are_verified():
    """Begun before or not, as after a resume; other scores that come meanwhile are not lost."""
    of, beside, heeded = scorer(), ended(3), []
    of.submit(replace(GROUP, id="other"), beside)
    of.submit_ahead(GROUP, ended(5, 6))
    late = replace(ended(7, 8), index=1)
    samples = [Sample(GROUP, ended(5, 6)), Sample(GROUP, late)]
    of.score_drafts(samples, lambda: heeded.append(1))
    assert [s.completion.scores for s in samples] == [[5.0], [7.0]] and heeded
    assert [c for _, c in of.poll()] == [beside]
    assert of.scheduler.calls == 3 and len(of.waits) == 1
    for sample in samples:
        of.submit(GROUP, replace(sample.completion, scores=None))
    assert [c.scores for _, c in of.poll()] == [[5.0], [7.0]]
    assert of.scheduler.calls == 3 and of.kept_ahead == 2


def test_a_draft_whose_scoring_fails_has_no_score():
    of = scorer()
    of.scheduler.poll = lambda: [ScoredJob("g/0", [1.0], ["timeout"], [9.0], {}, {})]
    of.score_drafts([Sample(GROUP, draft := ended(5))], lambda: None)
    assert draft.scores == [None] and draft.failure == "`first`: timeout"


def test_waiting_for_the_scores_of_drafts_ends_when_the_run_does():
    of = scorer()
    of.scheduler.poll = list

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        of.score_drafts([Sample(GROUP, ended(5))], stop)


def test_drafts_that_nothing_has_become_are_forgotten():
    of = scorer()
    of.submit_ahead(GROUP, ended(5, 6))
    of.forget_ahead()
    assert not of.scheduler.jobs and not of.scores_ahead
    of.submit(GROUP, ended(5, 6))
    assert of.scheduler.calls == 2 and not of.kept_ahead


def test_scores_that_depend_on_the_time_are_not_computed_ahead():
    for of in (scorer(scores=False), scorer(timeouts=SimpleNamespace())):
        of.submit_ahead(GROUP, ended(5, 6))
        assert not of.scheduler.calls
    of = scorer()
    of.scheduler.asked = ("trainer_state",)
    of.submit_ahead(GROUP, ended(5, 6))
    assert not of.scheduler.calls
