"""Memory of one prompt with k completions: with repeated token rows, and with a shared prompt.

    python -m benchmarks run repetition

The prompt has 3,000 tokens and each completion 100. Nothing is truncated: all variants of the
update see the same number of tokens and have the same gradient, which is checked. The model has
Qwen3's architecture (4 layers, hidden size 256, vocabulary 16,384) in fp32 on the CPU. Each figure
comes from a new process: CPU seconds, bytes of live tensors without weights and gradients, and peak
resident memory. The last table limits each process to 1.25 times the memory that repeated rows need
with k = 4.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from typing import Any

from benchmarks import models, results
from benchmarks.common import ENVIRONMENT
from benchmarks.memory import measured

PROMPT, COMPLETION, VOCABULARY = 3000, 100, 16384
UPDATES = {
    "all_logits": "token rows repeated, logits of all positions (TRL at the time)",
    "logits": "token rows repeated, logits of the completions (TRL today)",
    "accumulated": "the same, a completion at a time (TRL today, gradient accumulation)",
    "rows": "ours, a row for each completion, all in one pass",
    "micro_batches": "ours, a row for each completion, `micro_batch_tokens=4096`",
    "shared": "ours, the prompt shared, `micro_batch_tokens=4096`",
}
MICRO_BATCH_TOKENS = 4096


def make_model(folder: str) -> None:
    """Make a random model whose logits and activations need more memory than its weights."""
    models.make_model(
        folder,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )


def update(model: str, variant: str, k: int) -> dict[str, Any]:
    """Run forward and backward over one group in this process and return the figures."""
    import torch

    from lit_rlsched.cli.estimate import LiveBytes
    from lit_rlsched.training.logprobs import completion_logprobs
    from lit_rlsched.training.micro_batches import OptimizerStep
    from lit_rlsched.training.policy import load_policy
    from lit_rlsched.training.shared_prefix import row_cost
    from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

    policy: Any = load_policy(model)
    policy(torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()  # allocates the gradients
    policy.zero_grad(set_to_none=False)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (PROMPT + k * COMPLETION,), generator=draw).tolist()
    prompt = Prompt("0", "", tuple(ids[:PROMPT]))
    completions = [
        Completion(
            i,
            array("i", ids[at : at + COMPLETION]),
            array("d", bytes(8 * COMPLETION)),
            advantage=float(i % 2 or -1),
        )
        for i, at in enumerate(range(PROMPT, len(ids), COMPLETION))
    ]
    group = Group("0", prompt, Sampling(COMPLETION), completions)
    rows = [Sample(group, c) for c in completions]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with LiveBytes() as live:
        if variant in ("all_logits", "logits", "accumulated"):
            repeated = torch.tensor([row.token_ids for row in rows])
            kept = 0 if variant == "all_logits" else COMPLETION + 1
            advantages = torch.tensor([c.advantage for c in completions])
            each = 1 if variant == "accumulated" else k
            for at in (slice(i, i + each) for i in range(0, k, each)):
                logits = policy(repeated[at], use_cache=False, logits_to_keep=kept).logits.float()
                logp = logits.log_softmax(-1)[:, -COMPLETION - 1 : -1]
                logp = logp.gather(-1, repeated[at, PROMPT:, None]).squeeze(-1)
                (-(advantages[at, None] * logp).sum()).backward()
            positions = repeated.numel()
        else:
            step = OptimizerStep(
                rows,
                k * (PROMPT + COMPLETION) if variant == "rows" else MICRO_BATCH_TOKENS,
                row_cost=row_cost(policy) if variant == "shared" else None,
            )
            positions = step.padding().positions
            for batch in step:
                logp, _ = completion_logprobs(policy, **batch.logprob_inputs)
                (-(batch.advantages[:, None] * logp).sum()).backward()
    return {
        "seconds": time.process_time() - began,
        "live": live.peak,
        "rss": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        "resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "positions": positions,
        "tokens": sum(len(row.completion.token_ids) for row in rows),
        "gradient": float(torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])),
    }


def generate(model: str, k: int, scores: bool) -> dict[str, Any]:
    """Repeat the prompt's tokens and generate with transformers in bf16."""
    import torch

    from lit_rlsched.cli.estimate import LiveBytes
    from lit_rlsched.training.policy import load_policy

    policy: Any = load_policy(model).bfloat16()
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCABULARY, (1, PROMPT), generator=draw).repeat(k, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with LiveBytes() as live, torch.no_grad():
        out = policy.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            min_new_tokens=COMPLETION,
            max_new_tokens=COMPLETION,
            output_scores=scores,
            return_dict_in_generate=True,
        )
        assert out.sequences.shape == (k, PROMPT + COMPLETION), "something was cut"
        if scores:
            torch.stack(out.scores, 1)
    rss = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"live": live.peak, "rss": rss}


def apart(limit: int | None = None, **job: Any) -> dict[str, Any] | None:
    """Measure in a new process; None if `limit` bytes of memory are not enough."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "benchmarks.repetition", "--one", json.dumps(job)]
    done = subprocess.run(
        command,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        preexec_fn=restrict,
    )
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    if limit is None or "can't allocate memory" not in done.stderr:
        raise RuntimeError(done.stderr)
    return None


def _less(value: float, than: float) -> str:
    return (
        f"{value / 2**20:,.0f} ({value / than - 1:+.0%})"
        if value != than
        else f"{value / 2**20:,.0f}"
    )


def updates(model: str, ks: list[int]) -> int:
    """Print the first table, the update, and return the peak memory of repeated rows with k = 4."""
    resident = 0
    print("The update of one group\n")
    print(
        "| k | | positions | CPU seconds | live, MiB | resident, MiB |\n|---|---|---|---|---|---|"
    )
    for k in ks:
        plain: dict[str, Any] | None = None
        for variant, name in UPDATES.items():
            figures = apart(model=model, variant=variant, k=k)
            assert figures is not None
            plain = plain or figures
            assert figures["tokens"] == plain["tokens"] == k * COMPLETION
            assert abs(figures["gradient"] / plain["gradient"] - 1) < 1e-4, "another gradient"
            if k == 4:
                resident = resident or int(figures["resident"])
            results.add(f"{variant}, k={k}", figures)
            print(
                f"| {k} | {name} | {figures['positions']:,} | {figures['seconds']:.1f} | "
                f"{_less(figures['live'], plain['live'])} | "
                f"{_less(figures['rss'], plain['rss'])} |",
                flush=True,
            )
    return resident


def rollouts(model: str, ks: list[int]) -> None:
    """Print the second table: rollouts without updates."""
    head = " | ".join(f"k = {k}: MiB" for k in ks)
    print(f"\nThe rollout of one group, bf16\n\n| | {head} |\n|---|{'---|' * len(ks)}")
    plain: dict[int, float] = {}
    for name, scores in (
        ("transformers' generate, token rows repeated, scores kept (TRL at the time)", True),
        ("transformers' generate, token rows repeated", False),
    ):
        cells = []
        for k in ks:
            figures = apart(model=model, k=k, scores=scores)
            assert figures is not None
            kept = "scores kept" if scores else "no scores"
            results.add(f"generate, {kept}, k={k}", figures)
            cells.append(_less(figures["live"], plain.setdefault(k, figures["live"])))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    cells = []
    for k in ks:
        figures = measured(
            model=model, generations=k, limit=COMPLETION, prompt_tokens=PROMPT, slots=k
        )
        assert figures["lengths"] == [COMPLETION] * k, "a completion was cut"
        results.add(f"vLLM, k={k}", {"kv_bytes": figures["kv_bytes"]})
        cells.append(_less(figures["kv_bytes"], plain[k]))
    print(f"| vLLM, one prompt, its cache shared: cache in use | {' | '.join(cells)} |", flush=True)


def limited(model: str, limit: int, ks: list[int]) -> None:
    """Print the third table: what fits into this many bytes."""
    print(f"\nUnder a limit of {limit / 2**30:.1f} GiB (`RLIMIT_DATA`, all of the process)\n")
    print(f"| | {' | '.join(f'k = {k}' for k in ks)} |\n|---|{'---|' * len(ks)}")
    for variant, name in UPDATES.items():
        fit = [apart(limit, model=model, variant=variant, k=k) is not None for k in ks]
        results.add(variant, {f"fits, k={k}": int(f) for k, f in zip(ks, fit, strict=True)})
        cells = " | ".join("fits" if f else "out of memory" for f in fit)
        print(f"| {name} | {cells} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = results.parser("repetition", __doc__)
    parser.add_argument(
        "--k", type=int, nargs="+", default=[2, 4, 8], help="numbers of completions; must include 4"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = results.parse(parser, arguments)
    if options.one:
        job = json.loads(options.one)
        print(json.dumps(generate(**job) if "scores" in job else update(**job)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        resident = updates(folder, options.k)
        rollouts(folder, options.k)
        limited(folder, resident * 5 // 4, options.k)


if __name__ == "__main__":
    main()
