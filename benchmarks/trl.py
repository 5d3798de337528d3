r"""Train the same model with TRL and with this package in turn, and print both sides' figures.

A real chat model, made by `make real-model`, with vLLM on both sides:
python -m benchmarks run trl --model runs/smollm2 --task arithmetic --trl_backend vllm --rounds 2 \
    --prompts 4 --limit 192 --trl_batch_size 4 --learning_rate 1e-6 --train_size 150 \
    --held_out 0
"""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from benchmarks import results
from benchmarks.common import Setting, run_module
from benchmarks.report import figures, report

SIDES = ("trl", "ours")
MODULES = {"trl": "theirs", "ours": "ours", "evaluate": "evaluate"}


def parse(args: Sequence[str] | None) -> tuple[Setting, int]:
    """Read the command line: the setting, and runs per side."""
    parser = ArgumentParser("python -m benchmarks run trl", description=__doc__)
    parser.add_class_arguments(Setting, fail_untyped=False)
    parser.add_argument("--repeats", type=int, default=3, help="runs per side; seeds count up")
    given = vars(results.parse(parser, args))
    repeats = given.pop("repeats")
    setting = Setting(**given)
    if setting.completions % setting.trl_batch_size:
        parser.error(
            f"--trl_batch_size={setting.trl_batch_size} must divide the {setting.completions} "
            "completions of a round."
        )
    if not Path(setting.model).is_dir():
        parser.error(f"--model={setting.model}: no such folder. Run it in the repository's root.")
    return setting, repeats


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
    setting, repeats = parse(args)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")}
    result = measure(setting, repeats)
    for side, of_side in result["runs"].items():
        results.check_rewards_differ([e for one in of_side for e in one["equal"]], side)
    result |= {"setting": asdict(setting), "versions": versions, "load": os.getloadavg()}
    print(report(result))
    for side, runs in result["runs"].items():
        for one in runs:
            results.add(f"{side}, seed {one['seed']}", figures(one))


if __name__ == "__main__":
    main()
