"""Draw the model's own completions once: their lengths are those of all rows.

Run by `python -m benchmarks run papers --record`.
"""

import csv
from pathlib import Path

from lightning import LightningModule, Trainer, seed_everything

from benchmarks.ours import make_trainer
from benchmarks.papers.child import PROMPTS, TASK
from benchmarks.papers.rows import LENGTHS, MODEL, alike
from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import MicroGroupSampling, RolloutCallback
from lit_rlsched.data.tasks import ReasoningGym
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.processes import keep_heap
from lit_rlsched.training.round import Round

FOLDER = Path("runs/papers/recording")
GENERATIONS, LIMIT, SLOTS = 16, 1024, 64


class Lengths(RolloutCallback):
    """Writes the lengths of a round, by prompt."""

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Write the file."""
        rows: dict[str, list[int]] = {}
        for sample in round.samples:
            lengths = rows.setdefault(sample.group.prompt.uid, [])
            lengths.append(len(sample.completion.token_ids))
        with LENGTHS.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([uid, *lengths] for uid, lengths in sorted(rows.items()))


def record() -> None:
    """Draw one round of all prompts and write the lengths."""
    keep_heap()
    seed_everything(0, verbose=False)
    data = RolloutDataModule(
        ReasoningGym(TASK, "train", PROMPTS).rows(),
        [alike],
        engine=VLLMEngine(),
        prompts_per_round=PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=LIMIT,
        micro_batch_tokens=2048,
        seed=0,
    )
    callbacks = [MicroGroupSampling(slots=SLOTS), Lengths()]
    trainer = make_trainer(FOLDER, max_epochs=1, limit_val_batches=0, callbacks=callbacks)
    trainer.fit(GRPOModule(MODEL), datamodule=data)


if __name__ == "__main__":
    record()
