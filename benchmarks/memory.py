"""Key-value cache of a group with vLLM: by group size with fixed slots, with and without slots.

    python -m benchmarks run memory

vLLM's block pool counts the tokens in its cache, times the bytes of a token. Beside them stands the
peak resident memory of the process on the CPU. The second table decodes 32 completions of 1,024
tokens with the cache of Qwen3-1.7B (28 layers, 8 key-value heads of 128, bfloat16: 112 KiB per
token) and otherwise a tiny model, so that a CPU can run it: the missing weights need the same
memory with any number of slots.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import models, results
from benchmarks.common import ENVIRONMENT

WEIGHTS_GIB = 1_720_574_976 * 2 / 2**30
"""GiB of Qwen3-1.7B's parameters in bfloat16."""


def make_model(folder: str, layers: int, kv_heads: int, head_dim: int) -> None:
    """Make a random model with this cache that is otherwise tiny."""
    models.make_model(
        folder,
        dtype="bfloat16",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
    )


def measure(
    model: str,
    generations: int,
    limit: int,
    prompt_tokens: int,
    slots: int | None = None,
    memory_budget: int | None = None,
) -> dict[str, Any]:
    """Decode one group in this process and return its figures."""
    import resource

    import torch
    from transformers import AutoConfig

    from lit_rlsched.engines.spec import EngineSpec
    from lit_rlsched.engines.vllm import VLLMEngine
    from lit_rlsched.rollout.rollout import Rollout
    from lit_rlsched.rollout.scoring import Unscored
    from lit_rlsched.rollout.session import RolloutSession
    from lit_rlsched.scheduling.admission import SlotSettings
    from lit_rlsched.text import kv_bytes_per_token
    from lit_rlsched.types import Completion, Group, Prompt, Sampling

    token_bytes = kv_bytes_per_token(AutoConfig.from_pretrained(model), torch.bfloat16)
    settings, engine = SlotSettings(slots=slots, memory_budget=memory_budget), VLLMEngine()
    spec = EngineSpec(
        model,
        0,
        prompt_tokens + limit,
        (),  # without EOS, so that all reach the limit
        dtype=torch.bfloat16,
        kv_cache_bytes=memory_budget,
    )
    most = settings.engine_slots(
        engine.kv_cache(spec, token_bytes), generations, prompt_tokens, engine.most_slots(spec)
    )
    spec = replace(spec, slots=most)
    cache = engine.kv_cache(spec, token_bytes)
    scorer: Any = Unscored()
    session = RolloutSession(
        engine,
        spec,
        scorer,
        seed=0,
        admission=lambda: settings.admission(cache, spec.slots, limit, "fifo"),
    )
    group = Group(
        "0",
        Prompt("0", "0", tuple(5 + i % 200 for i in range(prompt_tokens))),
        Sampling(limit),
        [Completion(i) for i in range(generations)],
    )
    rollout = Rollout(session, [group], 0)
    rollout.load_weights()
    rollout.run()
    trace = rollout.trace
    figures = {
        "peak_kv_tokens": max(trace.steps["kv_tokens"]),
        "kv_bytes": max(trace.steps["kv_tokens"]) * token_bytes,
        "peak_running": max(trace.steps["running"]),
        "decode_steps": trace.decode_steps,
        "prefill_tokens": trace.total("prefill_tokens"),
        "preemptions": trace.total("preemptions"),
        "pauses": trace.pauses,
        "lengths": [len(c.token_ids) for c in group.completions],
        "seconds": trace.seconds,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    engine.close()
    return figures


def measured(**arguments: Any) -> dict[str, Any]:
    """Measure one group in a new process, so that its peak memory is that of the group."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", json.dumps(arguments)]
    env = os.environ | ENVIRONMENT
    del env["VLLM_CPU_KVCACHE_SPACE"]  # as much as the slots need
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "lengths"}


def by_group_size(folder: str, slots: int) -> None:
    """Print the first table: peak cache by group size."""
    model = f"{folder}/small"
    make_model(model, layers=2, kv_heads=1, head_dim=32)
    print(f"Peak cache of one group, prompt of 100 tokens, at most 256 more, {slots} slots")
    print("\n| G | peak running | peak cache, tokens | prompt tokens computed | decode steps |")
    print("|---|---|---|---|---|")
    for generations in (8, 16, 32, 64, 128, 256):
        f = measured(
            model=model, generations=generations, limit=256, prompt_tokens=100, slots=slots
        )
        results.add(f"{generations} completions, {slots} slots", _figures(f))
        print(
            f"| {generations} | {f['peak_running']} | {f['peak_kv_tokens']:,} | "
            f"{f['prefill_tokens']:,} | {f['decode_steps']:,} |",
            flush=True,
        )


def by_slots(folder: str, generations: int, limit: int) -> None:
    """Print the second table: Qwen3-1.7B's cache for a whole group, with slots, with a budget."""
    model = f"{folder}/cache_of_qwen3_1_7b"
    make_model(model, layers=28, kv_heads=8, head_dim=128)
    print(f"\nG = {generations}, {limit:,} tokens each, Qwen3-1.7B's cache in bfloat16\n")
    print(
        "| | peak running | peak cache, GiB | less | peak resident memory of the process, GiB | "
        "cache and weights, GiB (arithmetic) | decode steps | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    whole = None
    for name, setting in (
        ("whole group", {"slots": generations}),
        ("slots=8", {"slots": 8}),
        ("slots=4", {"slots": 4}),
        ("memory_budget=1GiB", {"memory_budget": 2**30}),
    ):
        f = measured(
            model=model, generations=generations, limit=limit, prompt_tokens=100, **setting
        )
        assert f["lengths"] == [limit] * generations, "a completion was cut"
        results.add(f"{name}, Qwen3-1.7B's cache", _figures(f))
        cache = f["kv_bytes"] / 2**30
        whole = whole or cache
        print(
            f"| {name} | {f['peak_running']} | {cache:.2f} | {1 - cache / whole:.0%} | "
            f"{f['peak_rss'] / 2**30:.2f} | {cache + WEIGHTS_GIB:.2f} | {f['decode_steps']:,} | "
            f"{f['seconds']:.0f} |",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = results.parser("memory", __doc__)
    parser.add_argument("--slots", type=int, default=8, help="number of slots in the first table")
    parser.add_argument(
        "--generations", type=int, default=32, help="completions per prompt in the second table"
    )
    parser.add_argument(
        "--limit", type=int, default=1024, help="tokens per completion in the second table"
    )
    parser.add_argument(
        "--table", choices=["1", "2", "both"], default="both", help="which table to print"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = results.parse(parser, arguments)
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.table != "2":
            by_group_size(folder, options.slots)
        if options.table != "1":
            by_slots(folder, options.generations, options.limit)


if __name__ == "__main__":
    main()
