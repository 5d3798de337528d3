"""Rounds whose drafts are verified in parts, and what is certain when their first step begins."""

from types import SimpleNamespace

import pytest

from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.controller import RolloutController, Verify
from lit_rlsched.rollout.next_drafts import DraftingWorker
from lit_rlsched.rollout.scoring import Feedback, Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.streamed_training import Parts, Streaming
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.types import Completion, Draft, Group, Prompt, Request, Sampling


def group(name, completions, draft=None):
    drawn = [Completion(i) for i in range(completions)]
    for each in drawn if draft else ():
        each.draft = Draft([7] * draft, [0.0] * draft, [(0, draft)])
    return Group(name, Prompt(name, "", (2, 3)), Sampling(16), drawn)


def keep(completion, tokens, of=8):
    """What a verification leaves of a draft."""
    completion.draft, completion.segments = None, [(1, tokens)]
    completion.token_ids.extend([7] * tokens)
    completion.logprobs.extend([0.0] * tokens)
    completion.finish_reason = "stop" if tokens == of else None


class InOrder:
    """Scores completions when the loop waits for them, one at a time, in the order of `names`."""

    def __init__(self, names):
        self.names, self.waiting, self.scored = names, [], []

    @property
    def pending(self):
        return len(self.waiting) + len(self.scored)

    def submit(self, group, completion):
        self.waiting.append((group, completion))

    def wait(self, timeout=None):
        self.waiting.sort(key=lambda each: self.names.index(each[0].id))
        self.scored.append(self.waiting.pop(0))

    def poll(self):
        scored, self.scored = self.scored, []
        for group, completion in scored:
            completion.scores = [1.0]
            yield group, completion

    def cancel(self, group=None):
        self.waiting = [each for each in self.waiting if group and each[0] is not group]

    def turn(self, seconds=0.0):
        pass


def controller(scores):
    engine = SimulatedEngine(lambda request: 8, max_jump=1)
    engine.start(EngineSpec("", 32, 64, (1,)))
    loop = RolloutController(engine.make_worker(Admission(32)), InOrder(scores), seed=1)
    loop.worker.start_trace()
    return loop


def stream(loop, groups, rule, start=0.0, **how):
    """Names of the groups whose gradients are computed during the round, part by part."""
    parts, streamed = Parts(Streaming(start), rule.update_prompts, 1), []
    for _ in loop.run(groups, rule, 1, **how):
        streamed += [[g.id for g in part] for part in parts.ready(rule.final_groups(loop.state))]
    return streamed


@pytest.mark.parametrize("scores", ["XY", "YX"])
def test_no_gradient_is_computed_of_a_group_that_may_be_overtaken_in_the_first_step(scores):
    """Two of three completions are needed; what ends first is decided by the order of prompts."""
    loop, groups = controller(scores), [group("Y", 3), group("X", 3)]
    for each in groups:
        for c in each.completions:
            keep(c, 4 if each.id == "Y" and c.index == 2 else 8)
    ratios = {"prompt_ratio": 2.0, "completion_ratio": 1.5}
    rule = TailRound(1, 2, patience=60.0, reuse_drafts=True, **ratios)
    streamed = {name for part in stream(loop, groups, rule) for name in part}
    trained, _ = rule.settle(groups, loop.state)
    assert [g.id for g in trained] == ["Y"]
    assert streamed <= {"Y"}


def test_early_stops_beside_a_verification_do_not_depend_on_the_order_of_scores():
    def streamed(scores):
        loop, groups = controller(scores), [group(n, 2 + (n != "B"), 8) for n in "ABC"]

        def verify(part):
            for c in (c for each in part for c in each.completions):
                keep(c, 4 if c.index == 2 else 8)

        loop.worker = DraftingWorker(loop.worker, [])
        loop.worker.start_trace()
        stop = SimpleNamespace(
            waits=lambda group: sum(c.finished for c in group.completions) >= 2,
            stops=lambda group: True,
        )
        parts = stream(
            loop, groups, FullRound(3), feedback=Feedback(stop=stop), verify=Verify(verify, verify)
        )
        return parts, [len(each.completions) for each in groups]

    assert streamed("ABC") == streamed("BCA") == streamed("CBA")
    assert streamed("ABC")[1] == [2, 2, 2], "both groups with a third completion are stopped"


def test_what_is_cut_decodes_while_the_trainer_uses_what_is_whole():
    """Else the engine would wait until the gradients of all groups that are whole are computed."""
    engine = SimulatedEngine(lambda request: 8, max_jump=1)
    engine.start(EngineSpec("", 32, 64, (1,)))
    worker = engine.make_worker(Admission(32))
    loop = RolloutController(worker, Unscored(), seed=1)
    loop.worker = DraftingWorker(worker, [])
    loop.worker.start_trace()
    groups = [group("whole", 1, 8), group("cut", 1, 8)]

    def verify(part):
        for each in part:
            keep(each.completions[0], 8 if each.id == "whole" else 4)

    drawn = loop.run(groups, FullRound(2), 1, verify=Verify(verify, verify))
    assert next(drawn).id == "whole"
    assert [*worker.running] == ["cut/0"]
    assert next(drawn).id == "cut"


def test_what_is_aborted_in_a_step_that_has_begun_has_never_run():
    engine = SimulatedEngine(lambda request: 8, max_jump=1)
    engine.start(EngineSpec("", 32, 64, (1,)))
    worker = engine.make_worker(Admission(32))
    worker.start_trace()
    worker.submit(Request(name, (2, 3), 1, Sampling(16)) for name in ("aborted", "other"))
    worker.begin()
    assert not worker.abort(["aborted"])
    while worker.busy:
        worker.step()
    assert worker.trace.spans["request"] == ["other"]
    assert worker.trace.spans["slot"] == [0]
