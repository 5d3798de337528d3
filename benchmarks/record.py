"""Record the completions of the quick task while it trains, for replays with other schedules.

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
from safetensors.torch import save_model
from transformers import AutoTokenizer

from benchmarks import results
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.training.policy import find_policy
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group, Prompt, Sampling


class Recorder(RolloutCallback):
    """Write every completion of a training run, and the trained policy.

    Args:
        folder: Folder for `completions.parquet`, with one row per completion, and for `model/`.
        policies: Also write the weights that each round was drawn with, to `policies/`.
    """

    def __init__(self, folder: str, policies: bool = False) -> None:
        self.folder = Path(folder)
        self.policies = policies
        self.rows: list[dict[str, Any]] = []

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Store the completions of the round."""
        if self.policies:
            path = policy_path(self.folder, round.number)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_model(find_policy(pl_module), str(path))
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
                    "token_ids": list(completion.token_ids),
                    "logprobs": list(completion.logprobs),
                    "finish_reason": completion.finish_reason,
                    "scores": completion.scores,
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


def policy_path(folder: str | Path, number: int) -> Path:
    """Return the file of the weights that a round was drawn with."""
    return Path(folder) / "policies" / f"{number}.safetensors"


def read_recording(folder: str | Path) -> list[list[Group]]:
    """Return the rounds of a recording as lists of groups."""
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
                scores=row.get("scores"),
            )
        )
    return [list(groups.values()) for _, groups in sorted(rounds.items())]


def record(folder: str | Path, *arguments: str) -> None:
    """Run the quick task with additional arguments and record it to `folder`."""
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
    """Record; options that are not listed here go to `lit-rlsched fit`."""
    parser = results.parser("record", __doc__)
    parser.add_argument("--out", default="runs/recording", help="folder to write to")
    options, more = parser.parse_known_args(arguments)
    record(options.out, *more)


if __name__ == "__main__":
    main()
