"""Groups as flat tensors, for checkpoints."""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from lit_rlsched.types import Completion, FinishReason, Group, Prompt, Sampling

_FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length")


def pack(groups: Iterable[Group]) -> dict[str, Any]:
    """Return groups as flat tensors. Prompts are stored by uid; texts are not stored."""
    groups = list(groups)
    completions = [c for g in groups for c in g.completions]
    spans = [s for c in completions for s in c.segments]
    return {
        "groups": [
            (g.id, g.prompt.uid, len(g.completions), g.deferred, *astuple(g.sampling), g.overtaken)
            for g in groups
        ],
        "index": torch.tensor([c.index for c in completions], dtype=torch.int32),
        "finish": torch.tensor([_FINISH.index(c.finish_reason) for c in completions]),
        "dropped": [c.dropped for c in completions],
        "advantage": torch.tensor([c.advantage for c in completions], dtype=torch.float64),
        "scores": [c.scores for c in completions],
        "attempts": torch.tensor([c.attempts for c in completions], dtype=torch.int32),
        "extra": [json.dumps(c.extra) if c.extra else "" for c in completions],
        "logged": [c.logged for c in completions],
        "messages": [json.dumps(c.messages) if c.messages else "" for c in completions],
        "observation": [c.observation for c in completions],
        "waited": [c.waited for c in completions],
        "environment_state": [c.environment_state for c in completions],
        "offsets": _offsets(c.token_ids for c in completions),
        "token_ids": _joined((c.token_ids for c in completions), np.int32),
        "logprobs": _joined((c.logprobs for c in completions), np.float64),
        "span_offsets": _offsets(c.segments for c in completions),
        "spans": torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
        "old": _optional([c.old_logprobs for c in completions], completions),
        "ref": _optional([c.ref_logprobs for c in completions], completions),
    }


def unpack(state: dict[str, Any], prompt: Callable[[str], Prompt]) -> list[Group]:
    """Return the groups that `pack` stored; `prompt` finds a prompt by its uid."""
    offsets, missing = state["offsets"], [None] * len(state["index"])
    spans = [tuple(span) for span in state["spans"].tolist()]
    span_offsets = state["span_offsets"].tolist()
    columns = {
        "index": state["index"].tolist(),
        "token_ids": _arrays("i", state["token_ids"], offsets),
        "logprobs": _arrays("d", state["logprobs"], offsets),
        "segments": [spans[a:b] for a, b in pairwise(span_offsets)],
        "finish_reason": [_FINISH[i] for i in state["finish"].tolist()],
        "scores": state["scores"],
        "extra": [json.loads(extra or "{}") for extra in state["extra"]],
        "logged": state["logged"],
        "messages": [json.loads(m or "[]") for m in state["messages"]],
        "observation": state["observation"],
        "waited": state["waited"],
        "environment_state": state["environment_state"],
        "attempts": state["attempts"].tolist(),
        "dropped": state["dropped"],
        "advantage": state["advantage"].tolist(),
        "old_logprobs": missing if state["old"] is None else _arrays("d", state["old"], offsets),
        "ref_logprobs": missing if state["ref"] is None else _arrays("d", state["ref"], offsets),
    }
    rows = zip(*columns.values(), strict=True)
    completions = (Completion(**dict(zip(columns, row, strict=True))) for row in rows)
    return [
        Group(name, prompt(uid), Sampling(*sampling), [*islice(completions, size)], late, overtaken)
        for name, uid, size, late, *sampling, overtaken in state["groups"]
    ]


def _offsets(lists: Iterable[Sequence[Any]]) -> torch.Tensor:
    return torch.tensor([0, *(len(x) for x in lists)]).cumsum(0)


def _joined(parts: Iterable[Any], dtype: Any) -> torch.Tensor:
    empty = np.empty(0, dtype)  # `concatenate` needs one array
    return torch.from_numpy(np.concatenate([empty, *map(np.asarray, parts)], dtype=dtype))


def _optional(
    rows: "list[array[float] | None]", completions: list[Completion]
) -> torch.Tensor | None:
    """Return `None` if no completion has log-probs; dropped ones without them get zeros."""
    if all(row is None for row in rows):
        return None
    zeros = (np.zeros(len(c.token_ids)) for c in completions)
    return _joined(
        (zero if row is None else row for row, zero in zip(rows, zeros, strict=True)), np.float64
    )


def _arrays(typecode: str, values: torch.Tensor, offsets: torch.Tensor) -> "list[array[Any]]":
    flat = values.numpy()
    return [array(typecode, flat[a:b].tobytes()) for a, b in pairwise(offsets.tolist())]
