"""When the history of prompts answers in place of a predictor of lengths."""

import warnings

import numpy as np
import pytest
import torch
from told_lengths import CAP, LENGTHS, Told, asked, finish, play

from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.length_prediction import PromptHistory, SiblingMax
from lit_rlsched.scheduling.recorded_lengths import Oracle


def test_nonsense_is_replaced_by_the_history_and_counted():
    history = PromptHistory()
    nan, inf = float("nan"), float("inf")
    calibrated = CalibratedPredictor(Told([nan, -1, inf, 7, 0, 1e9], [1, 2], [[1]] * 6), history)
    history.observe(finish(asked([20]), [20]))
    samples = asked([0] * 6)
    expected = history.predict(samples)
    assert calibrated.expect(samples) == [*expected[:2], CAP, 7, 1, CAP]
    assert calibrated.end_round()["length_prediction/invalid"] == 2
    assert calibrated.expect(samples) == expected  # a wrong number
    assert calibrated.end_round()["length_prediction/invalid"] == 8
    assert calibrated.expect(samples) == expected  # a wrong shape
    assert calibrated.end_round()["length_prediction/invalid"] == 14
    assert calibrated.expect([]) == []


def test_nonsense_of_several_calls_is_counted_and_said_once():
    calibrated = CalibratedPredictor(Told(*[{"no": "numbers"}] * 3))
    with pytest.warns(UserWarning, match="`Told.predict` returned") as seen:
        for number in range(3):
            assert calibrated.expect(asked([0], number)) == [CAP]
    assert len(seen) == 1
    assert calibrated.end_round()["length_prediction/invalid"] == 3


def test_fallback_engages_and_releases():
    told = Told()
    calibrated = CalibratedPredictor(told)
    wrong = LENGTHS[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):  # 64 completions each: too few to judge
            expected, metrics = play(calibrated, told, wrong, number)
            assert expected == wrong and metrics["length_prediction/fallback"] == 0
    with pytest.warns(UserWarning, match=r"`Told` is replaced.*is -1\.000.*history has 0\."):
        expected, metrics = play(calibrated, told, wrong, 3)
    assert expected == wrong and metrics["length_prediction/fallback"] == 1
    expected, metrics = play(calibrated, told, wrong, 4)
    assert expected == pytest.approx(calibrated.history.predict(asked(LENGTHS)), rel=0.1)
    assert metrics["length_prediction/rank_correlation"] == pytest.approx(-1)  # it is still asked
    told_right = [float(n) for n in LENGTHS]
    with pytest.warns(UserWarning, match="`Told` is used again") as seen:
        for number in range(5, 60):
            _, metrics = play(calibrated, told, told_right, number)
            calibrated.history.load_state_dict(PromptHistory().state_dict())  # it knows nothing
            if not metrics["length_prediction/fallback"]:
                break
    assert number > 6 and len(seen) == 1  # not at the first good round
    assert play(calibrated, told, told_right, 99)[0] == told_right


def test_within_the_margin_nothing_is_replaced():
    told, history = Told(), PromptHistory()
    calibrated = CalibratedPredictor(told, history)
    for number in range(8):
        answers = np.array(history.predict(asked(LENGTHS)))
        answers[:4] = answers[3::-1]  # a little worse
        expected, metrics = play(calibrated, told, answers.tolist(), number)
        assert expected == answers.tolist()
    own, other = (metrics[f"length_prediction/{n}rank_correlation"] for n in ("", "history_"))
    assert other - 0.05 < own < other


@pytest.mark.parametrize("make", [PromptHistory, SiblingMax, lambda: Oracle({"x": 1})])
def test_some_are_never_replaced(make):
    calibrated = CalibratedPredictor(make())
    names = ("rank_correlation", "history_rank_correlation", "mae", "history_mae")
    worst = dict(zip((f"length_prediction/{n}" for n in names), (-1.0, 1.0, 9.0, 1.0), strict=True))
    calibrated._average(1000, worst)
    assert not calibrated.fallback


@pytest.mark.parametrize(
    ("own", "error", "replaced"),
    [(0.02, 9.0, True), (0.02, 7.0, False), (0.3, 90.0, False), (-0.1, 1.0, True)],
)
def test_who_is_replaced(own, error, replaced):
    names = ("rank_correlation", "history_rank_correlation", "mae", "history_mae")
    figures = {f"length_prediction/{n}": v for n, v in zip(names, (own, 0, error, 5), strict=True)}
    calibrated = CalibratedPredictor(Told())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        calibrated._average(1000, figures)
        calibrated._average(1000, figures)
    assert calibrated.fallback == replaced and len(seen) == replaced


@pytest.mark.parametrize(("own", "error"), [(-0.05, 1.0), (0.05, 90.0), (0.02, 7.5)])
def test_at_a_margin_nothing_is_replaced(own, error):
    """`MARGIN` is 0.05 and `ERROR` 1.5; the history has a correlation of 0 and an error of 5."""
    names = ("rank_correlation", "history_rank_correlation", "mae", "history_mae")
    figures = {f"length_prediction/{n}": v for n, v in zip(names, (own, 0, error, 5), strict=True)}
    calibrated = CalibratedPredictor(Told())
    calibrated._average(1000, figures)
    assert not calibrated.fallback


def test_a_predictor_that_is_only_as_good_is_not_used_again():
    names = ("rank_correlation", "history_rank_correlation", "mae", "history_mae")
    calibrated = CalibratedPredictor(Told())
    calibrated.fallback = True
    calibrated._average(1000, {f"length_prediction/{name}": 0.5 for name in names})
    assert calibrated.fallback


class Broken(PromptHistory):
    def predict(self, samples):
        raise RuntimeError("no weights")


def test_what_a_predictor_raises_is_not_hidden():
    with pytest.raises(RuntimeError, match="no weights"):
        CalibratedPredictor(Broken()).expect(asked([5]))


def test_an_oracle_that_lacks_a_completion_asks_the_history():
    calibrated = CalibratedPredictor(Oracle({"x": 1}))
    with pytest.warns(UserWarning, match="`Oracle.predict` returned"):
        assert calibrated.expect(asked([5])) == [CAP]
    assert calibrated.end_round()["length_prediction/invalid"] == 1


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
