import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.engines import sampling
from lit_rlsched.scheduling.noise import counter_uniform, splitmix64

GAMMA = 0x9E3779B97F4A7C15


def test_splitmix64_is_the_published_one():
    """The first numbers of Vigna's splitmix64.c, seeded with 0 and with 1234567."""
    zero = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    other = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed, expected in ((0, zero), (1234567, other)):
        states = [(seed + i * GAMMA) % 2**64 for i in range(len(expected))]
        assert splitmix64(np.array(states, np.uint64)).tolist() == expected


@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=9
    )
)
def test_the_noise_is_that_of_the_engines(streams):
    seeds, counters = np.array(streams).T
    expected = sampling.counter_uniform(torch.tensor(seeds), torch.tensor(counters))
    found = counter_uniform(seeds, counters)
    assert found.tolist() == expected.tolist()
    assert ((found >= 0) & (found < 1)).all()


def test_the_noise_never_changes():
    """Draws of earlier versions depend on it; computed with Python's integers."""
    found = counter_uniform([0, 7, -1], [0, 3, 2**40])
    assert found.tolist() == [0.6524484863740322, 0.9579187413704255, 0.4814939902929428]
