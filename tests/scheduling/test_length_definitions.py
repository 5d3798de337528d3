"""Predictors against slow ones that follow their docstrings word by word."""

import math
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.length_prediction import PromptHistory
from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.scheduling.token_conditioned import TokenConditioned, hashed_tokens
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

CAP = 60


def sample(uid, tokens, number=0, logprobs=None, prompt=(1, 2)):
    completion = Completion(0, list(tokens), logprobs or [-0.5] * len(tokens))
    group = Group(f"{uid}@{number}", Prompt(uid, "", prompt), Sampling(CAP), [completion])
    return Sample(group, completion)


class SlowHistory:
    """Every completion that was ever seen, with its weight."""

    def __init__(self, shrinkage=4.0):
        self.decay, self.shrinkage, self.half_life = 0.9, shrinkage, 2000.0
        self.seen, self.prompts = [], defaultdict(lambda: (0.0, 0.0))

    def observe(self, batch):
        fade = 0.5 ** (len(batch) / self.half_life)
        self.seen = [(w * fade, n) for w, n in self.seen] + [(1.0, max(n, 1)) for _, n in batch]
        mean = sum(w * n for w, n in self.seen) / sum(w for w, _ in self.seen)
        for uid, n in batch:
            count, total = self.prompts[uid]
            ratio = max(n, 1) / mean
            self.prompts[uid] = count * self.decay + 1, total * self.decay + ratio

    def ratio(self, uid):
        count, total = self.prompts[uid]
        return (total + self.shrinkage) / (count + self.shrinkage) if count else 1.0

    def predict(self, uid, drawn):
        bins = defaultdict(list)
        for w, n in self.seen:
            bins[min(255, math.floor(20 * math.log(n)))].append((w, n))
        alive, total = 0.0, 0.0
        for lengths in bins.values():
            weight = sum(w for w, _ in lengths)
            length = self.ratio(uid) * sum(w * n for w, n in lengths) / weight
            if length > drawn + 1e-6:  # `drawn` is an integer; the rest is rounding
                alive, total = alive + weight, total + weight * min(length, CAP)
        expected = total / alive if alive else CAP
        return min(max(expected - drawn, 1), max(CAP - drawn, 1))


batches = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, CAP)), min_size=1, max_size=6),
    max_size=5,
)


@given(batches, st.sampled_from([{}, {"shrinkage": 1.0}]))
def test_the_history_by_its_definition(batches, options):
    history, slow = PromptHistory(**options), SlowHistory(**options)
    history.statistics = PromptStatistics()
    asked = [(uid, drawn) for uid in "abcd" for drawn in (0, 7, 30, CAP)]
    for batch in [None, *batches]:
        if batch:
            samples = [sample(uid, [7] * n) for uid, n in batch]
            history.observe(samples)
            history.statistics.observe(0, [s.group for s in samples])
            slow.observe(batch)
        found = history.predict([sample(uid, [7] * drawn) for uid, drawn in asked])
        for pair, tokens in zip(asked, found, strict=True):
            assert tokens == pytest.approx(slow.predict(*pair), rel=1e-9)
    assert [history.ratio(uid) for uid in "abcd"] == pytest.approx(
        [slow.ratio(uid) for uid in "abcd"], rel=1e-9
    )


def test_a_very_long_completion_is_in_the_last_bin():
    history = PromptHistory()
    long = sample("a", [7] * 400_000)
    longer = sample("b", [7] * 500_000)
    history.observe([long, longer])
    weights, tokens = history.state_dict()["histogram"].numpy()
    assert weights[-1] == 2 and tokens[-1] == 900_000


class SlowRegression:
    """Weighted least squares over every completion that was ever learned from."""

    def __init__(self, features, ridge=5.0, half_life=4000.0):
        self.hashed, self.ridge = partial(hashed_tokens, size=features), ridge
        self.half_life = half_life
        self.history = PromptHistory()
        self.rows = []  # weight, features, tokens that came, tokens that were predicted

    def features(self, sample):
        logprobs = np.array(
            [0.0 if p != p else min(max(p, -10.0), 0.0) for p in sample.completion.logprobs]
        )
        said = [0.0] * 3
        if len(logprobs):
            said = [-logprobs.mean(), -logprobs[-8:].mean(), -logprobs.min() / 5]
        drawn, prompt = len(sample.completion.token_ids), len(sample.group.prompt.token_ids)
        ratio = math.log(self.history.ratio(sample.group.prompt.uid))
        scalars = [*said, math.log1p(drawn) / 5, math.log1p(prompt) / 5, ratio, 1.0]
        return np.concatenate([self.hashed([sample])[0], scalars])

    def weights(self):
        root = np.sqrt([row[0] for row in self.rows])[:, None]
        x = root * np.array([row[1] for row in self.rows])
        y = root[:, 0] * np.log([row[2] for row in self.rows])
        penalty = np.sqrt([self.ridge] * (x.shape[1] - 1) + [1e-6])
        whole = np.concatenate([x, np.diag(penalty)])
        return np.linalg.lstsq(whole, np.concatenate([y, np.zeros(len(penalty))]), rcond=None)[0]

    def predict(self, samples):
        self.asked = []
        for s in samples:
            x = self.features(s)
            raw = float(np.exp(np.clip(x @ self.weights(), 0, 20))) if self.rows else math.nan
            self.asked.append((len(s.completion.token_ids), x.astype(np.float32), raw))
        if not self.rows:
            return self.history.predict(samples)
        came, said = (sum(row[0] * row[i] for row in self.rows) for i in (2, 3))
        return [min(max(raw * came / said, 1), max(CAP - drawn, 1)) for drawn, _, raw in self.asked]

    def observe(self, samples):
        self.history.observe(samples)
        new = [
            [1.0, x.astype(float), len(s.completion.token_ids) - drawn, raw]
            for s, (drawn, x, raw) in zip(samples, self.asked, strict=True)
        ]
        fade = 0.5 ** (len(new) / self.half_life)
        self.rows = [[w * fade, *rest] for w, *rest in self.rows] + new
        for row in new:
            if math.isnan(row[3]):
                row[3] = float(np.exp(np.clip(row[1] @ self.weights(), 0, 20)))


@pytest.mark.parametrize("options", [{}, {"ridge": 0.5, "half_life": 20.0}])
def test_the_regression_by_its_definition(options):
    rng = np.random.default_rng(0)
    fast, slow = TokenConditioned(features=12, **options), SlowRegression(12, **options)
    known = fast.history.statistics = slow.history.statistics = PromptStatistics()
    for number in range(6):
        probes, wholes = [], []
        for uid in "abcde":
            drawn, length = int(rng.integers(0, 12)), int(rng.integers(13, CAP))
            ids, logprobs = rng.integers(0, 9, length).tolist(), (-3 * rng.random(length)).tolist()
            logprobs[3:6] = math.nan, -math.inf, 0.5
            prompt = tuple(rng.integers(0, 9, 1 + number).tolist())
            probes.append(sample(uid, ids[:drawn], number, logprobs[:drawn], prompt))
            wholes.append(sample(uid, ids, number, logprobs, prompt))
        assert fast.predict(probes) == pytest.approx(slow.predict(probes), rel=1e-5)
        scalars = [slow.features(s)[12:] for s in probes]  # a checkpoint holds their weights
        np.testing.assert_allclose(fast._scalars(probes), scalars, rtol=1e-12)
        fast.observe(wholes)
        slow.observe(wholes)
        known.observe(number, [s.group for s in wholes])


@pytest.mark.parametrize(
    ("fitted", "came", "predicted", "expected"),
    [(-3.0, 50.0, 1.0, 50.0), (30.0, 10.0, math.exp(20), 10.0)],
)
def test_what_the_regression_says_is_at_least_1_and_at_most_exp_20(
    fitted, came, predicted, expected
):
    predictor = TokenConditioned(features=1)
    state = predictor.state_dict()
    state["gram"][-1, -1], state["moment"][-1] = 1 - 1e-6, fitted  # only a constant
    predictor.load_state_dict({**state, "came": came, "predicted": predicted})
    assert predictor.predict([sample("b", [])]) == pytest.approx([expected])


def test_predictions_of_the_history_count_as_what_the_regression_then_fits():
    predictor = TokenConditioned(features=1, half_life=1e12)
    early, first, late = (sample(uid, []) for uid in "abc")
    predictor.predict([early, first])
    predictor.observe([sample("b", [7])])
    predictor.predict([late])
    predictor.observe([sample("a", [7]), sample("c", [7])])
    state = predictor.state_dict()  # all drew one token, so all logarithms are 0
    assert state["came"] == pytest.approx(3) and state["predicted"] == pytest.approx(3)
