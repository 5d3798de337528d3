"""Gives vLLM's scheduler draft tokens, which are verified next to the model.

`_vllm_verifying` does it with vLLM's first model runner, `_vllm_second_runner` with the second.

They are set before each step here, next to the scheduler, and not by a proposer next to the model:
the texts, groups and limits of requests are known here, the worker processes of a split model need
no copy of them, and vLLM runs without `speculative_config`. With one it would pad requests that
resume with draft tokens of its own, and draft for every row near the end of the context.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_rlsched.engines import _vllm_second_runner as second
from lit_rlsched.engines import _vllm_verifying as first
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.scheduling.speculation import DraftTokens
from lit_rlsched.types import Request

if TYPE_CHECKING:
    from lit_rlsched.engines.vllm import _Held

INSTEAD = "Leave `Speculation` out, or choose `--data.engine=TransformersEngine`."


def begin(engine: Any, spec: EngineSpec, config: Any) -> DraftTokens | None:
    """Prepare a built engine for draft tokens; None: there are none.

    Args:
        engine: vLLM's `LLMEngine`.
        spec: The run.
        config: vLLM's configuration.

    Raises:
        ValueError: vLLM cannot verify them with this model or this model runner, or this version
            draws otherwise.
    """
    if spec.drafting is None:
        return None
    if config.model_config.is_hybrid:
        raise ValueError(
            f"`Speculation` with `VLLMEngine` and the model {spec.model!r}: its recurrent layers "
            f"keep one state, which has already read the draft tokens that are wrong. {INSTEAD}"
        )
    if config.use_v2_model_runner:
        engine.collective_rpc(second.install, args=(spec.drafting.tokens,))
    elif spec.device.type == "cpu":
        engine.collective_rpc(first.install)
    else:
        raise ValueError(
            f"`Speculation` with `VLLMEngine` on `{spec.device}`: vLLM runs its first model runner "
            "there, which would not draw the same tokens. Unset `VLLM_USE_V2_MODEL_RUNNER`, or "
            "install Triton if it is missing: vLLM then runs its second one. Or leave "
            "`Speculation` out, or choose `--data.engine=TransformersEngine`."
        )
    return DraftTokens(spec.drafting, config.model_config.get_vocab_size())


def check_sampling(requests: Sequence[Request]) -> None:
    """Refuse `min_p`: vLLM's first model runner applies it by requests and not by positions.

    Raises:
        ValueError: names the request.
    """
    for request in requests:
        if min_p := request.sampling.min_p:
            raise ValueError(
                f"request {request.id!r} has {min_p=}, with which `VLLMEngine` cannot verify draft "
                "tokens. Leave `Speculation` out, or use `top_p` in place of `min_p`."
            )


def give(scheduler: Any, drafts: DraftTokens, held: "Mapping[str, _Held]") -> None:
    """Set the draft tokens of the scheduler's next step.

    Args:
        scheduler: vLLM's.
        drafts: What the engine's requests have drawn.
        held: The engine's requests by id.
    """
    for name, tokens in drafts.propose([*held]).items():
        request = scheduler.requests[held[name].inside]
        # a preempted request, whose cache is gone, is prefilled in the next step
        if request.num_computed_tokens == request.num_tokens - 1:
            request.spec_token_ids = tokens


def take(drafts: DraftTokens, outputs: Sequence[Any], held: "Mapping[str, _Held]") -> None:
    """Note what the requests have drawn in a step.

    A request can have draft tokens from its second step on, when its prompt is computed.

    Args:
        drafts: What the engine's requests have drawn.
        outputs: vLLM's, one per request.
        held: The engine's requests by vLLM's ids, with what they drew before.
    """
    for output in outputs:
        one = held[output.request_id]
        if not one.token_ids:
            drafts.begin(one.request)
        drafts.take(one.request.id, output.new_token_ids)
