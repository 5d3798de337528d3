"""The joint law of two completions of which drafts were verified, summed over all that may happen.

Nothing is drawn: the verifier runs once for each outcome, and tells the probability of each.
"""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from enumerated import EOS, LIMIT, PROMPT, SEED, VOCAB, make_policy, moved, verify

from lit_rlsched.training import block_verification, draft_verifier
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.types import (
    ENVIRONMENT,
    Completion,
    Draft,
    Group,
    Prompt,
    Sample,
    Sampling,
    stable_hash,
)

TEMPERATURE, VERSION, SWITCH = 3.0, 4, 2


def ends(tokens, limit=LIMIT):
    return len(tokens) == limit or tokens[-1:] == (EOS,)


OTHERS = [token for token in range(VOCAB) if token != EOS]
OPEN = [p for n in range(LIMIT) for p in itertools.product(OTHERS, repeat=n)]
WHOLE = [(*p, token) for p in OPEN for token in range(VOCAB) if ends((*p, token))]
LENGTH = np.array([len(sequence) for sequence in WHOLE])


def table(policy):
    """Log-probs of the next token after each sequence that goes on."""
    with torch.no_grad():
        rows = [policy(torch.tensor([[*PROMPT, *p]])).logits[0, -1] for p in OPEN]
    rows = [(row / TEMPERATURE).log_softmax(-1).tolist() for row in rows]
    return dict(zip(OPEN, rows, strict=True))


def law(logp, begun=None, limit=LIMIT):
    """Probability of each whole sequence, from sequences that have begun."""
    found, todo = defaultdict(float), dict(begun or {(): 1.0})
    while todo:
        tokens, probability = todo.popitem()
        if tokens and ends(tokens, limit):
            found[tokens] += probability
            continue
        for token, of_token in enumerate(logp[tokens]):
            longer = (*tokens, token)
            todo[longer] = todo.get(longer, 0.0) + probability * math.exp(of_token)
    return found


def by_one(tokens):
    """All tokens were drawn by version 1."""
    return [(1, tokens)]


def by_two(tokens):
    """The first `SWITCH` tokens were drawn by version 1, the others by version 2."""
    return [(v, n) for v, n in ((1, min(tokens, SWITCH)), (2, tokens - SWITCH)) if n > 0]


ALMOST_ONE = 1 - 2**-53


def outcomes(monkeypatch, policy, kept, drafts, logq, limit=LIMIT, spans=by_one):
    """What the verifier makes of each draft: acceptance `[C]`, and residuals by prefix `[V]`.

    It is told by its noise how many tokens to keep and which one to draw after them; what it makes
    of each such outcome that is possible has to be the prefix, the token and a finish reason.
    """
    script = [
        (draft, keep, token)
        for draft in drafts
        for keep in range(len(draft) + 1)
        for token in (range(VOCAB) if keep < len(draft) else [0])
    ]
    streams = {}
    for i, (_, keep, _) in enumerate(script):
        name = SEED, "", "p", i, VERSION
        streams[stable_hash("draft", "accept", *name)] = keep, None
        streams[stable_hash("draft", "after", *name)] = None, i

    def noise(stream, counters):
        keep, number = streams[int(stream)]
        if keep is None:
            return torch.full(counters.shape, float(number), dtype=torch.float64)
        return ALMOST_ONE * (counters >= keep).double()  # 0 accepts whatever is possible

    acceptances = {x[:limit]: [0.0] * (len(x[:limit]) - 1) + [1.0] for x in drafts}
    residuals, tried, drawn_from = defaultdict(dict), [], {}

    def cut(trial, prefixes, *more, was=block_verification.Trial.cut):
        tried[:] = tuple(trial.draft.token_ids), prefixes
        acceptances[tried[0]][-1] = float(trial.log_weights[-1].exp())
        return was(trial, prefixes, *more)

    def acceptance(*arguments, was=block_verification.acceptance):
        found = was(*arguments)
        x, prefixes = tried
        for n, accept in zip(prefixes, found.tolist(), strict=True):
            if n:
                acceptances[x][n - 1] = accept
        return found

    def residual(probabilities, number):
        left = probabilities.double()
        drawn_from[int(number)] = (left / left.sum()).tolist()
        return script[int(number)][2]

    completions = [
        Completion(i, draft=Draft(x, [logq[x[:k]][t] for k, t in enumerate(x)], spans(len(x))))
        for i, (x, _, _) in enumerate(script)
    ]
    group = Group("g", Prompt("p", "", PROMPT), Sampling(limit, TEMPERATURE), completions)
    with monkeypatch.context() as patch:
        patch.setattr(draft_verifier, "counter_uniform", noise)
        patch.setattr(block_verification.Trial, "cut", cut)
        patch.setattr(block_verification, "acceptance", acceptance)
        patch.setattr(block_verification, "inverse_cdf", residual)
        verify(kept, policy, [group], VERSION)
    for i, left in drawn_from.items():
        residuals[script[i][0][:limit]][len(completions[i].token_ids) - 1] = left
    for (x, keep, token), completion in zip(script, completions, strict=True):
        x, keep = x[:limit], min(keep, limit)
        certain = 1.0 in acceptances[x][keep:]  # a longer one
        if not certain and (keep == 0 or acceptances[x][keep - 1] > 0):
            tokens = x if keep == len(x) else (*x[:keep], token)
            assert tuple(completion.token_ids) == tokens
            reason = "stop" if tokens[-1] == EOS else "length"
            assert completion.finish_reason == (reason if ends(tokens, limit) else None)
    return acceptances, residuals


def chances(accepts, residuals, draft):
    """Probability of each result, from that of accepting each prefix: the longest one wins."""
    out, left = defaultdict(float), 1.0
    for keep in range(len(draft), -1, -1):
        here = accepts[keep - 1] if keep else 1.0
        for token, of_token in enumerate(residuals.get(keep, []) if keep < len(draft) else [1.0]):
            if here * of_token > 0:
                result = draft if keep == len(draft) else (*draft[:keep], token)
                out[result] += left * here * of_token
        left *= 1 - here
    return out


class Laws:
    """Policies `p` and `q`, and matrices `[draft, result]` of what becomes of drafts."""

    def __init__(self, monkeypatch, weights_of="q", told_by="q", drawn_by="q", spans=by_one):
        self.p = make_policy(0)
        policies = {"q": moved(self.p, seed=3), "other": moved(self.p, seed=4)}
        policies["engine"] = moved(policies["q"], by=0.02)
        self.kept = Drafts()
        self.kept.keep_version(policies[weights_of], 1)
        self.kept.keep_version(policies["other"], 2)
        tables = {name: table(policy) for name, policy in policies.items()}
        early = {x: row for x, row in tables["q"].items() if len(x) < SWITCH}
        tables["q, then other"] = {**tables["other"], **early}
        self.logp, self.logq = table(self.p), tables[drawn_by]
        self.P, self.Q = self.row(law(self.logp)), self.row(law(self.logq))
        self.drafts = sorted({x[:cut] for x in WHOLE for cut in range(1, LIMIT + 1)})
        told, self.trainer = tables[told_by], tables["q"]
        self.accepts, self.residuals = outcomes(
            monkeypatch, self.p, self.kept, self.drafts, told, spans=spans
        )

    def row(self, found):
        return np.array([found[x] for x in WHOLE])

    def matrix(self, cut, chance=chances):
        """Results of the first `cut` tokens of each whole sequence."""
        laws = {
            x: self.row(law(self.logp, chance(self.accepts[x], self.residuals[x], x)))
            for x in {whole[:cut] for whole in WHOLE}
        }
        return np.stack([laws[whole[:cut]] for whole in WHOLE])

    def become(self, draft):
        """Law of what becomes of a draft; one of no tokens is none."""
        begun = chances(self.accepts[draft], self.residuals[draft], draft) if draft else None
        return self.row(law(self.logp, begun))

    def goes_on(self, cut):
        """The first tokens are kept as they are."""
        return np.stack([self.row(law(self.logp, {whole[:cut]: 1.0})) for whole in WHOLE])

    def joint(self, rows):
        """Both rows are cut when the first one ends; `rows(cut)` is a matrix, or one for each."""
        total = np.zeros((len(WHOLE), len(WHOLE)))
        for cut in range(1, LIMIT + 1):
            one, two = found if isinstance(found := rows(cut), tuple) else (found, found)
            for sign, least in ((1, cut), (-1, cut + 1)):
                q = self.Q * (least <= LENGTH)
                total += sign * np.outer(q @ one, q @ two)
        return total

    def error(self, joint):
        """Distance in total variation from independent draws of `p`, normalised."""
        return np.abs(joint / joint.sum() - np.outer(self.P, self.P)).sum() / 2


@pytest.fixture(scope="module")
def laws():
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Laws(monkeypatch)


def where(chosen, then, otherwise):
    """A matrix of some rows of another one."""
    return np.where(chosen[:, None], then, otherwise)


def test_two_that_share_a_cut_are_independent_draws_of_the_verifying_policy(laws):
    assert np.abs(laws.P - laws.Q).sum() > 0.1
    joint = laws.joint(laws.matrix)
    assert joint.sum() == pytest.approx(1, abs=1e-12)
    assert laws.error(joint) < 1e-12


def finished(cut):
    return cut >= LENGTH


def wrong(cut):
    """What a reward would see: the last token."""
    return np.array([whole[:cut][-1] == 2 for whole in WHOLE])


WRONG = {
    "what was drawn goes on unverified": lambda laws, cut: laws.goes_on(cut),
    "what has ended is not verified": lambda laws, cut: where(
        finished(cut), np.eye(len(WHOLE)), laws.matrix(cut)
    ),
    "only what has ended is verified": lambda laws, cut: where(
        finished(cut), laws.matrix(cut), laws.P
    ),
    "only what has not ended is verified": lambda laws, cut: where(
        finished(cut), laws.P, laws.matrix(cut)
    ),
    "what looks wrong is drawn again": lambda laws, cut: where(
        wrong(cut), laws.P, laws.matrix(cut)
    ),
    "what looks wrong is dropped": lambda laws, cut: where(wrong(cut), 0, laws.matrix(cut)),
    "one of the two is chosen, by its length": lambda laws, cut: (
        where(finished(cut), laws.matrix(cut), 0),
        laws.matrix(cut),
    ),
}


@pytest.mark.parametrize("rows", WRONG.values(), ids=WRONG)
def test_another_joint_law_if_drafts_are_chosen_by_content(laws, rows):
    assert laws.error(laws.joint(lambda cut: rows(laws, cut))) > 0.01


def test_drafts_of_two_policies_are_verified_against_both(monkeypatch):
    both = {"told_by": "q, then other", "drawn_by": "q, then other"}
    laws = Laws(monkeypatch, **both, spans=by_two)
    assert 0 < SWITCH < LIMIT and laws.logq != laws.trainer
    assert laws.error(laws.joint(laws.matrix)) < 1e-12
    laws = Laws(monkeypatch, **both)  # as if the first had drawn all of it
    assert laws.error(laws.joint(laws.matrix)) > 0.01


@pytest.mark.parametrize("settings", [{"weights_of": "other"}, {"told_by": "other"}])
def test_another_law_with_another_versions_probabilities(monkeypatch, settings):
    laws = Laws(monkeypatch, **settings)
    assert laws.error(laws.joint(laws.matrix)) > 0.01


def test_an_engine_that_differs_from_the_trainer_costs_no_more_than_the_bound(monkeypatch):
    """It draws and weighs with its own log-probs; what is drawn after a cut has the trainer's."""
    laws = Laws(monkeypatch, told_by="engine", drawn_by="engine")
    found = laws.Q @ laws.matrix(LIMIT)
    error = np.abs(found - laws.P).sum() / 2
    distance = 0.0  # of the next token, summed over the positions of a completion
    for prefix in OPEN:
        reached = math.exp(sum(laws.logq[prefix[:k]][t] for k, t in enumerate(prefix)))
        tokens = zip(laws.logq[prefix], laws.trainer[prefix], strict=True)
        distance += reached * sum(abs(math.exp(q) - math.exp(t)) for q, t in tokens) / 2
    assert distance < 0.1
    assert 1e-4 < error < 1.5 * distance


def test_another_law_if_the_noise_of_a_draft_decides_on_it_too(laws):
    """The token that is drawn says where in [0, 1) the noise was."""

    def chance(accepts, residuals, draft):
        reused = []
        for k, token in enumerate(draft):
            q = np.exp(laws.logq[draft[:k]])
            reused.append(np.clip((accepts[k] - q[:token].sum()) / q[token], 0, 1))
        return chances(reused, residuals, draft)

    assert laws.error(laws.joint(lambda cut: laws.matrix(cut, chance))) > 0.01


def test_another_joint_law_if_siblings_share_their_noise(laws):
    """Each row is a draw of the policy, but not independent of the other: drafts of one token."""
    total = np.zeros((len(WHOLE), len(WHOLE)))
    drafts = [(token,) for token in range(VOCAB)]
    sure = {
        x: [laws.row(law(laws.logp, chances([kept], laws.residuals[x], x))) for kept in (0.0, 1.0)]
        for x in drafts
    }
    for x, y in itertools.product(drafts, drafts):
        a, b = laws.accepts[x][0], laws.accepts[y][0]
        both, one, two = min(a, b), max(0, a - b), max(0, b - a)
        for kept, share in (((1, 1), both), ((1, 0), one), ((0, 1), two), ((0, 0), 1 - max(a, b))):
            if share:
                weight = share * math.exp(laws.logq[()][x[0]] + laws.logq[()][y[0]])
                total += weight * np.outer(sure[x][kept[0]], sure[y][kept[1]])
    assert total.sum(1) == pytest.approx(laws.P, abs=1e-12)
    assert laws.error(total) > 0.01


def test_an_empty_draft_is_no_draft(laws):
    completion = Completion(0, draft=Draft((), (), []))
    group = Group("g", Prompt("p", "", PROMPT), Sampling(LIMIT, TEMPERATURE), [completion])
    audit = verify(laws.kept, laws.p, [group], VERSION)
    assert completion == Completion(0) and audit.tokens == audit.completed == 0


def test_the_sums_go_through_what_is_rare(laws):
    """The last token is rejected; a draft is rejected whole; EOS is drawn after a cut, anywhere."""
    whole = [x for x in laws.drafts if len(x) == LIMIT]
    ended = [(k, row[EOS]) for x in whole for k, row in laws.residuals[x].items()]
    assert {k for k, eos in ended if eos > 0} == set(range(LIMIT))
    assert any(laws.accepts[x][-1] < 1 for x in whole)


@pytest.fixture(scope="module")
def kernel(laws):
    return {draft: laws.become(draft) for draft in [(), *laws.drafts]}


def drawn(laws, tokens):
    """Probability of each sequence that is one token longer."""
    return {(*tokens, t): math.exp(q) for t, q in enumerate(laws.logq[tokens])}


def test_one_more_token_changes_nothing_of_what_becomes_of_a_draft(laws, kernel):
    """So it does not matter where a draft is cut, if nothing that comes later decides on it."""
    for begun in OPEN:
        longer = sum(chance * kernel[x] for x, chance in drawn(laws, begun).items())
        assert np.abs(longer - kernel[begun]).sum() < 1e-12
    assert kernel[()] == pytest.approx(laws.P, abs=1e-15)


def one_slot(x, y):
    """The second begins when the first has ended; both are cut after four tokens."""
    return [] if len(x) + len(y) == 4 or ends(y) else [1] if ends(x) else [0]


def an_event(x, y):
    """Both are cut when one of them draws a certain token."""
    return [] if 2 in (*x, *y) or ends(x) or ends(y) else [0, 1]


def an_enough(x, y):
    """Each draws a token more than the other, in turn, until one is long or looks right."""
    return [] if ends(x) or ends(y) or x[-1:] == (3,) else [0] if len(x) <= len(y) else [1]


def a_begin(x, y):
    """The second begins only after a certain token of the first, and nobody waits for it."""
    return [] if ends(x) else [0, 1] if x[:1] == (0,) and not ends(y) else [0]


def joint_of(laws, kernel, turn):
    """Law of two rows; `turn` sees what they have drawn, and says which of them draw a token."""
    total, todo = np.zeros((len(WHOLE), len(WHOLE))), {((), ()): 1.0}
    while todo:
        pair, probability = todo.popitem()
        if not (rows := turn(*pair)):
            total += probability * np.outer(kernel[pair[0]], kernel[pair[1]])
            continue
        choices = [drawn(laws, x) if i in rows else {x: 1.0} for i, x in enumerate(pair)]
        for (x, of_x), (y, of_y) in itertools.product(*(c.items() for c in choices)):
            todo[x, y] = todo.get((x, y), 0.0) + probability * of_x * of_y
    return total


TURNS = pytest.mark.parametrize("turn", [one_slot, an_event, an_enough, a_begin])


@TURNS
def test_what_has_been_drawn_may_decide_where_drafts_begin_and_end(laws, kernel, turn):
    joint = joint_of(laws, kernel, turn)
    assert joint.sum() == pytest.approx(1, abs=1e-12)
    assert laws.error(joint) < 1e-12


@TURNS
def test_another_joint_law_if_a_token_decides_on_a_cut_before_it(laws, kernel, turn):
    before = {x: kernel[x[:-1] if x[-1:] == (2,) else x] for x in kernel}
    assert laws.error(joint_of(laws, before, turn)) > 0.01


def test_another_law_if_drafts_decide_on_the_policy_that_verifies_them(laws):
    """As if what this round trains on were to wait for the end of a draft."""
    short = laws.Q * (LENGTH == 1)
    found = short @ laws.matrix(LIMIT) / short.sum()
    assert np.abs(found - laws.P).sum() / 2 > 0.01


@pytest.mark.parametrize("seed", range(100))
def test_a_draft_with_replies_is_kept_as_far_as_its_turns_without_them(seed):
    """A reply is a part of the token before it, so the law is that of turns alone."""
    random = np.random.default_rng(seed)
    turns = int(random.integers(1, 7))
    logp, logq, noise = np.log(random.uniform(0.05, 1, (3, turns)))
    noise = np.exp(noise)
    replies = random.integers(0, 3, turns + 1)
    authors, whole, told = [ENVIRONMENT] * replies[0], [replies[0]], [0.5] * replies[0]
    for i, reply in enumerate(replies[1:]):
        authors += [1 + (i > 2)] + [ENVIRONMENT] * reply
        told += [0.5] * reply + [noise[i]]  # of the prefix that ends with the reply
        whole.append(len(authors))
    drawn = [author != ENVIRONMENT for author in authors]

    def trial(logp, logq, authors, noise):
        spans = [(author, len([*of])) for author, of in itertools.groupby(authors)]
        sampling = Sampling(len(authors) + 1, 1.0)
        sample = Sample(Group("g", Prompt("p", "", PROMPT), sampling, []), Completion(0))
        draft = Draft([*range(len(authors))], [*logq], spans)
        one = block_verification.Trial(sample, draft, torch.tensor(noise), 0.5)
        one.logprobs = torch.tensor(logp)
        one.weigh()
        return one

    def spread(values):
        spread = np.zeros(len(authors))
        spread[drawn] = values
        return spread

    bare = trial(logp, logq, [1] * turns, noise)
    full = trial(spread(logp), spread(logq), authors, told)
    assert full.is_accepted == bare.is_accepted
    assert torch.equal(full.log_weights[whole], bare.log_weights)
    if not bare.is_accepted:
        assert full.prefixes == [whole[n] for n in bare.prefixes]
        keep, completion = full.prefixes[0], full.sample.completion
        full.accept(keep)
        completion.token_ids.append(0)
        full.become(completion, VERSION, None)
        expected = [VERSION if each else ENVIRONMENT for each in [*drawn[:keep], True]]
        assert [a for a, n in completion.segments for _ in range(n)] == expected
        assert completion.finish_reason is None
