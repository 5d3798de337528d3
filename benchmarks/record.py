"""Record what the quick task draws while it learns, to replay it under other schedules.

python -m benchmarks run record --out runs/recording
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from lightning import LightningModule, Trainer
from transformers import AutoTokenizer

from benchmarks import results
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.policy import find_policy
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group, Prompt, Sampling


class Recorder(RolloutCallback):
    """Keeps every completion of training; writes them, and the trained policy, when it ends.

    Args:
        folder: Gets `completions.parquet`, one row a completion, and `model/`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.rows: list[dict[str, Any]] = []

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Take the round down."""
        for row in round.samples:
            prompt, completion = row.group.prompt, row.completion
            self.rows.append(
                {
                    "round": round.number,
                    "group": row.group.id,
                    "uid": prompt.uid,
                    "prompt": str(prompt.text),
                    "prompt_ids": list(prompt.token_ids),
                    "index": completion.index,
                    "token_ids": completion.token_ids,
                    "logprobs": completion.logprobs,
                    "finish_reason": completion.finish_reason,
                    "limit": row.group.sampling.max_completion_length,
                }
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(self.rows), self.folder / "completions.parquet")
        policy: Any = find_policy(pl_module)
        AutoTokenizer.from_pretrained(policy.name_or_path).save_pretrained(self.folder / "model")
        policy.save_pretrained(self.folder / "model")


def read_recording(folder: str | Path) -> list[list[Group]]:
    """The rounds of a recording, each with its groups; completions are as they were drawn."""
    path = Path(folder) / "completions.parquet"
    rounds: dict[int, dict[str, Group]] = {}
    for row in pq.read_table(path).to_pylist():
        groups = rounds.setdefault(row["round"], {})
        if row["group"] not in groups:
            prompt = Prompt(row["uid"], row["prompt"], tuple(row["prompt_ids"]))
            groups[row["group"]] = Group(row["group"], prompt, Sampling(row["limit"]), [])
        groups[row["group"]].completions.append(
            Completion(
                row["index"],
                row["token_ids"],
                row["logprobs"],
                finish_reason=row["finish_reason"],
            )
        )
    return [list(groups.values()) for _, groups in sorted(rounds.items())]


def record(folder: str | Path, *arguments: str) -> None:
    """Run the quick task and record it to `folder`; more arguments go to its command."""
    callback = [
        "--trainer.callbacks+=benchmarks.record.Recorder",
        f"--trainer.callbacks.folder={folder}",
    ]
    command = [sys.executable, "-m", "lit_rlsched", "fit", "-c", "configs/quickstart.yaml"]
    with tempfile.TemporaryDirectory() as scratch:
        quiet = [f"--trainer.default_root_dir={scratch}", "--trainer.logger=false"]
        subprocess.run(
            [*command, *callback, *quiet, "--data.val_data=null", *arguments], check=True
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Record; what is not known here goes to the quick task's command."""
    parser = results.parser("record", __doc__)
    parser.add_argument("--out", default="runs/recording", help="folder to write")
    options, more = parser.parse_known_args(arguments)
    record(options.out, *more)


if __name__ == "__main__":
    main()
