from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tabular import completed, random_policy, sequences, verified
from lit_rlsched.engines.sampling import inverse_cdf
from lit_rlsched.training.block_verification import (
    acceptance,
    candidates,
    excess,
    prefix_weights,
)


def all_verified(logp, drafts, logq):
    """What becomes of drafts, given the probability of each."""
    out = defaultdict(float)
    for draft, probability in drafts.items():
        for sequence, of_sequence in verified(logp, draft, probability, logq).items():
            out[sequence] += of_sequence
    return out


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("spread", [(0.0, 2.0), (1.0, 1.0), (3.0, 0.5)])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_what_comes_out_is_a_draw_of_the_policy_that_verifies(vocab, spread, cut):
    """Exactly: over every draft, cut where the round ended, and all that may become of it."""
    limit = 3
    logp, logq = (
        random_policy(vocab, limit, 1, spread[0]),
        random_policy(vocab, limit, 2, spread[1]),
    )
    drafts = defaultdict(float)
    for sequence, probability in sequences(logq, limit).items():
        drafts[sequence[:cut]] += probability
    begun = all_verified(logp, drafts, logq)
    found, expected = completed(logp, begun, limit), sequences(logp, limit)
    assert found.keys() == expected.keys()
    assert max(abs(found[s] - expected[s]) for s in expected) < 1e-12
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("steps", [(1, 1, 1), (2, 1, 1), (1, 0, 2), (3, 2, 1)])
def test_what_loses_race_after_race_is_a_draw_of_the_last_policy(steps):
    """Exactly: each draft is cut some tokens after what was kept of the one before."""
    limit, drafts = 4, {(): 1.0}
    policies = [random_policy(3, limit, seed, 1.0) for seed in range(len(steps) + 1)]
    for n, logq, logp in zip(steps, policies, policies[1:], strict=False):
        drafts = all_verified(logp, completed(logq, drafts, limit, n), logq)
    found, expected = completed(policies[-1], drafts, limit), sequences(policies[-1], limit)
    assert found.keys() == expected.keys()
    assert max(abs(found[s] - expected[s]) for s in expected) < 1e-12


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8))
def test_prefix_weights_are_the_recursion(steps):
    steps = torch.tensor(steps).double()
    weights, expected = prefix_weights(steps, torch.zeros_like(steps)).exp(), [1.0]
    for ratio in steps.exp().tolist():
        expected.append(min(1.0, expected[-1] * ratio))
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)


def test_acceptance_by_hand():
    log_weights = torch.tensor([1.0, 0.5, 1.0, 0.8]).double().log()
    more = torch.tensor([0.3, 0.1, 0.0, 0.0]).double()
    # where nothing is lacking all is accepted, also where the policies agree from there
    assert acceptance(log_weights, more).tolist() == pytest.approx([1.0, 0.1 / 0.6, 1.0, 0.0])


POLICY = st.lists(st.floats(-3, 0), min_size=3, max_size=3)


@given(
    st.lists(st.tuples(POLICY, POLICY, st.integers(0, 2), st.floats(0, 0.99)), min_size=1),
    st.floats(0, 0.2),
)
def test_no_prefix_but_a_candidate_is_the_longest_that_is_accepted(steps, engine):
    """Also where the engine's log-probs differ from those of the trainer."""
    ps, qs = (torch.tensor([s[i] for s in steps]).double().log_softmax(-1) for i in (0, 1))
    draft, noise = torch.tensor([s[2] for s in steps]), torch.tensor([s[3] for s in steps]).double()
    p, q = (x.gather(1, draft.unsqueeze(1)).squeeze(1) for x in (ps, qs))
    log_weights = prefix_weights(p, q + engine)
    accepts = acceptance(log_weights[:-1], excess(log_weights[:-1], ps, qs).sum(-1))
    assert (accepts <= log_weights[:-1].exp() + 1e-12).all()
    accepted = [0, *(1 + (noise[:-1] < accepts[1:]).nonzero().flatten()).tolist()]
    found = candidates(log_weights, noise)
    assert found == sorted(found, reverse=True)
    assert next(n for n in found if n in accepted) == accepted[-1]
    assert accepts[found[-1]] == 1.0
    assert all(noise[n - 1] < log_weights[n].exp() for n in found if n)


def test_excess_by_hand():
    log_weights = torch.tensor([1.0, 0.5]).log()
    logp = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]).log()
    logq = torch.tensor([[0.2, 0.2, 0.6], [0.2, 0.7, 0.1]]).log()
    expected = torch.tensor([[0.3, 0.1, 0.0], [0.0, 0.0, 0.2]]).double()
    torch.testing.assert_close(excess(log_weights, logp, logq), expected, rtol=0, atol=1e-6)
    p, q = logp.double(), logq.double()
    excess(log_weights, p, q)
    assert torch.equal(p, logp.double()) and torch.equal(q, logq.double())


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 3.0]), min_size=1, max_size=6), st.integers(0, 9))
def test_draws_have_their_probabilities(weights, place):
    weights = torch.tensor(weights).double()
    if not weights.sum():
        weights[0] = 1.0
    drawn = torch.stack([inverse_cdf(weights, (i + place / 10) / 200) for i in range(200)])
    shares = torch.bincount(drawn, minlength=len(weights)).double() / 200
    torch.testing.assert_close(shares, weights / weights.sum(), rtol=0, atol=0.0051)
    assert (weights[drawn] > 0).all()


@pytest.mark.parametrize("weights", [[1.0, 0.0], [0.5, 0.5, 0.0], [1e-12, 1 - 1e-12, 0.0]])
def test_the_largest_noise_draws_no_token_without_probability(weights):
    assert weights[inverse_cdf(torch.tensor(weights).double(), 1 - 2**-53)] > 0
