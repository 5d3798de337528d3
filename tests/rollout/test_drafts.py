import copy
import math
from collections import Counter

import pytest
import torch
from bare_rollout import rollout_on
from enumerated import EOS, LIMIT, PROMPT, SEED, make_policy, moved, verify

from benchmarks.draft_law import p_value
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.engines.base import RolloutWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.training import draft_verifier, logprobs
from lit_rlsched.training.block_verification import Trial
from lit_rlsched.training.draft_verifier import Drafts, _with
from lit_rlsched.training.logprobs import (
    completion_states,
    vocabulary_logprobs,
)
from lit_rlsched.training.micro_batches import EncodedRows, RowCost
from lit_rlsched.types import Completion, Draft, Group, Prompt, Sampling, stable_hash


def groups_of(n, size=4, temperature=0.8):
    return [
        Group(
            f"{i}@0",
            Prompt(str(i), "", PROMPT),
            Sampling(LIMIT, temperature),
            [Completion(c) for c in range(size)],
        )
        for i in range(n)
    ]


def decode(policy, groups, version):
    """Draw what the groups lack, by the engine."""
    n = sum(len(g.completions) for g in groups)
    engine = TransformersEngine()
    engine.start(EngineSpec("", n, len(PROMPT) + LIMIT, (EOS,), policy=policy))
    engine.sync_weights([], version)
    worker, rule = RolloutWorker(engine, Admission(n)), FullRound(len(groups))
    rollout_on(worker, Unscored(), groups, rule, version=version, seed=SEED).run()
    engine.close()


def distribution(policy, temperature):
    """Probability and log-probs of each completion."""
    found, open_ = {}, [((), ())]
    while open_:
        tokens, logprobs = open_.pop()
        ids = torch.tensor([[*PROMPT, *tokens]])
        with torch.no_grad():
            logits = policy(ids).logits[0, -1] / temperature
        for token, logp in enumerate(logits.log_softmax(-1).tolist()):
            longer = (*tokens, token), (*logprobs, logp)
            if token == EOS or len(longer[0]) == LIMIT:
                found[longer[0]] = longer[1]
            else:
                open_.append(longer)
    assert sum(math.exp(sum(row)) for row in found.values()) == pytest.approx(1.0, abs=1e-9)
    return found


def chi_square(completions, expected):
    counts = Counter(tuple(c.token_ids) for c in completions)
    return p_value(counts, {tokens: math.exp(sum(of)) for tokens, of in expected.items()})


def lose(groups, version=1):
    """Put every completion off: as it is, or cut by an end of the round that did not see it."""
    for group in groups:
        for completion in group.completions:
            ahead = stable_hash(group.id, completion.index) % (LIMIT + 1)
            if 0 < ahead < len(completion.token_ids):
                del completion.token_ids[ahead:], completion.logprobs[ahead:]
                completion.segments = [(version, ahead)]
            completion.put_off()


def test_drafts_become_draws_of_the_policy_that_verifies_them():
    """Two policies drew them; some were cut; what is accepted goes on in the engine."""
    policy = make_policy(0)
    second = moved(policy, seed=3)
    first = moved(second, seed=4)
    expected = distribution(policy, 0.8)
    drafts, groups = Drafts(), []
    for version, drew in ((1, first), (2, second)):
        drawn = groups_of(1000)[500 * (version - 1) :][:500]
        decode(drew, drawn, version)
        assert chi_square([c for g in drawn for c in g.completions], expected) < 1e-9
        groups += drawn
        drafts.keep_version(drew, version)
        lose(drawn, version)
    assert drafts.weights.keys() == {1, 2}
    audit = verify(drafts, policy, groups, micro_batch_tokens=3000)
    assert 0.3 * audit.tokens < audit.accepted_tokens < 0.9 * audit.tokens
    done = [c for g in groups for c in g.completions if c.finished]
    assert 1000 < len(done) < 4000 and audit.completed > 0
    for completion in (c for g in groups for c in g.completions):
        ends = completion.token_ids[-1] == EOS
        whole = ends or len(completion.token_ids) == LIMIT
        assert completion.finish_reason == ("stop" if ends else "length" if whole else None)
        assert completion.draft is None and not completion.attempts
        assert completion.segments == [(4, len(completion.token_ids))]
    decode(policy, groups, 4)
    completions = [c for g in groups for c in g.completions]
    assert chi_square(completions, expected) > 0.01
    for completion in completions:
        assert completion.logprobs == pytest.approx(expected[tuple(completion.token_ids)], abs=1e-9)


def test_what_the_same_weights_drew_is_accepted_as_it_is():
    policy, drafts, groups = make_policy(0), Drafts(), groups_of(40)
    decode(policy, groups, 1)
    drafts.keep(policy, 1, groups)
    lose(groups)
    were = [c.draft for g in groups for c in g.completions]
    audit = verify(drafts, policy, groups)
    assert audit.accepted_tokens == audit.tokens > 160 and audit.completed == 160
    for draft, completion in zip(were, (c for g in groups for c in g.completions), strict=True):
        assert completion.token_ids == draft.token_ids
        assert completion.logprobs == pytest.approx(draft.logprobs, abs=1e-9)


def lost(policy, n=30):
    drafts, groups = Drafts(), groups_of(n)
    decode(policy, groups, 1)
    drafts.keep(policy, 1, groups)
    lose(groups)
    return drafts, groups


def test_what_becomes_of_a_draft_does_not_depend_on_its_company():
    policy = make_policy(0)
    drafts, groups = lost(policy)
    later, alone = moved(policy, by=0.3), copy.deepcopy(groups)
    other_run, other_domain = copy.deepcopy(groups), copy.deepcopy(groups)
    torch.manual_seed(1)
    whole = verify(drafts, later, groups)
    torch.manual_seed(2)
    parts = [verify(drafts, later, [g], micro_batch_tokens=1) for g in reversed(alone)]
    assert sum(p.accepted_tokens for p in parts) == whole.accepted_tokens
    for a, b in zip(groups, alone, strict=True):
        for c, d in zip(a.completions, b.completions, strict=True):
            assert (c.token_ids, c.finish_reason) == (d.token_ids, d.finish_reason)
            assert c.logprobs == pytest.approx(d.logprobs, abs=1e-12)
    for twin, settings in (
        (other_run, {"seed": SEED + 1}),
        (other_domain, {"seed_domain": "run 1"}),
    ):
        verify(drafts, later, twin, **settings)
        assert [c.token_ids for g in twin for c in g.completions] != [
            c.token_ids for g in groups for c in g.completions
        ]


def test_drafts_of_a_prompt_share_it_where_that_is_cheaper(monkeypatch):
    """In both passes; what becomes of them is the same."""
    policy = make_policy(0)
    drafts, groups = lost(policy)
    later, twin = moved(policy, by=0.1), copy.deepcopy(groups)
    read, of = [], EncodedRows.of
    monkeypatch.setattr(EncodedRows, "of", lambda rows: read.append(of(rows)) or read[-1])
    audits, positions = [], []
    for each, cost in ((groups, None), (twin, RowCost(1.0, 0.0, 0.0))):
        read.clear()
        audits.append(verify(drafts, later, each, row_cost=cost))
        assert [rows.completion_rows is None for rows in read].count(False) >= 2 * bool(cost)
        positions.append(sum(rows.input_ids.numel() for rows in read))
    assert positions[1] < 0.8 * positions[0]
    assert audits[0].accepted_tokens == audits[1].accepted_tokens
    for one, other in zip(groups, twin, strict=True):
        for c, d in zip(one.completions, other.completions, strict=True):
            assert c.token_ids == d.token_ids
            assert c.logprobs == pytest.approx(d.logprobs, abs=1e-12)


@pytest.mark.parametrize("turn", [1, 2])
def test_what_becomes_of_a_draft_does_not_depend_on_how_many_candidates_are_tried(
    monkeypatch, turn
):
    """`CHUNK_BYTES` has room for the candidates of one draft at a time."""
    policy = make_policy(0)
    drafts, groups = lost(policy, 60)
    later, twin = moved(policy, by=0.1), copy.deepcopy(groups)
    audit = verify(drafts, later, groups)
    tried, was = [], Trial.cut
    monkeypatch.setattr(draft_verifier, "AT_A_TIME", turn)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", {"cpu": turn * 4 * len(policy.lm_head.weight)})
    monkeypatch.setattr(Trial, "cut", lambda *of: tried.append(len(of[1])) or was(*of))
    verify(drafts, later, twin)
    for one, other in zip(groups, twin, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
    cut = 240 - audit.completed
    assert max(tried) == turn and len(tried) > cut  # of some drafts more than a turn was tried


def test_the_policy_is_left_as_it_was():
    policy = make_policy(0).train()
    drafts, groups = lost(policy)
    later = moved(policy, by=0.3).train()
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in later.named_parameters()}
    generator = torch.random.get_rng_state()
    audit = verify(drafts, later, groups)
    assert audit.accepted_tokens < audit.tokens  # so that the other weights were needed
    for name, p in later.named_parameters():
        was, address, value = before[name]
        assert p is was and p.data_ptr() == address and torch.equal(p, value)
        assert p.grad is None
    assert later.training and torch.equal(torch.random.get_rng_state(), generator)


@torch.no_grad()
def test_in_mixed_precision_each_policy_has_its_own_weights():
    """Autocast keeps weights that it has cast, by their parameters."""
    policy = make_policy(0, torch.float32)
    other, ids = moved(policy), torch.tensor([[2, 3, 0]])
    with torch.autocast("cpu", torch.bfloat16):
        expected = other(ids).logits
        own = policy(ids).logits
        with _with(policy, {name: p.data for name, p in other.named_parameters()}):
            assert torch.equal(policy(ids).logits, expected)
        assert torch.equal(policy(ids).logits, own) and not torch.equal(own, expected)


def test_a_version_is_kept_while_it_has_tokens():
    policy, drafts = make_policy(0), Drafts()
    policy.requires_grad_(False)
    head = policy.lm_head.weight.requires_grad_(True)
    first, second = groups_of(2)
    first.completions[0].segments = [(3, 1)]
    drafts.keep(policy, 3, [first])
    assert drafts.weights.keys() == {3} and drafts.weights[3].keys() == {"lm_head.weight"}
    kept = drafts.weights[3]["lm_head.weight"]
    with torch.no_grad():
        head += 1  # an update
    assert torch.equal(kept, head - 1) and not kept.requires_grad
    second.completions[1].segments = [(4, 1)]
    drafts.keep(policy, 4, [first, second])
    assert drafts.weights.keys() == {3, 4} and drafts.weights[3]["lm_head.weight"] is kept
    drafts.keep(policy, 5, [second])
    assert drafts.weights.keys() == {4}
    drafts.keep(policy, 6, [])
    assert drafts.weights == {}


def test_a_draft_of_unknown_weights_is_discarded():
    """After a resume from a checkpoint of a run that kept none."""
    policy = make_policy(0)
    drafts, groups = lost(policy, 2)
    other = groups[0].completions[0]
    tokens = len(other.draft.token_ids)
    spans = [(0, 1), *other.draft.segments]
    other.draft = Draft(other.draft.token_ids, other.draft.logprobs, spans)
    audit = verify(drafts, policy, groups)
    assert other == Completion(0, attempts=other.attempts)
    assert audit.rejected_tokens == tokens and audit.nonfinite == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_draft_with_a_log_prob_that_is_not_finite_is_dropped(bad):
    policy = make_policy(0)
    drafts, groups = lost(policy, 2)
    broken = groups[0].completions[1]
    broken.draft = Draft((2, 3), (-1.0, bad), [(1, 2)])
    left = copy.deepcopy(groups)
    audit = verify(drafts, policy, groups)
    assert audit.nonfinite == 1 and audit.rejected_tokens == 2
    assert broken == Completion(1, attempts=1)
    assert all(c.token_ids for g in groups for c in g.completions if c is not broken)
    assert audit.tokens == sum(len(c.draft.token_ids) for g in left for c in g.completions)


def test_without_drafts_nothing_happens():
    policy, groups = make_policy(0), groups_of(2)
    audit = verify(Drafts(), policy, groups)
    assert audit.tokens == 0 and audit.metrics()["drafts/accepted_share"] == 0
    assert groups == groups_of(2)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_what_is_predicted_after_each_prefix(temperature):
    policy = make_policy(0)
    rows, prompts = [[2, 3], [2, 3, 0, 3], [0, 1]], [1, 2, 2]
    ids = torch.tensor([row + [0] * (4 - len(row)) for row in rows])
    with torch.no_grad():
        states = completion_states(policy, ids, torch.tensor(prompts), torch.tensor([1, 2, 0]))
        found = vocabulary_logprobs(policy, states, temperature=temperature)
        expected = []
        for row, prompt in zip(rows, prompts, strict=True):
            logits = policy(torch.tensor([row])).logits[0]
            expected += [*(logits[prompt - 1 : -1] / temperature).log_softmax(-1)]
    torch.testing.assert_close(found, torch.stack(expected))
