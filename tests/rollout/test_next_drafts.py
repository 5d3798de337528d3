"""Drafts of the next round take the slots that a round leaves free, and change nothing of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.rollout.controller import Verify
from lit_rlsched.rollout.next_drafts import Following
from lit_rlsched.rollout.scoring import Feedback
from lit_rlsched.scheduling.admission import KEYS, Admission, CacheBudget
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.simulation.loop import simulated_session
from lit_rlsched.types import Completion, Draft, Event, Group, Prompt, Request, Sampling

LIMIT = 40
LENGTHS = st.lists(st.integers(1, LIMIT), min_size=1, max_size=12)


def groups_of(lengths, name):
    """A completion of each length."""
    sampling = Sampling(LIMIT)
    return [
        Group(f"{name}{i}", Prompt(f"{name}{i}", "?", (1, 2)), sampling, [Completion(0)])
        for i in range(len(lengths))
    ]


def tokens(groups):
    return [[*c.token_ids] for g in groups for c in g.completions]


def started(own, later, slots, engines=1, order="fifo", budget=None, stream=True):
    """A session, the groups of a round and those of the next."""
    lengths = {f"{n}{i}": x for n, of in (("a", own), ("b", later)) for i, x in enumerate(of)}
    each = [
        SimulatedEngine(lambda request: lengths[request.group], stream=stream)
        for _ in range(engines)
    ]
    session = simulated_session(
        EnginePool(each) if engines > 1 else each[0],
        slots * engines,
        LIMIT + 2,
        lambda: Admission(slots, order=order, budget=budget),
    )
    return session, groups_of(own, "a"), groups_of(later, "b")


def draw(own, later, *settings, **more):
    """A round and drafts of the next; returns what was drawn and the traces of both parts."""
    session, groups, drafts = started(own, later, *settings, **more)
    following = Following(drafts, "later") if later else None
    rollout = session.rollout(groups, 0, following=following)
    during = session.trace
    assert len(list(rollout)) == len(groups)
    begun = sum(map(len, tokens(drafts)))
    after = session.trace
    session.go_on()
    session.close()
    return groups, drafts, during, after, begun


@given(LENGTHS, LENGTHS, st.integers(1, 6), st.sampled_from([1, 2]), st.sampled_from([*KEYS]))
def test_drafts_change_nothing_of_the_round(own, later, slots, engines, order):
    groups, drafts, during, after, begun = draw(own, later, slots, engines, order)
    alone, _, before, _, _ = draw(own, [], slots, engines, order)
    assert tokens(groups) == tokens(alone)
    assert [len(ids) for ids in tokens(drafts)] == later
    if engines == 1:
        assert during.decode_steps == before.decode_steps
        assert during.busy_slot_steps >= before.busy_slot_steps
    assert during.tokens == sum(own) + begun
    assert after.tokens == sum(later) - begun
    assert all(name.startswith("b") for name in after.spans["request"])


@given(LENGTHS, LENGTHS)
def test_drafts_fill_the_drain(own, later):
    """With a slot for each of the round's completions, the next step takes a freed slot."""
    later = [LIMIT, *later] * len(own)
    _, _, during, _, begun = draw(own, later, slots=len(own))
    assert begun == len(own) * max(own) - sum(own)
    assert during.busy_slot_steps == during.slot_steps == len(own) * max(own)


@given(LENGTHS, LENGTHS, st.integers(2, 6), st.sampled_from([1, 2]), st.data())
def test_drafts_decode_while_the_round_is_verified(own, later, slots, engines, data):
    """A quarter of the turns that the next round needs: of the longest draft, or of all tokens."""
    kept = [data.draw(st.integers(1, length)) for length in own]
    session, groups, drafts = started(own, later, slots, engines)
    for group, length in zip(groups, own, strict=True):
        group.completions[0].draft = Draft([7] * length, [0.0] * length, [(0, length)])

    parts = []

    def verify(part):
        parts.append([group.id for group in part])
        for group in part:
            i = groups.index(group)
            most, length, (completion,) = kept[i], own[i], group.completions
            completion.draft, completion.segments = None, [(1, most)]
            completion.token_ids.extend([7] * most)
            completion.logprobs.extend([0.0] * most)
            completion.finish_reason = "stop" if most == length else None

    rollout = session.rollout(
        groups, 1, following=Following(drafts, "later"), verify=Verify(verify, verify)
    )
    during = session.trace
    assert len(list(rollout)) == len(groups)
    session.go_on()
    session.close()
    assert [len(ids) for ids in tokens(groups)] == own
    assert [len(ids) for ids in tokens(drafts)] == later
    assert sorted(name for part in parts for name in part) == sorted(group.id for group in groups)
    rest = {f"a{i}": own[i] - kept[i] for i in range(len(own)) if kept[i] < own[i]}
    if engines == 1 and len(rest) + len(later) <= slots:  # no completion waits
        step, last, drafts_end = 0, 0, max(later)
        for part in parts:
            size = sum(own[int(name[1:])] for name in part)
            turns = int(0.25 * size * max(max(own), sum(own) / slots) / sum(own))
            step = min(step + turns, max(step, last, drafts_end))
            last = max([last, *(step + rest[name] for name in part if name in rest)])
        assert during.decode_steps == max(step, last)


def ended(trace, name="a"):
    """The last step of each completion of the round."""
    spans = zip(trace.spans["request"], trace.spans["end_step"], strict=True)
    return {request: step for request, step in spans if request.startswith(name)}


def cut(own, later, more, *settings, enough=None, **how):
    """A round that adds a group for each that completes, as far as there are; drafts are cut."""
    session, groups, drafts = started([*own, *more], later, *settings, **how)
    waiting = groups[len(own) :]
    for group in waiting:  # it needs more slots than the group that makes room for it
        group.completions.append(Completion(1))
    rule = FirstDone(enough or len(groups))
    following = Following(drafts, "later", goes_on=False) if later else None
    feedback = Feedback(more=lambda group: waiting.pop(0) if waiting else None) if more else None
    came = [
        group.id
        for group in session.rollout(
            groups[: len(own)], 0, rule, feedback=feedback, following=following
        )
    ]
    assert not session.controller.worker.busy
    session.close()
    return came, groups, drafts, session.trace


class FirstDone(FullRound):
    """Ends with the first groups."""

    ends_early = True

    def done(self, state):
        return len(state.decoded) >= self.update_prompts


@given(
    LENGTHS,
    LENGTHS,
    LENGTHS | st.just([]),
    st.integers(1, 6),
    st.sampled_from([1, 2]),
    st.sampled_from([*KEYS]),
    st.integers(1, 12),
    st.booleans(),
)
def test_no_completion_waits_for_a_draft(own, later, more, slots, engines, order, enough, stream):
    """What a round trains on must not depend on what drafts say, nor on when they end."""
    how = {"engines": engines, "order": order, "enough": min(enough, len(own) + len(more))}
    how["stream"] = stream
    came, groups, drafts, trace = cut(own, later, more, slots, **how)
    other, alone, _, before = cut(own, [], more, slots, **how)
    assert came == other and tokens(groups) == tokens(alone)
    assert ended(trace) == ended(before) and trace.decode_steps == before.decode_steps
    begun = tokens(drafts)
    assert all(len(ids) <= most for ids, most in zip(begun, later, strict=True))
    assert trace.tokens == before.tokens + sum(map(len, begun))


@given(LENGTHS, LENGTHS, st.integers(1, 6))
def test_a_cut_draft_has_all_its_tokens(own, later, slots):
    """A slot that is free draws a token in each step, if a draft waits."""
    _, _, drafts, trace = cut(own, later, [], slots)
    free = trace.slot_steps - sum(own)
    if len(later) >= slots and min(later) >= trace.decode_steps:
        assert trace.busy_slot_steps == trace.slot_steps and sum(map(len, tokens(drafts))) == free
    following = Following(drafts, "later", goes_on=False)
    assert not any(s.completion.token_ids for s in following.samples)
    whole = Following(groups_of(later, "b"), "later")
    for sample, length in zip(whole.samples, later, strict=True):
        event = Event(sample.id, [7] * length, [0.0] * length)
        sample.completion.take(event, 3)
    whole.put_off()
    for sample, length in zip(whole.samples, later, strict=True):
        assert not sample.completion.token_ids and not sample.completion.attempts
        assert sample.completion.draft.segments == [(3, length)]
        assert len(sample.completion.draft.token_ids) == length
    assert not Following(whole.groups, "later").samples, "a draft is not drawn on"


def test_what_waits_moves_to_an_engine_where_only_drafts_wait():
    _, _, during, _, _ = draw([33, 1, 1], [1, 1], slots=1, engines=2)
    assert during.decode_steps == 33


def test_drafts_that_pause_go_on():
    """A cache so small that what runs is admitted for a few tokens at a time."""
    budget = CacheBudget(tokens=60, lease=4)
    own, later = [30, 7, 12], [25, 31, 3]
    groups, drafts, *_ = draw(own, later, 3, budget=budget)
    alone, others, *_ = draw(own, later, 3)
    assert tokens(groups) == tokens(alone) and tokens(drafts) == tokens(others)


@pytest.mark.parametrize("order", [*KEYS, "planned"])
def test_later_requests_come_after_all_others(order):
    admission = Admission(1, order=order)

    def request(name, later, expected=None, prefix=()):
        return Request(name, (1,), 0, Sampling(9), prefix, expected=expected, later=later)

    admission.push([request("x", True), request("y", True)])
    admission.push([request("long", False, 9.0, (1, 2, 3)), request("short", False, 1.0)])
    came, running = [], {}
    while admission:
        (next_one,) = admission.pop(running)
        came.append(next_one.id)
    assert set(came[:2]) == {"long", "short"}
    assert came[2:] == ["x", "y"]
