"""Traces of made-up runs, as `RolloutLogger` writes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lit_rlsched.run.saving.traces import rounds_schema
from lit_rlsched.scheduling.trace_files import TraceWriter

ABOUT = {
    "model": "model",
    "advantage": "group",
    "engine": "VLLMEngine",
    "engines": 1,
    "ranks": 1,
    "prompts_per_round": 4,
    "num_generations": 4,
    "steps_per_round": 1,
    "num_iterations": 1,
    "max_completion_length": 64,
    "reward_workers": 1,
    "reward_funcs": ["right"],
}


def write_run(
    folder: Path,
    rounds: int,
    prompts: int = 4,
    generations: int = 4,
    texts: int = 4,
    text: str = "an answer",
    random_text: int = 0,
    letters: tuple[int, int] = (32, 127),
    reward: float | None = None,
    clock: bool = True,
    seed: int = 0,
    **about: Any,
) -> Path:
    """Write traces and `completions.jsonl` of a run.

    Each round decodes its completions one after the other in as many slots as there are prompts.
    The trainer works for a second after each rollout.

    Args:
        folder: Folder of the run.
        rounds: Rounds.
        prompts: Prompts of a round.
        generations: Completions of a prompt.
        texts: Rows of each round in `completions.jsonl`.
        text: How completions begin.
        random_text: Random characters at their end.
        letters: First character of those, and the one after the last.
        reward: Reward of all completions; by default 0 or 1.
        clock: Whether the engines' clock is that of the run.
        seed: Seed of lengths, rewards and texts.
        **about: What else holds for all rounds.
    """
    rng = np.random.default_rng(seed)
    sizes = {"prompts_per_round": prompts, "num_generations": generations}
    writer = TraceWriter(folder / "traces")
    writer.begin(1, {**ABOUT, **sizes, **about})
    tables: dict[str, list[dict[str, Any]]] = {"completions": [], "spans": [], "intervals": []}
    of_rounds = []
    now = 0.0
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as file:
        for number in range(1, rounds + 1):
            began, end = now, 0.0
            for prompt in range(prompts):
                name, at = f"p{number}.{prompt}@0", 0.0
                for index in range(generations):
                    length = int(rng.integers(1, 65))
                    score = float(rng.integers(2)) if reward is None else reward
                    request = f"{name}/{index}"
                    tables["completions"].append(
                        {
                            **{"round": number, "request": request, "uid": f"p{number}.{prompt}"},
                            **{"prompt_tokens": 9, "tokens": length, "drawn": length},
                            **{"version": number - 1, "reward": score, "advantage": score - 0.5},
                            **{"reward_seconds": 1e-3, "waited": 0, "deferred": 0, "attempts": 0},
                            **{"fate": "length" if length == 64 else "stop"},
                            "text": int(rng.integers(9)),
                        }
                    )
                    tables["spans"].append(
                        {
                            **{"round": number, "request": request, "slot": prompt},
                            **{"start": at, "end": at + 0.01 * length},
                            **{"start_step": 0, "end_step": length, "tokens": length},
                        }
                    )
                    at += 0.01 * length
                    if prompt * generations + index < texts:
                        row = {"step": number - 1, "prompt": f"question {number}.{prompt}"}
                        more = "".join(map(chr, rng.integers(*letters, random_text)))
                        completion = f"{text} {rng.integers(1 << 30)} {more}"
                        row |= {"completion": completion, "right": score}
                        row |= {"advantage": score - 0.5, "completion_length": length}
                        row |= {"finish_reason": "stop", "round": number}
                        file.write(json.dumps(row) + "\n")
                end = max(end, at)
            for lane, what, start, stop, whom in (
                ("engine 0", "decode", 0.0, end, None),
                ("engine 0", "wait", end, end + 1, "trainer"),
                ("trainer", "wait", 0.0, end, "engines"),
                ("trainer", "update", end, end + 1, None),
            ):
                span = {"start": began + start, "end": began + stop}
                row = {"round": number, "lane": lane, "what": what, **span, "waits_for": whom}
                tables["intervals"].append(row)
            now += end + 1
            metrics = [("reward", 0.5), ("rollout/bubble_ratio", 0.25)]
            of_rounds.append(
                {
                    **{
                        "version": number - 1,
                        "clock": now,
                        "began": began if clock else None,
                        "slots": prompts,
                    },
                    **{"switches": [], "metrics": metrics},
                }
            )
    rows = pa.Table.from_pylist(of_rounds, rounds_schema())
    numbers = pa.array(range(1, rounds + 1), pa.int64())
    whole = {name: pa.Table.from_pylist(of) for name, of in tables.items()}
    for name, table in {**whole, "rounds": rows.add_column(0, "round", numbers)}.items():
        writer.write(name, 1, rounds, table)
    return folder
