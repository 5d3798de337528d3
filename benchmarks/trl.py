"""Train the quick task with TRL and with us, run by run in turn, and print both side by side."""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.common import ENVIRONMENT, Setting
from benchmarks.report import figures, report

SIDES = ("trl", "ours")
MODULES = {"trl": "theirs", "ours": "ours", "evaluate": "evaluate"}


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = results.parser("trl", __doc__)
    parser.add_argument("--rounds", type=int, default=20, help="optimizer steps of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; each has a seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; then one more each")
    parser.add_argument("--trl-backend", choices=["hf", "vllm"], default="hf")
    parser.add_argument(
        "--trl-batch-size", type=int, default=32, help="TRL's `per_device_train_batch_size`"
    )
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm", help="ours")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096, help="ours")
    parser.add_argument("--model", default="examples/countdown/model", help="folder to start from")
    parser.add_argument("--prompts", type=int, default=32, help="of a round")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--limit", type=int, default=512, help="most tokens of a completion")
    parser.add_argument("--train-size", type=int, default=4000, help="training prompts")
    parser.add_argument(
        "--held-out", type=int, default=128, help="held-out prompts; 0 skips the evaluation"
    )
    parser.add_argument("--out", type=Path, help="JSON file for every raw figure")
    options = results.parse(parser, args)
    if options.prompts * options.generations % options.trl_batch_size:
        parser.error(
            f"--trl-batch-size={options.trl_batch_size} must divide the "
            f"{options.prompts * options.generations} completions of a round."
        )
    if not Path(options.model).is_dir():
        parser.error(f"--model={options.model}: no such folder. Run it in the repository's root.")
    return options


def check_trl() -> str:
    """TRL's version.

    Raises:
        SystemExit: it is not installed.
    """
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "The benchmark trains with TRL too, which is not installed: "
            "pip install 'lit-rlsched[dev]'"
        ) from None


def run(role: str, setting: Setting, folder: Path) -> Any:
    """Run one side, or the evaluation, in a process of its own.

    Raises:
        RuntimeError: it failed; the message has the end of what it printed.
    """
    folder.mkdir()
    command = [sys.executable, "-m", f"benchmarks.{MODULES[role]}"]
    done = subprocess.run(
        [*command, json.dumps(asdict(setting)), str(folder)],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"`{role}` failed with exit code {done.returncode}:\n{done.stdout[-4000:]}"
        )
    return json.loads((folder / "result.json").read_text())


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    """Run the sides in turn, then evaluate what they trained."""
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
    """Run the command line; `args` stands in for it in tests."""
    options = vars(parse(args))
    repeats, out = options.pop("repeats"), options.pop("out")
    versions = {"trl": check_trl()}
    versions |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    setting = Setting(**options)
    result = measure(setting, repeats)
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
