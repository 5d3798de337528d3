"""How good predictions of lengths are, and what of that a checkpoint holds."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.length_prediction import (
    CalibratedPredictor,
    PromptHistory,
)
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

CAP = 100


def asked(lengths, number=0, drawn=0):
    """One group a length, nothing of it drawn unless `drawn`."""
    return [
        Sample(Group(f"p{i}/{number}", Prompt(f"p{i}", "", (i,)), Sampling(CAP), [c]), c)
        for i in range(len(lengths))
        for c in [Completion(0, [1] * drawn)]
    ]


def finish(samples, lengths):
    for sample, length in zip(samples, lengths, strict=True):
        sample.completion.token_ids = [1] * length
        sample.completion.finish_reason = "length" if length == CAP else "stop"
    return samples


class Told:
    """Says what it is told to say."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def predict(self, samples):
        return self.answers.pop(0)

    def observe(self, samples):
        self.observed = len(samples)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


LENGTHS = [int(n) for n in np.linspace(5, 95, 64)]


def spearman(a, b):
    """By its definition: the correlation of ranks, equal values sharing their mean rank."""
    ranks = [
        [np.mean([y < x for y in v]) + np.mean([y == x for y in v]) / 2 for x in v] for v in (a, b)
    ]
    return np.corrcoef(*ranks)[0, 1] if min(map(np.ptp, ranks)) > 0 else 0.0


@given(st.lists(st.tuples(st.integers(1, CAP), st.integers(1, CAP)), min_size=1, max_size=20))
def test_metrics_by_brute_force(pairs):
    predicted, lengths = map(list, zip(*pairs, strict=True))
    calibrated = CalibratedPredictor(Told(predicted))
    samples = asked(lengths)
    assert calibrated.expect(samples) == predicted
    calibrated.observe(finish(samples, lengths))
    metrics = calibrated.end_round()
    error = np.abs(np.array(predicted) - lengths)
    assert metrics["length_prediction/mae"] == pytest.approx(error.mean())
    assert metrics["length_prediction/rank_correlation"] == pytest.approx(
        spearman(predicted, lengths), abs=1e-5
    )
    assert metrics["length_prediction/history_mae"] == pytest.approx(
        np.mean(CAP - np.array(lengths))
    )
    assert metrics["length_prediction/history_rank_correlation"] == 0.0


def test_a_completion_that_was_restarted_is_not_measured():
    calibrated = CalibratedPredictor(Told([5]))
    samples = asked([10], drawn=10)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, [10]))
    assert "length_prediction/mae" not in calibrated.end_round()


def test_the_first_prediction_counts_and_only_once():
    calibrated = CalibratedPredictor(Told([10, 40], [70, 70]))
    samples = asked([20, 50], drawn=10)
    calibrated.expect(samples)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, [20, 50]))
    calibrated.observe(finish(samples, [20, 50]))
    assert calibrated.end_round()["length_prediction/mae"] == 0.0
    assert "length_prediction/mae" not in calibrated.end_round()


def test_state_round_trip_is_exact():
    calibrated, other = (CalibratedPredictor(TokenConditioned(features=16)) for _ in range(2))
    for number in range(5):
        samples = asked(LENGTHS, number)
        calibrated.expect(samples)
        calibrated.observe(finish(samples, LENGTHS))
        calibrated.end_round()
    calibrated.invalid = 3
    file = io.BytesIO()
    torch.save(calibrated.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for number in range(5, 8):
        results = []
        for c in (calibrated, other):
            samples = asked(LENGTHS, number)
            expected = c.expect(samples)
            c.observe(finish(samples, LENGTHS))
            results.append((expected, c.end_round()))
        assert results[0] == results[1]
    assert other.invalid == 3


def test_waits_for_tools_are_those_of_the_same_environment():
    """Per token, over the rounds; a token of an earlier round counts less."""
    calibrated = CalibratedPredictor(Told())
    for number, (tokens, waited) in enumerate([(40, 20), (80, 160)]):
        samples = asked([tokens, tokens], number)
        calibrated.predictor.answers = [[5.0, 5.0]]
        calibrated.expect(samples)
        slow, quick = finish(samples, [tokens, tokens])
        slow.completion.waited = waited
        for sample, name in ((slow, "slow"), (quick, "quick")):
            prompt = replace(sample.group.prompt, columns={"environment": name})
            sample.group.prompt = prompt
        assert calibrated.waits(slow) == (0.0 if number == 0 else 0.5)
        calibrated.observe(samples)
        calibrated.end_round()
    old = 0.5**0.25
    assert calibrated.waits(slow) == pytest.approx((20 * old + 160) / (40 * old + 80))
    assert calibrated.waits(quick) == 0
    (unknown,) = asked([1])
    assert calibrated.waits(unknown) == 0
    other = CalibratedPredictor(Told())
    other.load_state_dict(calibrated.state_dict())
    assert other.waits(slow) == calibrated.waits(slow)
    other.load_state_dict({**other.state_dict(), "waits": {"rare": [1.0, 3.0], "seen": [2.0, 3.0]}})
    other.end_round()
    assert other.state_dict()["waits"] == {"seen": [2 * old, 3 * old]}


def test_a_round_that_is_cut_short_is_not_learned_from():
    whole, cut = CalibratedPredictor(PromptHistory()), CalibratedPredictor(PromptHistory())
    for calibrated in (whole, cut):
        if calibrated is cut:
            calibrated.start_round()
            begun = asked([5, 9, 14])
            calibrated.expect(begun)
            calibrated.observe(finish(begun[:2], [5, 9]))
        calibrated.start_round()
        samples = asked([5, 9, 14])
        calibrated.expect(samples)
        calibrated.observe(finish(samples, [5, 9, 14]))
    assert cut.end_round() == whole.end_round()
    assert str(cut.state_dict()) == str(whole.state_dict())


def test_what_is_learned_does_not_depend_on_who_finished_first():
    figures = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        calibrated, lengths = CalibratedPredictor(PromptHistory()), [5, 9, 14, 70]
        samples = finish(asked(lengths), lengths)
        calibrated.expect(samples)
        for i in order:
            calibrated.observe([samples[i]])
        figures.append((calibrated.end_round(), str(calibrated.state_dict())))
    assert figures[0] == figures[1]
    state = calibrated.state_dict()
    assert str(state["history"]) == str(state["predictor"])
    assert state["waits"] == {"": [5 + 9 + 14 + 70, 0]}


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": object()}, r"\['a'\]` is a `object`"),
        (
            {"a": [1, "b", {"c": (None, np.float64(1))}]},
            r"\['a'\]\[2\]\['c'\]\[1\]` is a `float64`",
        ),
        ([{1}], r"\[0\]` is a `set`"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(state, where):
    told = Told()
    told.state_dict = lambda: state
    with pytest.raises(UsageError, match=r"`Told.state_dict\(\)" + where):
        CalibratedPredictor(told).state_dict()


# When the history of prompts answers in place of a predictor.


def test_nonsense_is_replaced_by_the_history_and_counted():
    nan, inf = float("nan"), float("inf")
    calibrated = CalibratedPredictor(Told([nan, -1, inf, 7, 0, 1e9], [1, 2], [[1]] * 6, {}))
    history = calibrated.history
    history.observe(finish(asked([20]), [20]))
    samples = asked([0] * 6)
    expected = history.predict(samples)
    with pytest.warns(UserWarning, match="without a single positive number") as warned:
        assert calibrated.expect(samples) == [*expected[:2], CAP, 7, 1, CAP]
        assert calibrated.end_round()["length_prediction/invalid"] == 2
        assert calibrated.expect(samples) == expected  # a wrong number
        assert calibrated.expect(samples) == expected  # a wrong shape
        assert calibrated.expect(samples[:1]) == expected[:1]  # nothing that is a number
    assert len(warned) == 1
    assert calibrated.end_round()["length_prediction/invalid"] == 2 + 6 + 6 + 1
    assert calibrated.expect([]) == []


@pytest.mark.parametrize(
    "answer",
    [
        torch.tensor([7.0, 9.0], requires_grad=True),
        torch.tensor([7.0, 9.0], dtype=torch.bfloat16),
        np.array([7, 9]),
        (7, 9),
    ],
)
def test_numbers_in_any_form_are_numbers(answer):
    assert CalibratedPredictor(Told(answer)).expect(asked([0, 0])) == [7, 9]


@pytest.mark.parametrize(
    "answer", [None, {"a": 1}, ["many", "few"], [[1], [2, 3]], [1.0], iter([1])]
)
def test_what_is_no_list_of_numbers_is_counted(answer):
    calibrated = CalibratedPredictor(Told(answer))
    with pytest.warns(UserWarning, match="`Told.predict` returned a"):
        assert calibrated.expect(asked([0, 0])) == [CAP, CAP]
    assert calibrated.end_round()["length_prediction/invalid"] == 2
