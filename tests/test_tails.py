import pytest

from benchmarks.tails import EOS, LIMIT, Lengths, Verifier
from lit_rlsched.types import Completion, Draft, Group, Prompt, Request, Sampling

GRID = [(i + 0.5) / 4000 for i in range(4000)]


def request(seed, prompt=7, prefix=()):
    return Request("x", (prompt,), seed, Sampling(LIMIT), prefix)


@pytest.mark.parametrize("shared", [0.0, 0.5])
@pytest.mark.parametrize("than", [1, 300, 2000])
def test_what_goes_on_has_the_lengths_of_those_that_are_longer(shared, than):
    lengths = Lengths(shared)
    drawn = sorted(n for u in GRID if (n := lengths.longer(0, (7,), u)) > than)
    goes_on = sorted(lengths.longer(than, (7,), u) for u in GRID)
    assert min(goes_on) > than and max(goes_on) <= LIMIT and len(drawn) > 100
    for share in (0.1, 0.5, 0.9):
        a, b = drawn[int(share * len(drawn))], goes_on[int(share * len(goes_on))]
        assert b == pytest.approx(a, rel=0.06, abs=2)


def test_a_request_that_goes_on_is_longer_than_its_prefix():
    lengths = Lengths(0.5)
    whole = [lengths(request(seed)) for seed in range(50)]
    assert len(set(whole)) > 40
    assert all(lengths(request(seed, prefix=(1,) * 900)) > 900 for seed in range(50))
    assert lengths(request(0, prefix=(1,) * (LIMIT - 1))) == LIMIT


def drafted(n, tokens, ends):
    ids = (1,) * (tokens - 1) + (EOS if ends else 1,)
    draft = Draft(ids, (-1.0,) * tokens, [(0, tokens)])
    prompt = Prompt("p", "", (1,))
    completions = [Completion(i, attempts=1, draft=draft) for i in range(n)]
    return [Group("p@0", prompt, Sampling(LIMIT), completions)]


@pytest.mark.parametrize("ends", [True, False])
def test_drafts_of_the_same_policy_are_kept_whole(ends):
    groups, verifier = drafted(20, 500, ends), Verifier(Lengths(0.5), 1e-9)
    audit = verifier.verify(groups, 3)
    assert (audit.tokens, audit.accepted_tokens, audit.completed) == (10_000, 10_000, 20)
    assert verifier.positions == 10_000
    for completion in groups[0].completions:
        assert completion.finish_reason == ("stop" if ends else None)
        assert completion.segments == [(3, 500)] and completion.draft is None


def test_the_farther_the_policies_the_less_is_kept():
    kept = []
    for distance in (0.001, 0.01, 0.1):
        groups, verifier = drafted(100, 1000, False), Verifier(Lengths(0.5), distance)
        audit = verifier.verify(groups, 1)
        kept.append(audit.accepted_tokens / audit.tokens)
        cut = 100 - audit.completed
        assert cut > 0 and verifier.positions == 1000 * (100 + cut)
        lengths = [len(c.token_ids) for c in groups[0].completions]
        assert sum(lengths) == audit.accepted_tokens + cut  # each with one token after what is kept
    # the first token that is rejected one by one comes after 1/distance
    assert kept[0] > kept[1] > kept[2] and kept[0] > 0.9 and kept[1] > 0.5


def test_older_drafts_are_of_a_policy_farther_away():
    def kept(distance, version):
        groups, verifier = drafted(60, 1000, False), Verifier(Lengths(0.5), distance)
        audit = verifier.verify(groups, version)
        assert verifier.ages == {version: audit}
        return audit.accepted_tokens / audit.tokens

    young, old = kept(0.003, 1), kept(0.003, 4)
    assert young > old + 0.2
    assert old == pytest.approx(kept(0.012, 1), abs=0.06)
