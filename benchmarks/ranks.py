"""What several trainer processes cost beside one: CPU seconds and messages of each, seconds.

    OMP_NUM_THREADS=1 python -m benchmarks run ranks --rounds 6

Each case is a whole run of the quick task with vLLM in a process of its own. The first round is
left out. CPU seconds are those of the trainer's processes alone, so the difference to one process
is what the messages cost, the gradients' all-reduce included. The cases run one after the other.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch import Callback

from benchmarks import results

CASES = {"1": (1, "auto"), "2 ddp": (2, "ddp"), "2 fsdp2": (2, "fsdp2")}


class Meter(Callback):
    """Writes what each process has used from the second round on."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._began: tuple[float, float, int] | None = None
        self._update = 0.0

    @staticmethod
    def _now(trainer: Trainer) -> tuple[float, float, int]:
        team = trainer.datamodule.run.team  # type: ignore[attr-defined]
        return time.perf_counter(), time.process_time(), getattr(team, "messages", 0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin after the first round; write after each other."""
        if self._began is None:
            self._began = self._now(trainer)
            return
        used = [now - then for now, then in zip(self._now(trainer), self._began, strict=True)]
        path = Path(self.folder, f"{trainer.global_rank}.json")
        path.write_text(json.dumps([*used, trainer.current_epoch]))


def measure(ranks: int, strategy: str, rounds: int) -> dict[str, float]:
    """Run the quick task; return figures per round."""
    with TemporaryDirectory() as folder:
        trainer: dict[str, Any] = {
            "devices": ranks,
            "strategy": strategy,
            "max_epochs": rounds,
            "logger": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "default_root_dir": f"{folder}/run",
            "callbacks": [
                {"class_path": "benchmarks.ranks.Meter", "init_args": {"folder": folder}}
            ],
        }
        engine = {"class_path": "ProcessEngine", "init_args": {"engine": "VLLMEngine"}}
        overlay = Path(folder, "overlay.yaml")
        overlay.write_text(json.dumps({"trainer": trainer, "data": {"engine": engine}}))
        command = [sys.executable, "-m", "lit_rlsched", "fit", "-c", "configs/quickstart.yaml"]
        subprocess.run([*command, "-c", str(overlay)], check=True, stdout=sys.stderr)
        found = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))]
        number = found[0][-1]
        return {
            "seconds": found[0][0] / number,
            "cpu_seconds_rank_0": found[0][1] / number,
            "cpu_seconds_all": sum(one[1] for one in found) / number,
            "messages": found[0][2] / number,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = results.parser("ranks", __doc__)
    parser.add_argument("--rounds", type=int, default=6, help="rounds, the first one included")
    results.add_cases(parser, CASES)
    args = results.parse(parser, arguments)
    print("| ranks | seconds a round | CPU s of rank 0 | CPU s of all ranks | messages |")
    print("|---|---|---|---|---|")
    for case in args.cases:
        figures = measure(*CASES[case], args.rounds)
        results.add(case, figures)
        cells = " | ".join(f"{value:.2f}" for value in figures.values())
        print(f"| {case} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
