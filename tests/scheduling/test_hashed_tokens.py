from collections import Counter
from itertools import pairwise
from math import log1p

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.token_conditioned import LAST, hashed_tokens
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

tokens = st.lists(st.integers(0, 5) | st.integers(0, 200_000), max_size=8)


def sample(prompt, completion, name="g"):
    c = Completion(0, list(completion))
    return Sample(Group(name, Prompt(name, "", tuple(prompt)), Sampling(100), [c]), c)


def mixed(x):
    """splitmix64, in Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def by_definition(sample, size):
    features = np.zeros(size)

    def add(salt, key, value):
        bits = mixed((key + mixed(salt)) % 2**64)
        features[bits % size] += -value if bits >> 63 else value

    def pairs(ids):
        return [(mixed(a) + b) % 2**64 for a, b in pairwise(ids)]

    prompt, completion = sample.group.prompt.token_ids, sample.completion.token_ids
    for salt, keys in ((1, prompt), (2, pairs(prompt))):
        for key in keys:
            add(salt, key, len(prompt) ** -0.5)
    for salt, keys in ((3, completion), (4, pairs(completion))):
        for key, count in Counter(keys).items():
            add(salt, key, log1p(count))
    for place, token in enumerate(completion[: -LAST - 1 : -1]):
        add(5 + place, token, 1.0)
    return features


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5), st.integers(1, 40))
def test_features_by_their_definition(texts, size):
    """They must never change: a checkpoint holds a regression on them."""
    samples = [sample(*text, name=f"g{i}") for i, text in enumerate(texts)]
    found = hashed_tokens(samples, size)
    assert found.shape == (len(samples), size)
    expected = [by_definition(s, size) for s in samples]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_completions_of_one_prompt_share_its_features():
    group = sample([1, 2, 3], []).group
    both = [Sample(group, Completion(i, ids)) for i, ids in enumerate(([], [7, 8]))]
    alone = [hashed_tokens([s], 64)[0] for s in both]
    assert hashed_tokens(both, 64).tolist() == [a.tolist() for a in alone]
    assert hashed_tokens([*both[::-1], both[1]], 64)[1].tolist() == alone[0].tolist()


@pytest.mark.filterwarnings("error")
def test_an_empty_prompt_among_others_has_no_features():
    empty, other = hashed_tokens([sample([], [], "a"), sample([1], [], "b")], 8)
    assert not empty.any() and np.abs(other).sum() == 1


@pytest.mark.parametrize("samples", [[], [sample([], [])]])
def test_nothing_has_no_features(samples):
    assert not hashed_tokens(samples, 8).any()
