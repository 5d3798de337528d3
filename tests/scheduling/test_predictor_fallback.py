"""When the history of prompts answers in place of a predictor of lengths."""

import numpy as np
import pytest
import torch
from told_lengths import CAP, Told, asked, finish

from lit_rlsched.scheduling.length_prediction import CalibratedPredictor, PromptHistory
from lit_rlsched.scheduling.recorded_lengths import Oracle


def test_nonsense_is_replaced_by_the_history_and_counted():
    nan, inf = float("nan"), float("inf")
    calibrated = CalibratedPredictor(Told([nan, -1, inf, 7, 0, 1e9], [1, 2], [[1]] * 6))
    history = calibrated.history
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
