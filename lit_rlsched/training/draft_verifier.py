"""What lost a race is verified under a newer policy, instead of being drawn anew."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlsched.engines.sampling import counter_uniform, inverse_cdf
from lit_rlsched.policy import base_model
from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.training.logprobs import (
    completion_logprobs,
    completion_states,
    default_chunk,
    vocabulary_logprobs,
)
from lit_rlsched.training.micro_batches import split_by_tokens
from lit_rlsched.training.speculative import (
    acceptance,
    excess,
    num_accepted,
    prefix_weights,
)
from lit_rlsched.types import Draft, Group, Sample, stable_hash


@dataclass(slots=True)
class _Trial:
    """A draft in verification."""

    sample: Sample
    draft: Draft
    noise: Tensor
    """For each of its prefixes, `[C]`."""
    after: float
    """Noise of the token that is drawn after what is kept."""
    logprobs: Tensor = field(default_factory=partial(torch.empty, 0))
    """Of its tokens under the policy that verifies, `[C]`."""
    log_weights: Tensor = field(default_factory=partial(torch.empty, 0))
    """Of its prefixes, `[C + 1]`."""

    @property
    def tokens(self) -> int:
        return len(self.draft.token_ids)

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.sample.group.prompt.token_ids

    @property
    def temperature(self) -> float:
        return self.sample.group.sampling.temperature

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.draft.token_ids]

    def __len__(self) -> int:
        return len(self.prompt_ids) + self.tokens

    def is_sound(self) -> bool:
        """Whether its log-probs can be compared."""
        drawn = torch.tensor(self.draft.logprobs)
        return bool(drawn.isfinite().all() and not self.logprobs.isnan().any())

    def weigh(self) -> float:
        """Compare them; by how much they differ, token by token."""
        drawn = torch.tensor(self.draft.logprobs, dtype=torch.float64)
        self.log_weights = prefix_weights(self.logprobs, drawn)
        return float((1 - (self.logprobs - drawn).clamp(max=0).exp()).sum())

    @property
    def is_whole(self) -> bool:
        """Whether all of it is kept."""
        return bool(self.noise[-1] < self.log_weights[-1].exp())

    def keep(self, tokens: int) -> None:
        """Make the first of its tokens the completion's."""
        completion = self.sample.completion
        completion.token_ids = list(self.draft.token_ids[:tokens])
        completion.logprobs = self.logprobs[:tokens].tolist()


class Drafts:
    """Verifies drafts, and keeps what that needs of earlier policies: their trainable weights.

    The weights of a version are copied to the CPU when a round leaves drafts of it and forgotten
    with the last of these: one copy for each short round between two long ones, and one more where
    prompts wait on.
    """

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        """Trainable parameters by policy version and name."""

    def keep(self, policy: nn.Module, version: int, pool: Iterable[Group]) -> None:
        """After a round: keep the weights of each version that has a draft in the pool.

        Args:
            policy: With the weights of `version`, which drew the round.
            version: The round's.
            pool: What waits after it.
        """
        live = {c.draft.version for g in pool for c in g.completions if c.draft is not None}
        self.weights = {v: weights for v, weights in self.weights.items() if v in live}
        if version in live and version not in self.weights:
            trainable = _trainable(policy).items()
            self.weights[version] = {n: p.detach().to("cpu", copy=True) for n, p in trainable}

    @torch.no_grad()
    def verify(
        self,
        groups: Sequence[Group],
        policy: nn.Module,
        version: int,
        *,
        seed: int,
        salt: str,
        eos_token_ids: Sequence[int],
        micro_batch_tokens: int,
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> DraftAudit:
        """Turn the drafts of `groups` into completions of `policy`, as far as they go.

        A draft goes through the policy once, and where not all is kept once more, and through the
        policy that drew it. The prefix that is kept and a token drawn after it become the
        completion's; it is finished if they end it.

        Args:
            groups: Of a round that begins; their completions are changed.
            policy: With the weights of `version`.
            version: The round's.
            seed: The run's.
            salt: See `RolloutController.run`.
            eos_token_ids: Tokens that end a completion.
            micro_batch_tokens: Most positions, padding included, of a forward pass.
            forward_context: The Trainer's precision context.
        """

        def trial(sample: Sample, draft: Draft) -> _Trial:
            name = seed, salt, sample.group.prompt.uid, sample.completion.index, version
            streams = [stable_hash("draft", use, *name) for use in ("accept", "after")]
            accept, after = torch.tensor(streams)
            counters = torch.arange(len(draft.token_ids))
            noise = float(counter_uniform(after, counters[:1]))
            return _Trial(sample, draft, counter_uniform(accept, counters), noise)

        samples = [Sample(g, c) for g in groups for c in g.completions]
        trials = [
            trial(sample, d) for sample in samples if (d := sample.completion.draft) is not None
        ]
        audit = DraftAudit(tokens=sum(t.tokens for t in trials))
        if not trials:
            return audit
        for one in trials:
            one.sample.completion.draft = None
        with _evaluating(policy), forward_context():
            for batch in split_by_tokens(trials, micro_batch_tokens):
                _score(policy, batch)
            sound = [t for t in trials if t.is_sound()]
            audit.distance = sum(t.weigh() for t in sound)
            cut = [t for t in sound if not t.is_whole]
            for one in (t for t in sound if t.is_whole):
                one.keep(one.tokens)
                audit.completed += 1
            for drew in sorted({t.draft.version for t in cut}):
                weights = self._on_device(policy, drew)
                members = [t for t in cut if t.draft.version == drew]
                for batch in split_by_tokens(members, micro_batch_tokens):
                    _cut(policy, weights, batch)
        audit.nonfinite = len(trials) - len(sound)
        audit.accepted_tokens = sum(len(t.sample.completion.token_ids) for t in sound) - len(cut)
        for one in sound:
            completion, ids = one.sample.completion, one.sample.completion.token_ids
            completion.version_spans = [(version, len(ids))]
            if ids[-1] in eos_token_ids:
                completion.finish_reason = "stop"
            elif len(ids) >= one.sample.group.sampling.max_completion_length:
                completion.finish_reason = "length"
        return audit

    def _on_device(self, policy: nn.Module, version: int) -> dict[str, Tensor]:
        weights = self.weights[version]
        return {name: weights[name].to(p) for name, p in _trainable(policy).items()}

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        """The weights."""
        return dict(self.weights)

    def load_state_dict(self, state: dict[int, dict[str, Tensor]]) -> None:
        """Restore."""
        self.weights = dict(state)


def _trainable(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


@contextmanager
def _evaluating(policy: nn.Module) -> Iterator[None]:
    training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(training)


@contextmanager
def _with(policy: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Other weights for a moment; the policy's own are not copied, so come back as they were."""
    parameters = _trainable(policy)
    own = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = weights[name]
        torch.clear_autocast_cache()  # autocast knows a weight by its parameter, not by its data
        yield
    finally:
        for name, p in parameters.items():
            p.data = own[name]
        torch.clear_autocast_cache()


def _score(policy: nn.Module, batch: Sequence[_Trial]) -> None:
    """Take the log-probs of the drafts' tokens."""
    logprobs, _ = completion_logprobs(
        policy, *_tensors(policy, batch), temperature=batch[0].temperature
    )
    for trial, row in zip(batch, logprobs.double().cpu(), strict=True):
        trial.logprobs = row[: trial.tokens]


def _cut(policy: nn.Module, weights: dict[str, Tensor], batch: Sequence[_Trial]) -> None:
    """Keep a prefix of each draft and draw a token after it."""
    distributions = partial(vocabulary_logprobs, policy, temperature=batch[0].temperature)
    tensors = _tensors(policy, batch)
    new = completion_states(policy, *tensors)
    with _with(policy, weights):
        old = completion_states(policy, *tensors)

    def both(positions: slice) -> tuple[Tensor, Tensor]:
        logp = distributions(new[positions])
        with _with(policy, weights):
            return logp, distributions(old[positions])

    log_weights = torch.cat([t.log_weights[:-1] for t in batch]).to(new.device)
    config: Any = base_model(policy).config.get_text_config()
    chunk = default_chunk(new.device.type, config.vocab_size)
    chunks = [slice(i, i + chunk) for i in range(0, len(new), chunk)]
    more = torch.cat([excess(log_weights[at], *both(at)).sum(-1) for at in chunks]).cpu()
    begin = 0
    for trial, of_trial in zip(batch, more.split([t.tokens for t in batch]), strict=True):
        accepts = acceptance(trial.log_weights, of_trial)
        kept = num_accepted(accepts[:-1], trial.noise[:-1])
        at = slice(begin + kept, begin + kept + 1)
        logp, logq = both(at)
        (probabilities,) = excess(log_weights[at], logp, logq)
        if not probabilities.sum() > 0:  # the policies are one, but for rounding
            (probabilities,) = logp.double().exp()
        token = int(inverse_cdf(probabilities, trial.after))
        trial.keep(kept)
        trial.sample.completion.token_ids.append(token)
        trial.sample.completion.logprobs.append(float(logp[0, token]))
        begin += trial.tokens


def _tensors(policy: nn.Module, batch: Sequence[_Trial]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids `[B, T]`, and the lengths of prompts and drafts, `[B]`."""
    device = next(policy.parameters()).device
    ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
    for row, trial in zip(ids, batch, strict=True):
        row[: len(trial)] = torch.tensor(trial.token_ids)
    prompts = torch.tensor([len(t.prompt_ids) for t in batch])
    drafts = torch.tensor([t.tokens for t in batch])
    return ids.to(device), prompts.to(device), drafts.to(device)
