"""Kernels and bytes of the LM head: log-probs and entropies of a micro-batch and their gradients.

    python -m benchmarks run counts

Counted on fake tensors, which have shapes and types but no values and take no memory. Each
operation that is not a view counts as a kernel that reads its inputs and writes its outputs once.
Precision is `bf16-mixed` with weights in fp32. The first row of each model is plain PyTorch:
autocast casts the head in every chunk, and autograd computes the gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_rlsched.training import logprobs
from lit_rlsched.training.logprobs import lm_head

POSITIONS = 16384
SHAPES = {  # vocabulary, hidden size, whether the head is trained
    "Qwen3-0.6B": (151936, 1024, True),
    "Qwen2.5-7B, LoRA": (152064, 3584, False),
}


class Counts(NamedTuple):
    """Cost of a forward and backward pass over all positions."""

    kernels: int
    bytes: int


class Kernels(TorchDispatchMode):
    """Count the operations that are not views, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = {t.untyped_storage()._cdata for t in tensors}
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        shared = bool(made) and all(t.untyped_storage()._cdata in given for t in made)
        in_place = func._schema.name.endswith("_")
        # queries of a device or a shape are dispatched, too
        if made and not func.is_view and (in_place or not shared):
            self.kernels += 1
            self.bytes += sum(t.numel() * t.element_size() for t in [*tensors, *made])
        return out


def plainly(head: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Compute what `logprobs._score` does with autocast and autograd."""

    def score(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float()
        log_normalizer = logits.logsumexp(dim=-1)
        logp = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
        with torch.no_grad():
            entropies = log_normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)
        return logp, entropies

    return score


def count(vocabulary: int, hidden: int, trained: bool, chunk: int, plain: bool = False) -> Counts:
    """Score `POSITIONS` and compute gradients, in chunks with this many bytes of fp32 logits."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = Qwen3Config(vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=0)
        model = Qwen3ForCausalLM(config).requires_grad_(trained)
        states = torch.empty(POSITIONS, hidden, requires_grad=True)
        targets = torch.zeros(POSITIONS, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Kernels() as counted:
            ours = partial(logprobs._score, lm_head(model)[1], True)
            score = plainly(model.lm_head) if plain else ours
            logp, _ = logprobs._score_in_chunks(score, states, targets, chunk // (4 * vocabulary))
            logp.sum().backward()
    return Counts(counted.kernels, counted.bytes)
