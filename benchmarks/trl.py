r"""Train the same model with TRL and with this package in turn, and print both sides' figures.

A real chat model, made by `make real-model`, with vLLM on both sides:
python -m benchmarks run trl --model runs/smollm2 --task sums --trl-backend vllm --rounds 2 \
    --prompts 4 --limit 192 --trl-batch-size 4 --learning-rate 1e-6 --train-size 150 \
    --held-out 0
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.common import TASKS, Setting, run_module
from benchmarks.report import figures, report

SIDES = ("trl", "ours")
MODULES = {"trl": "theirs", "ours": "ours", "evaluate": "evaluate"}


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = results.parser("trl", __doc__)
    parser.add_argument("--rounds", type=int, default=20, help="optimizer steps per run")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs per side; each has its own seed"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first run; later runs count up from it"
    )
    parser.add_argument(
        "--trl-backend",
        choices=["hf", "vllm"],
        default="hf",
        help="TRL's engine: transformers or vLLM",
    )
    parser.add_argument(
        "--trl-batch-size", type=int, default=32, help="TRL's `per_device_train_batch_size`"
    )
    parser.add_argument(
        "--engine", choices=["vllm", "transformers"], default="vllm", help="our engine"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=4096, help="our micro-batches, in positions"
    )
    parser.add_argument(
        "--model", default="examples/countdown/model", help="folder of the initial model"
    )
    parser.add_argument("--task", choices=TASKS, default="countdown", help="what to train on")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of AdamW")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per round")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt")
    parser.add_argument(
        "--limit", type=int, default=512, help="maximum number of tokens per completion"
    )
    parser.add_argument("--train-size", type=int, default=4000, help="number of training prompts")
    parser.add_argument(
        "--held-out",
        type=int,
        default=128,
        help="number of held-out prompts; 0 skips the evaluation",
    )
    parser.add_argument("--out", type=Path, help="JSON file for all raw figures")
    options = results.parse(parser, args)
    if options.prompts * options.generations % options.trl_batch_size:
        parser.error(
            f"--trl-batch-size={options.trl_batch_size} must divide the "
            f"{options.prompts * options.generations} completions of a round."
        )
    if not Path(options.model).is_dir():
        parser.error(f"--model={options.model}: no such folder. Run it in the repository's root.")
    return options


def run(role: str, setting: Setting, folder: Path) -> Any:
    """Run one side, or the evaluation, in a new process.

    Raises:
        RuntimeError: the process failed. The message has the end of its output.
    """
    folder.mkdir()
    run_module(MODULES[role], json.dumps(asdict(setting)), str(folder), name=role)
    return json.loads((folder / "result.json").read_text())


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    """Run both sides in turn, then evaluate what they trained."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="lit-rlsched-benchmark-") as name:
        folder = Path(name)
        for repeat in range(repeats):
            for side in SIDES:
                seed = setting.seed + repeat
                print(f"{side}, seed {seed} ...", file=sys.stderr, flush=True)
                result = run(side, replace(setting, seed=seed), folder / f"{side}-{repeat}")
                runs[side].append({"seed": seed, **result})
        judged = run("evaluate", setting, folder / "judge") if setting.held_out else {}
    for side in SIDES:
        for repeat, result in enumerate(runs[side]):
            result["held_out"] = judged.get(f"{side}-{repeat}", {})
    return {"runs": runs, "start": judged.get("start", {})}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, with `args` in place of `sys.argv`."""
    options = vars(parse(args))
    repeats, out = options.pop("repeats"), options.pop("out")
    versions = {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")}
    setting = Setting(**options)
    result = measure(setting, repeats)
    for side, of_side in result["runs"].items():
        results.check_rewards_differ([e for one in of_side for e in one["equal"]], side)
    result |= {"setting": asdict(setting), "versions": versions, "load": os.getloadavg()}
    print(report(result))
    for side, runs in result["runs"].items():
        for one in runs:
            results.add(f"{side}, seed {one['seed']}", figures(one))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
