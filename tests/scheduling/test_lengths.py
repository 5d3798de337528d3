import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.length_prediction import PromptHistory
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

CAP = 100


def group(uid, *completions, number=0, cap=CAP, prompt=(1, 2, 3)):
    """A group of completions that are given as token ids; `None` at the end: unfinished."""
    made = [
        Completion(
            i, [t for t in ids if t is not None], finish_reason=None if None in ids else "stop"
        )
        for i, ids in enumerate(completions)
    ]
    for c in made:
        c.logprobs = [-0.5] * len(c.token_ids)
    return Group(f"{uid}-{number}", Prompt(uid, uid, tuple(prompt)), Sampling(cap), made)


def samples(*groups):
    return [Sample(g, c) for g in groups for c in g.completions]


def finished(uid, *lengths, **kwargs):
    return samples(group(uid, *([7] * n for n in lengths), **kwargs))


def started(uid, drawn=0, **kwargs):
    return samples(group(uid, [*[7] * drawn, None], **kwargs))


def through_checkpoint(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_history_forgets_old_lengths():
    history = PromptHistory(half_life=4)
    for _ in range(20):
        history.observe(finished("a", 10, 10, 10, 10))
    for _ in range(20):
        history.observe(finished("b", 50, 50, 50, 50))
    assert history.predict(started("b")) == pytest.approx([50], rel=0.01)


@given(st.data())
def test_predictions_are_within_the_limit(data):
    predictor = data.draw(st.sampled_from([PromptHistory, lambda: TokenConditioned(features=16)]))()
    ids = st.lists(st.integers(0, 9), min_size=1, max_size=40)
    for number in range(3):
        groups = [
            group(f"p{i}", *data.draw(st.lists(ids, min_size=1, max_size=3)), number=number)
            for i in range(data.draw(st.integers(1, 3)))
        ]
        probes = [
            group(
                g.prompt.uid,
                *([*c.token_ids[: data.draw(st.integers(0, 40))], None] for c in g.completions),
                number=number,
                cap=40,
            )
            for g in groups
        ]
        for sample, tokens in zip(
            samples(*probes), predictor.predict(samples(*probes)), strict=True
        ):
            assert 1 <= tokens <= max(40 - len(sample.completion.token_ids), 1)
        predictor.observe(samples(*groups))


def telling_round(rng, number, num=64, probe=6):
    """Prompts that were never seen; the last token of the probe decides the length, up to noise."""
    probes, wholes = [], []
    for i in range(num):
        head = rng.integers(10, 20, probe).tolist()
        length = int(np.clip(8 * 1.3 ** (head[-1] - 10) * rng.lognormal(0, 0.1), probe + 1, CAP))
        ids = [*head, *rng.integers(10, 20, length - probe).tolist()]
        probes += [group(f"{number}-{i}", [*head, None])]
        wholes += [group(f"{number}-{i}", ids)]
    return samples(*probes), samples(*wholes)


def learn(predictor, rounds=12, seed=0):
    """Feed rounds; returns predicted and true tokens to come of the last."""
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        probes, wholes = telling_round(rng, number)
        predicted = np.array(predictor.predict(probes))
        predictor.observe(wholes)
    return predicted, np.array([len(r.completion.token_ids) - 6 for r in wholes])


def test_first_tokens_that_decide_the_length_are_learned():
    predicted, true = learn(TokenConditioned(features=256))
    baseline, same = learn(PromptHistory())
    assert (true == same).all()
    assert np.corrcoef(np.log(predicted), np.log(true))[0, 1] > 0.8
    assert np.abs(predicted - true).mean() < 0.6 * np.abs(baseline - true).mean()


def test_the_prompt_alone_is_learned_too():
    predictor = TokenConditioned(features=64)
    for number in range(30):
        a, b = (
            group("a", [7] * 10, number=number),
            group("b", [7] * 40, number=number, prompt=(4, 5)),
        )
        a.prompt, b.prompt = Prompt(f"a{number}", "", (1, 2)), Prompt(f"b{number}", "", (4, 5))
        asked = [Sample(g, Completion(0)) for g in (a, b)]
        short, long = predictor.predict(asked)
        predictor.observe(samples(a, b))
    assert short == pytest.approx(10, rel=0.2) and long == pytest.approx(40, rel=0.2)


def test_what_waits_is_bounded_and_what_was_drawn_anew_is_not_learned_from():
    predictor = TokenConditioned(features=8, max_waiting=3)
    predictor.predict([started(f"p{i}", 5)[0] for i in (3, 0, 1, 2, 3, 4)])
    assert [*predictor._waiting] == ["p2-0/0", "p3-0/0", "p4-0/0"]
    assert {features.dtype for *_, features in predictor._waiting.values()} == {np.dtype("f4")}
    before = predictor.state_dict()["gram"]
    predictor.observe(finished("p0", 20) + finished("p4", 4))  # forgotten; shorter than when asked
    assert torch.equal(predictor.state_dict()["gram"], before)
    predictor.observe(finished("p3", 20))
    assert not torch.equal(predictor.state_dict()["gram"], before)


def test_a_nan_logprob_does_no_harm():
    predictor = TokenConditioned(features=8)
    for number in range(3):
        (sample,) = started("a", 4, number=number)
        sample.completion.logprobs = [float("nan"), float("-inf"), -1.0, -2.0]
        assert np.isfinite(predictor.predict([sample])).all()
        predictor.observe(finished("a", 20, number=number))


@pytest.mark.parametrize("make", [PromptHistory, TokenConditioned])
def test_state_round_trip_is_exact(make):
    predictor, other = make(), make()
    learn(predictor, rounds=3)
    other.load_state_dict(through_checkpoint(predictor.state_dict()))
    rng = np.random.default_rng(5)
    for number in range(2):
        probes, wholes = telling_round(rng, f"new{number}")
        assert predictor.predict(probes) == other.predict(probes)
        predictor.observe(wholes)
        other.observe(wholes)
    siblings = samples(group("x", [None], [3, None]))
    assert predictor.predict(siblings) == other.predict(siblings)
    assert predictor.predict(siblings) != make().predict(siblings)


@pytest.mark.parametrize("make", [PromptHistory, TokenConditioned])
def test_a_state_is_a_copy(make):
    predictor = make()
    learn(predictor, rounds=2)
    state = predictor.state_dict()
    saved = through_checkpoint(state)
    other = make()
    other.load_state_dict(state)
    learn(predictor, rounds=1, seed=3)
    learn(other, rounds=1, seed=3)
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name


@pytest.mark.filterwarnings("error")  # a division by zero
def test_at_least_one_token_is_expected_and_no_more_than_are_left():
    for predictor in (PromptHistory(), TokenConditioned(features=4)):
        assert predictor.predict(started("a", CAP - 1) + started("a", CAP)) == [1, 1]
    history = PromptHistory()
    history.observe(finished("a", 1, 1, 1))
    assert history.predict(started("a")) == [1]


def test_the_oracle_looks_up_and_says_what_it_lacks(tmp_path):
    oracle = Oracle({"a-0/0": 30, "b-0/0": 500})
    asked = started("a", 10) + started("b", 10) + started("b", CAP)
    assert oracle.predict(asked) == [20, CAP - 10, 1]
    known, unknown = oracle.predict(started("a") + started("c"))
    assert known == 30 and np.isnan(unknown)
    with pytest.raises(UsageError, match="holds no traces"):
        Oracle(tmp_path)
