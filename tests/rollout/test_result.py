import io
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.rollout.result import (
    Attempt,
    DraftAudit,
    PoolAudit,
    RoundResult,
    length_bias,
    mean_length,
    put_off_old,
    restart_stale,
    split_round,
    wait_bias,
)
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.scheduling.round_rule import FullRound, RoundState
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Completion, Event, Group, Prompt, Sampling

attempts = st.builds(Attempt, st.integers(1, 12), st.booleans())


def redistributed_mean(attempts):
    """Efron's way to the same estimate: whoever was cut hands its weight on to who came further."""
    rest = sorted(attempts, key=lambda a: (a.tokens, not a.finished))
    weights = [Fraction(1, len(rest))] * len(rest)
    for i, one in enumerate(rest[:-1]):
        if not one.finished:
            further = len(rest) - i - 1
            weights[i + 1 :] = [w + weights[i] / further for w in weights[i + 1 :]]
            weights[i] = Fraction(0)
    return float(sum(w * a.tokens for w, a in zip(weights, rest, strict=True)))


@given(st.lists(attempts, min_size=1, max_size=30))
def test_mean_length_is_the_redistributed_mean(attempts):
    assert mean_length(attempts) == pytest.approx(redistributed_mean(attempts), rel=1e-9)


def test_mean_length_by_hand():
    assert mean_length([]) == 0.0
    assert mean_length([Attempt(2, True), Attempt(4, True)]) == 3.0
    # half of those that came past 2 end at 4 and half at 8: so does the one that was cut
    cut = [Attempt(2, False), Attempt(4, True), Attempt(8, True)]
    assert mean_length(cut) == pytest.approx(6.0)
    # one cut where another ends had come as far, and would have gone on
    assert mean_length([Attempt(4, False), Attempt(4, True), Attempt(8, True)]) == pytest.approx(
        (4 + 8 + 8) / 3
    )
    # nobody came further than the longest, which was cut
    assert mean_length([Attempt(2, True), Attempt(6, False)]) == pytest.approx(4.0)
    assert mean_length([Attempt(3, False), Attempt(5, False)]) == pytest.approx(5.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mean_length_sees_through_the_cut(seed):
    random = np.random.default_rng(seed)
    lengths = np.minimum(np.ceil(random.lognormal(4, 0.8, 4000)), 400).astype(int)
    cuts = random.integers(40, 600, 4000)
    seen = [Attempt(int(min(n, c)), bool(n <= c)) for n, c in zip(lengths, cuts, strict=True)]
    truth = lengths.mean()
    assert mean_length(seen) == pytest.approx(truth, rel=0.03)
    assert np.mean([a.tokens for a in seen]) < 0.95 * truth
    assert np.mean([a.tokens for a in seen if a.finished]) < 0.93 * truth


def test_wait_bias_is_per_token():
    slow, quick = Attempt(10, False, waited=30), Attempt(10, True, waited=10)
    assert wait_bias([quick], [slow, quick]) == 0.5
    assert wait_bias([slow, quick], [slow, quick]) == 1.0
    assert wait_bias([Attempt(4, True)], [Attempt(4, True)]) is None
    assert wait_bias([], [slow]) is None


def test_length_bias():
    drawn = [Attempt(2, True), Attempt(6, True)]
    assert length_bias([2, 6], drawn) == 1.0
    assert length_bias([2], drawn) == 0.5
    assert length_bias([2], [Attempt(2, True), Attempt(6, False)]) == pytest.approx(2 / 4)
    assert length_bias([], drawn) == length_bias([3], []) == 1.0


def completion(index, *spans, reason=None):
    made = Completion(index)
    for version, tokens in spans:
        made.take(Event("", [7] * tokens, [-0.5] * tokens), version)
    made.finish_reason = reason
    return made


def group(name, *completions):
    return Group(f"{name}@0", Prompt(name, name, (1,)), Sampling(20), list(completions))


def is_blank(completion):
    return completion == Completion(completion.index, attempts=completion.attempts)


def stale_groups():
    return [
        group("a", completion(0, (1, 3), (4, 2), reason="stop"), completion(1, (3, 4))),
        group("b", completion(0, (4, 1)), completion(1)),
    ]


@pytest.mark.parametrize(
    ("most", "restarted"),
    [(None, []), (4, []), (3, []), (2, ["a0"]), (1, ["a0"]), (0, ["a0", "a1"])],
)
def test_what_is_too_old_is_begun_anew(most, restarted):
    groups, rule = stale_groups(), SortedRound(2, 4, 2, mode="partial", max_staleness=most)
    were = {"a0": Attempt(5, finished=True), "a1": Attempt(4, finished=False)}
    assert restart_stale(groups, 4, rule) == [were[name] for name in restarted]
    for one, before in zip(groups, stale_groups(), strict=True):
        for now, then in zip(one.completions, before.completions, strict=True):
            if f"{one.prompt.uid}{now.index}" in restarted:
                assert is_blank(now) and now.attempts == 1
            else:
                assert now == then


def split(mode, unit="group"):
    done = [completion(i, (4, 2 + i), reason="stop") for i in range(2)]
    half = [completion(0, (4, 6), reason="length"), completion(1, (3, 1), (4, 7))]
    groups = [group("a", *half), group("b", *done), group("c", Completion(0), Completion(1))]
    half[0].scores, half[0].text, half[0].extra = [1.0], "text", {"column": 1}
    rule = SortedRound(1, 3, 2, unit, mode)
    return groups, split_round(RoundState(groups), rule, [Attempt(9, False)])


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_what_ran_is_told_before_it_is_thrown_away(mode):
    groups, result = split(mode)
    assert result.ran == [
        Attempt(6, True), Attempt(8, False), Attempt(2, True), Attempt(3, True)
    ]  # fmt: skip
    assert result.trained == [groups[1]]
    assert [g.id for g in result.left] == ["a@0", "c@0"]


def test_on_policy_throws_away_what_is_left():
    _, result = split("on_policy")
    assert result.discarded == [Attempt(9, False), Attempt(6, True), Attempt(8, False)]
    left = [c for g in result.left for c in g.completions]
    assert all(map(is_blank, left))
    assert [c.attempts for c in left] == [1, 1, 0, 0]
    assert [c.attempts for g in result.trained for c in g.completions] == [0, 0]


def test_partial_keeps_what_is_left():
    _, result = split("partial")
    assert result.discarded == [Attempt(9, False)]
    first, second = result.left[0].completions
    assert (first.scores, first.text, first.extra) == ([1.0], "text", {"column": 1})
    assert first.finish_reason == "length" and second.segments == [(3, 1), (4, 7)]


def test_on_policy_throws_nothing_away_that_is_trained_alone():
    _, result = split("on_policy", unit="completion")
    assert result.discarded == [Attempt(9, False), Attempt(8, False)]
    assert [(g.id, [c.index for c in g.completions]) for g in result.trained] == [
        ("a@0", [0]),
        ("b@0", [0, 1]),
    ]


def test_a_full_round_leaves_and_discards_nothing():
    groups = [group("a", completion(0, (0, 3), reason="stop"))]
    result = split_round(RoundState(groups), FullRound(1), [])
    assert (result.trained, result.left, result.discarded) == (groups, [], [])
    assert result.ran == [Attempt(3, True)]


def trace(slots, *steps):
    """Steps of `(seconds, running)`, a token a decode step for each that runs."""
    made, now = RolloutTrace(slots), 0.0
    for i in range(slots):
        made.admitted(str(i), now)
    for seconds, running in steps:
        made.take(Step(now, now + seconds, running, 0))
        now += seconds
    for i in range(slots):
        made.left(str(i), now, sum(running > i for _, running in steps))
    return made


def trained_on(*lengths, attempts=0):
    completions = [
        Completion(i, [5] * n, [-1.0] * n, [(0, n)], "stop", attempts=attempts)
        for i, n in enumerate(lengths)
    ]
    return [Group("a@0", Prompt("a", "", (1,)), Sampling(8), completions)]


def result(trained, trace, unfinished=(), **given):
    return RoundResult([], trained, [], [], [*unfinished], trace=trace, **given)


def audited():
    audit = PoolAudit()
    discarded = [Attempt(4, False), Attempt(1, True)]
    stale = [Attempt(1, False, first=False)]
    first, second = trained_on(2, 3), trained_on(6, attempts=1)
    audit.add(result(first, trace(2, *4 * [(1.0, 2)], *3 * [(1.0, 1)]), unfinished=discarded))
    audit.add(result(second, trace(2, *3 * [(2.0, 2)]), stale=stale))
    return audit


def test_a_pool_by_hand():
    audit = audited()
    # 2 + 3 trained on, 4 + 1 discarded, 1 left and then too old; then 6
    assert (audit.rounds, audit.tokens, audit.trained) == (2, 11 + 6, [2, 3, 6])
    # first draws only, and nothing beyond the 4 tokens that the longest of them came to
    drawn = redistributed_mean([*(Attempt(n, True) for n in (1, 2, 3)), Attempt(4, False)])
    assert audit.metrics() == pytest.approx(
        {
            "pool/rounds": 2,
            "pool/bubble_ratio": (1 * 3.0) / (2 * 7.0 + 2 * 6.0),
            "pool/useful_token_share": (2 + 3 + 6) / 17,
            "pool/trained_over_drawn_length": ((2 + 3 + 4) / 3) / drawn,
        }
    )


def test_drafts_of_an_earlier_pool_by_hand():
    """Of 6 tokens of drafts, 4 are verified, of which 1 is accepted; 2 more are decoded."""
    audit = PoolAudit(carried_tokens=6)
    steps = trace(1, (1.0, 1), (1.0, 1))
    audit.add(result(trained_on(3, attempts=1), steps, drafts=DraftAudit(4, 1)))
    assert audit.metrics()["pool/useful_token_share"] == 3 / (2 + 4)


def test_a_token_that_the_verification_drew_may_be_discarded():
    """Of a draft of 8 tokens 1 is kept and another drawn, which makes 9; these two are lost."""
    audit, drafts = PoolAudit(carried_tokens=8), DraftAudit(8, 1, drawn=1)
    lost = result([], RolloutTrace(1), [Attempt(2, False)], drafts=drafts)
    audit.add(lost)
    assert audit.metrics()["pool/useful_token_share"] == 0 == 9 - lost.discarded_tokens


def test_what_lost_is_thrown_away():
    lost = group("a", completion(0, (4, 3), reason="stop"), completion(1, (4, 2)), Completion(2))
    won = group("b", *(completion(i, (4, 1), reason="stop") for i in range(3)))
    for c in won.completions:
        c.scores = [1.0]
    state = RoundState([lost, won], decoded=[won], patient=True)
    result = split_round(state, TailRound(1, 3, 2.0), [])
    assert result.unfinished == [Attempt(3, True), Attempt(2, False)]
    assert [g.id for g in result.left] == ["a@0"] and result.trained == [won]
    _, second, third = result.left[0].completions
    assert second == Completion(1, attempts=1) and third == Completion(2)
    assert result.discarded_tokens == 5


def test_what_waits_in_a_window_keeps_its_tokens():
    goes_on = group("a", completion(0, (4, 3), reason="stop"), completion(1, (4, 2)), Completion(2))
    done = group("b", completion(0, (4, 1), reason="stop"))
    state = RoundState([done, goes_on], decoded=[done], waiting={goes_on.id})
    result = split_round(state, WindowRound(1, 2, 0), [])
    assert (result.trained, result.unfinished, result.discarded_tokens) == ([done], [], 0)
    assert [[c.segments for c in g.completions] for g in result.left] == [[[(4, 3)], [(4, 2)], []]]


def test_what_is_old_becomes_a_draft_finished_or_not():
    rule = WindowRound(1, 2, 9, max_staleness=6, verifies_from=4)
    done = completion(0, (3, 1), (5, 2), reason="stop")
    done.scores, done.text, done.extra = [1.0], "text", {"answer": 1}
    young = completion(2, (4, 1), (5, 2), reason="stop")
    old = group("a", done, completion(1, (3, 2)), young, Completion(3))
    before = put_off_old([old], 7, rule)
    assert [(c.index, was.finished) for c, was in before] == [(0, True), (1, False)]
    assert [c.draft and c.draft.segments for c in old.completions] == [
        [(3, 1), (5, 2)],
        [(3, 2)],
        None,
        None,
    ]
    assert not done.scored and not done.attempts, "drawn on, it is the same draw"
    assert not restart_stale([old], 7, rule) and young.segments == [(4, 1), (5, 2)]
    assert put_off_old([group("b", completion(0, (3, 1)))], 7, FullRound(1)) == []


def test_an_audit_survives_a_checkpoint():
    file, audit = io.BytesIO(), audited()
    torch.save(audit.state_dict(), file)
    file.seek(0)
    other = PoolAudit.from_state(torch.load(file, weights_only=True))
    assert other == audit and other.metrics() == audit.metrics()
    other.add(result(trained_on(1), trace(1, (1.0, 1)), [Attempt(2, True)]))
    assert audit == audited()


def test_a_pool_of_which_nothing_ran():
    assert PoolAudit().metrics() == {
        "pool/rounds": 0,
        "pool/bubble_ratio": 0.0,
        "pool/useful_token_share": 1.0,
        "pool/trained_over_drawn_length": 1.0,
    }
