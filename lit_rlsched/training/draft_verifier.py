"""Verify drafts under a newer policy, instead of decoding them again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lit_rlsched.engines.sampling import counter_uniform
from lit_rlsched.rollout.result import DraftAudit
from lit_rlsched.training.block_verification import Trial, excess
from lit_rlsched.training.logprobs import (
    completion_states,
    default_chunk,
    token_logprobs,
    vocabulary_logprobs,
)
from lit_rlsched.training.micro_batches import (
    PASS,
    EncodedRows,
    PromptRow,
    RowCost,
    share_prompts,
    split_rows,
)
from lit_rlsched.training.policy import evaluating, num_embeddings
from lit_rlsched.training.update import Update
from lit_rlsched.types import ENVIRONMENT, Group, Sample, stable_hash

AT_A_TIME = 16
"""Candidates of a draft that are tried at a time, the longest first, until one is accepted."""


class Drafts:
    """Verifies drafts with the trainable weights of the policy versions that drew them.

    A version's weights are copied to the CPU when a round leaves drafts of it, and deleted with the
    last of these drafts.
    """

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        """Trainable parameters by policy version and name; part of checkpoints."""

    def keep(self, policy: nn.Module, version: int, pool: Iterable[Group]) -> None:
        """Keep the trainable weights of each version that has tokens in the pool after a round.

        `policy` has the weights of `version`, the round's policy version.
        """
        live = {v for group in pool for c in group.completions for v, _ in c.segments}
        self.weights = {v: weights for v, weights in self.weights.items() if v in live}
        if version in live and version not in self.weights:
            self.keep_version(policy, version)

    def keep_version(self, policy: nn.Module, version: int) -> None:
        """Keep the trainable weights of a version that is about to draw drafts."""
        trainable = _trainable(policy).items()
        self.weights[version] = {n: p.detach().to("cpu", copy=True) for n, p in trainable}

    @torch.no_grad()
    def verify(
        self,
        groups: Sequence[Group],
        policy: nn.Module,
        version: int,
        update: Update,
        eos_token_ids: Sequence[int] | None,
        seed_domain: str = "",
    ) -> DraftAudit:
        """Turn the drafts of `groups` into exact draws of `policy`, as far as they are accepted.

        A completion gets the accepted prefix of its draft and, unless all of it is accepted, one
        token drawn after it. It is finished if these tokens end it. A draft without kept weights is
        discarded. `policy` has the weights of `version`; the noise depends on the run's seed,
        `seed_domain`, prompt, index and version alone. Drafts share a prompt as completions do in
        the update. `eos_token_ids` are None if tools are called: then no token ends a completion.
        """
        row_cost, tokens = update.learner.row_cost(), update.settings.micro_batch_tokens
        drafts = self._trials(groups, version, update.settings.seed, seed_domain)
        audit, trials = DraftAudit(tokens=sum(one.tokens for one in drafts)), list[Trial]()
        for one in drafts:
            one.sample.completion.draft = None
            if not self.weights.keys() >= {*one.draft.versions}:
                one.sample.completion.attempts += 1
                audit.lost += 1
            elif one.tokens:
                trials.append(one)
        if not trials:
            return audit
        device = next(policy.parameters()).device
        parameters = _trainable(policy).items()
        finite = list[Trial]()
        with evaluating(policy), update.forward_context():
            for versions in sorted({one.draft.versions for one in trials}):
                members = [one for one in trials if one.draft.versions == versions]
                drew: dict[int, dict[str, Tensor]] = {}
                for batch, rows in _batches(members, row_cost, tokens):
                    states = _score(policy, batch, EncodedRows.of(rows).to(device))
                    known = [one for one in batch if one.is_finite()]
                    for one in known:
                        one.weigh()
                    finite += known
                    cut = [one for one in known if not one.is_accepted]
                    if not cut:
                        continue
                    drew = drew or {
                        v: {name: self.weights[v][name].to(p) for name, p in parameters}
                        for v in versions
                    }
                    for again, its_rows in _batches(cut, row_cost, tokens):
                        old = _recall(policy, drew, again, EncodedRows.of(its_rows).to(device))
                        _cut(policy, drew, again, states, old)
        whole = [one for one in finite if one.is_accepted]
        for one in whole:
            one.accept(one.tokens)
        audit.completed = len(whole)
        audit.nonfinite = len(trials) - len(finite)
        for one in trials:
            one.sample.completion.attempts += not one.is_finite()
        audit.drawn = len(finite) - len(whole)
        kept = sum(len(one.sample.completion.token_ids) for one in finite)
        audit.accepted_tokens = kept - audit.drawn
        for one in finite:
            one.become(one.sample.completion, version, eos_token_ids)
        return audit

    def _trials(
        self, groups: Sequence[Group], version: int, seed: int, seed_domain: str
    ) -> list[Trial]:
        """Return the drafts of some groups, with their noise."""
        trials = []
        for sample in (Sample(g, c) for g in groups for c in g.completions):
            if (draft := sample.completion.draft) is None:
                continue
            name = seed, seed_domain, sample.group.prompt.uid, sample.completion.index, version
            streams = [stable_hash("draft", use, *name) for use in ("accept", "after")]
            accept, after = torch.tensor(streams)
            counters = torch.arange(max(1, len(draft.token_ids)))
            noise = float(counter_uniform(after, counters[:1]))
            trials.append(Trial(sample, draft, counter_uniform(accept, counters), noise))
        return trials


def _trainable(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


@contextmanager
def _with(policy: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Swap other weights in without copying the policy's own."""
    parameters = _trainable(policy)
    own = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = weights[name]
        torch.clear_autocast_cache()  # its key is the parameter, not the data
        yield
    finally:
        for name, p in parameters.items():
            p.data = own[name]
        torch.clear_autocast_cache()


def _batches(
    trials: Sequence[Trial], cost: RowCost | None, micro_batch_tokens: int
) -> list[tuple[list[Trial], list[PromptRow]]]:
    """Split drafts into micro-batches, in the order of their rows."""
    by_id = {one.sample.id: one for one in trials}
    rows = share_prompts([one.text for one in trials], cost, micro_batch_tokens)
    return [
        ([by_id[sample.id] for row in batch for sample in row.samples], batch)
        for batch in split_rows(rows, micro_batch_tokens, PASS)
    ]


def _score(policy: nn.Module, batch: Sequence[Trial], rows: EncodedRows) -> dict[str, Tensor]:
    """Set the log-probs of drafts; return the states that predict their tokens, by id."""
    states = completion_states(policy, *rows)
    drawn = torch.tensor([t for one in batch for t in one.draft.token_ids], device=states.device)
    logprobs = token_logprobs(policy, states, drawn, temperature=batch[0].temperature)
    sizes = [one.tokens for one in batch]
    for one, of_tokens in zip(batch, logprobs.double().cpu().split(sizes), strict=True):
        replies = torch.tensor(one.by) == ENVIRONMENT
        one.logprobs = of_tokens.masked_fill(replies, 0.0)
    return dict(zip((one.sample.id for one in batch), states.split(sizes), strict=True))


def _recall(
    policy: nn.Module,
    drew: Mapping[int, dict[str, Tensor]],
    batch: Sequence[Trial],
    rows: EncodedRows,
) -> dict[str, Tensor]:
    """Return the states of the policies that drew the tokens of drafts, by id."""
    by = torch.tensor([version for one in batch for version in one.by])
    old = None
    for version, weights in drew.items():
        with _with(policy, weights):
            states = completion_states(policy, *rows)
        at = (by == version).nonzero().squeeze(1).to(states.device)
        old = states if old is None else old.index_copy(0, at, states[at])
    assert old is not None
    parts = old.split([one.tokens for one in batch])
    return dict(zip((one.sample.id for one in batch), parts, strict=True))


def _cut(
    policy: nn.Module,
    drew: Mapping[int, dict[str, Tensor]],
    batch: list[Trial],
    new: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
) -> None:
    """Accept a prefix of each draft and draw a token after it, from states by id."""
    device = next(policy.parameters()).device
    at_once = max(1, default_chunk(device.type, num_embeddings(policy)) // AT_A_TIME)
    distributions = partial(vocabulary_logprobs, policy, temperature=batch[0].temperature)
    while batch:
        some, batch = batch[:at_once], batch[at_once:]
        asked = [one.prefixes[:AT_A_TIME] for one in some]
        each = [(one, n) for one, lengths in zip(some, asked, strict=True) for n in lengths]
        before = torch.stack([old[one.sample.id][n] for one, n in each])
        logp = distributions(torch.stack([new[one.sample.id][n] for one, n in each]))
        logq, by = torch.empty_like(logp), torch.tensor([one.by[n] for one, n in each])
        for version, weights in drew.items():
            if len(at := (by == version).nonzero().squeeze(1).to(device)):
                with _with(policy, weights):
                    logq[at] = distributions(before[at])
        log_weights = torch.stack([one.log_weights[n] for one, n in each]).to(device)
        sizes = [len(lengths) for lengths in asked]
        more = excess(log_weights, logp, logq).split(sizes)
        parts = zip(some, asked, more, logp.split(sizes), strict=True)
        batch = [*batch, *(one for one, *found in parts if not one.cut(*found))]
