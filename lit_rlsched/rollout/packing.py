"""Groups as flat tensors, for checkpoints."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from lit_rlsched.types import Completion, Draft, FinishReason, Group, Prompt, Sampling

_FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length")


def pack(groups: Iterable[Group]) -> dict[str, Any]:
    """Write groups as flat tensors; prompts are kept by uid, texts are made again from tokens."""
    groups = list(groups)
    completions = [c for g in groups for c in g.completions]
    spans = [s for c in completions for s in c.version_spans]
    drafts = [c.draft for c in completions]
    return {
        "groups": [
            (g.id, g.prompt.uid, len(g.completions), g.deferred, *_sampling(g.sampling))
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
        "offsets": _offsets(c.token_ids for c in completions),
        "token_ids": torch.tensor([t for c in completions for t in c.token_ids], dtype=torch.int32),
        "logprobs": _floats(c.logprobs for c in completions),
        "span_offsets": _offsets(c.version_spans for c in completions),
        "spans": torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
        "draft_versions": [d and d.version for d in drafts],
        "draft_offsets": _offsets(d.token_ids if d else () for d in drafts),
        "draft_ids": torch.tensor([t for d in drafts if d for t in d.token_ids], dtype=torch.int32),
        "draft_logprobs": _floats(d.logprobs for d in drafts if d),
        "old": _optional([c.old_logprobs for c in completions], completions),
        "ref": _optional([c.ref_logprobs for c in completions], completions),
    }


def unpack(state: dict[str, Any], prompt: Callable[[str], Prompt]) -> list[Group]:
    """Read what `pack` wrote."""
    tokens = _slices(state["token_ids"].tolist(), state["offsets"])
    logprobs = _slices(state["logprobs"].tolist(), state["offsets"])
    spans = _slices(list(map(tuple, state["spans"].tolist())), state["span_offsets"])
    drafts = _drafts(state)
    old = _restore(state["old"], state["offsets"])
    ref = _restore(state["ref"], state["offsets"])
    completions = [
        Completion(
            index=index,
            token_ids=tokens[i],
            logprobs=logprobs[i],
            version_spans=spans[i],
            finish_reason=_FINISH[finish],
            scores=state["scores"][i],
            extra=json.loads(state["extra"][i] or "{}"),
            logged=state["logged"][i],
            attempts=attempts,
            dropped=state["dropped"][i],
            advantage=advantage,
            draft=drafts[i],
            old_logprobs=old[i],
            ref_logprobs=ref[i],
        )
        for i, (index, finish, advantage, attempts) in enumerate(
            zip(
                state["index"].tolist(),
                state["finish"].tolist(),
                state["advantage"].tolist(),
                state["attempts"].tolist(),
                strict=True,
            )
        )
    ]
    groups, rest = [], iter(completions)
    for group_id, uid, size, deferred, *sampling in state["groups"]:
        members = [next(rest) for _ in range(size)]
        groups.append(Group(group_id, prompt(uid), Sampling(*sampling), members, deferred))
    return groups


def _sampling(s: Sampling) -> tuple[int, float, float, int, float]:
    return s.max_completion_length, s.temperature, s.top_p, s.top_k, s.min_p


def _drafts(state: dict[str, Any]) -> list[Draft | None]:
    tokens = _slices(state["draft_ids"].tolist(), state["draft_offsets"])
    logprobs = _slices(state["draft_logprobs"].tolist(), state["draft_offsets"])
    return [
        None if version is None else Draft(tuple(tokens[i]), tuple(logprobs[i]), version)
        for i, version in enumerate(state["draft_versions"])
    ]


def _offsets(lists: Iterable[Sequence[Any]]) -> torch.Tensor:
    return torch.tensor([0, *(len(x) for x in lists)]).cumsum(0)


def _floats(lists: Iterable[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([x for row in lists for x in row], dtype=torch.float64)


def _optional(
    lists: list[list[float] | None], completions: list[Completion]
) -> torch.Tensor | None:
    """A round has it or has it not; a dropped completion of a round that has it counts as zeros."""
    if all(row is None for row in lists):
        return None
    return _floats(
        [0.0] * len(c.token_ids) if row is None else row
        for row, c in zip(lists, completions, strict=True)
    )


def _slices(values: list[Any], offsets: torch.Tensor) -> list[list[Any]]:
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def _restore(values: torch.Tensor | None, offsets: torch.Tensor) -> list[list[float] | None]:
    if values is None:
        return [None] * (len(offsets) - 1)
    return list(_slices(values.tolist(), offsets))
