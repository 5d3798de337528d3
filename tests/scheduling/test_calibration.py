import io
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.calibration import CalibratedPredictor, _ranks
from lit_rlsched.scheduling.length_prediction import PromptHistory, SiblingMax
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
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

    revises = False

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
    assert ("length_prediction/cap_coverage" in metrics) == (CAP in lengths)


def test_cap_coverage_counts_the_capped_among_as_many_longest():
    lengths = [CAP, CAP, CAP, 10, 20, 30]
    calibrated = CalibratedPredictor(Told([90, 20, 80, 85, 1, 2]))
    samples = asked(lengths)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, lengths))
    assert calibrated.end_round()["length_prediction/cap_coverage"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("second", "coverage"), [(85, 0.5), (89, 1.0)])
def test_cap_coverage_of_two(second, coverage):
    lengths = [CAP, 10, CAP, 20, 30, 40]
    calibrated = CalibratedPredictor(Told([90, 87, second, 3, 1, 2]))
    samples = asked(lengths)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, lengths))
    assert calibrated.end_round()["length_prediction/cap_coverage"] == coverage


def test_cap_coverage_is_of_whole_completions_not_of_what_comes():
    calibrated = CalibratedPredictor(Told([40, 60]))
    samples = asked([CAP], 1, drawn=50) + asked([10], 2)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, [CAP, 10]))
    assert calibrated.end_round()["length_prediction/cap_coverage"] == 1.0


def test_ranks_by_hand():
    assert _ranks(np.array([10.0, 30.0, 20.0, 20.0])).tolist() == [1, 4, 2.5, 2.5]


def test_equal_lengths_have_no_rank_correlation():
    calibrated = CalibratedPredictor(Told([10, 20]))
    samples = asked([0, 0])
    calibrated.expect(samples)
    calibrated.observe(finish(samples, [30, 30]))
    assert calibrated.end_round()["length_prediction/rank_correlation"] == 0.0


def test_a_completion_that_was_restarted_is_not_measured():
    calibrated = CalibratedPredictor(Told([5]))
    samples = asked([10], drawn=10)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, [10]))
    assert "length_prediction/mae" not in calibrated.end_round()


def test_a_predictor_gets_the_function_that_decodes():
    told = Told()
    told.bind = lambda decode: setattr(told, "decode", decode)
    CalibratedPredictor(told).bind(str)
    assert told.decode is str


def test_the_first_prediction_counts_and_only_once():
    calibrated = CalibratedPredictor(Told([10, 40], [70, 70]))
    samples = asked([20, 50], drawn=10)
    calibrated.expect(samples)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, [20, 50]))
    calibrated.observe(finish(samples, [20, 50]))
    assert calibrated.end_round()["length_prediction/mae"] == 0.0
    assert "length_prediction/mae" not in calibrated.end_round()


def test_the_last_prediction_counts_where_siblings_revise_it():
    told = Told([99, 99], [10, 40])
    told.revises = True
    calibrated = CalibratedPredictor(told)
    assert calibrated.revises and not CalibratedPredictor(Told()).revises
    samples = asked([20, 50], drawn=10)
    calibrated.expect(samples)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, [20, 50]))
    assert calibrated.end_round()["length_prediction/mae"] == 0.0


def test_what_does_not_finish_in_a_round_is_not_measured_in_the_next():
    calibrated = CalibratedPredictor(Told([10]))
    samples = asked([20])
    calibrated.expect(samples)
    calibrated.end_round()
    calibrated.observe(finish(samples, [20]))
    assert "length_prediction/mae" not in calibrated.end_round()


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


LENGTHS = [int(n) for n in np.linspace(5, 95, 64)]


def play(calibrated, told, answers, number):
    """One round in which the predictor says `answers`."""
    told.answers = [answers]
    samples = asked(LENGTHS, number)
    expected = calibrated.expect(samples)
    calibrated.observe(finish(samples, LENGTHS))
    return expected, calibrated.end_round()


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


def test_a_history_cannot_stand_in_for_its_own_predictor():
    predictor = SiblingMax()
    with pytest.raises(ValueError, match="learn everything twice"):
        CalibratedPredictor(predictor, predictor.history)


@pytest.mark.filterwarnings("ignore:.*is replaced by the history")
def test_state_round_trip_is_exact():
    calibrated, other = (CalibratedPredictor(TokenConditioned(features=16)) for _ in range(2))
    for number in range(5):
        samples = asked(LENGTHS, number)
        calibrated.expect(samples)
        calibrated.observe(finish(samples, LENGTHS))
        calibrated.end_round()
    calibrated.invalid, calibrated.fallback = 3, True
    file = io.BytesIO()
    torch.save(calibrated.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for number in range(5, 8):
        results = []
        for c in (calibrated, other):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                samples = asked(LENGTHS, number)
                expected = c.expect(samples)
                c.observe(finish(samples, LENGTHS))
                results.append((expected, c.end_round(), [str(w.message) for w in seen]))
        assert results[0] == results[1]
    assert other.invalid == 3


def test_the_state_of_another_predictor_is_left_alone():
    learned = CalibratedPredictor(SiblingMax())
    learned.observe(finish(asked([5]), [5]))
    learned.end_round()
    fresh = CalibratedPredictor(PromptHistory())
    before = str(fresh.state_dict())
    with pytest.warns(UserWarning, match=r"of a `SiblingMax`.*PromptHistory.*starts untrained"):
        fresh.load_state_dict(learned.state_dict())
    assert str(fresh.state_dict()) == before


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


@pytest.mark.parametrize("capped", [[0, 1], [6, 7], [0, 7]])
def test_cap_coverage_of_equal_predictions_is_chance(capped):
    told = Told([50.0] * 8)
    calibrated = CalibratedPredictor(told)
    lengths = [CAP if i in capped else 10 + i for i in range(8)]
    samples = asked(lengths)
    calibrated.expect(samples)
    calibrated.observe(finish(samples, lengths))
    assert calibrated.end_round()["length_prediction/cap_coverage"] == 2 / 8


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
    with pytest.raises(ValueError, match=r"`Told.state_dict\(\)" + where):
        CalibratedPredictor(told).state_dict()


def test_what_a_checkpoint_can_hold_is_kept():
    told, state = Told(), {"a": [1, 2.0, "x", None, True, torch.ones(2)], 3: ({"b": 1},)}
    told.state_dict = lambda: state
    assert CalibratedPredictor(told).state_dict()["predictor"] is state


def test_what_is_lost_of_the_average():
    """Half of it after four rounds; a round counts by its completions."""
    names = ("rank_correlation", "history_rank_correlation", "mae", "history_mae")

    def average(calibrated, count, *figures):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            calibrated._average(
                count,
                {f"length_prediction/{n}": v for n, v in zip(names, figures, strict=True)},
            )
        return [re.findall(r"-?[\d.]+\d", str(w.message)) for w in seen]

    calibrated = CalibratedPredictor(Told())
    assert average(calibrated, 255, 0.8, 0.9, 4.0, 4.0) == []
    fade = 255 * 0.5**0.25
    own, error = (fade * 0.8 + 300 * 0.1) / (fade + 300), (fade * 4 + 300 * 20) / (fade + 300)
    history, other = (fade * 0.9 + 300 * 0.7) / (fade + 300), (fade * 4 + 300 * 2) / (fade + 300)
    ((*said,),) = average(calibrated, 300, 0.1, 0.7, 20.0, 2.0)
    expected = [f"{own:.3f}", f"{error:.3g}", f"{history:.3f}", f"{other:.3g}"]
    assert said == expected and calibrated.fallback
    assert calibrated.state_dict()["averages"][0] == pytest.approx(fade + 300)
