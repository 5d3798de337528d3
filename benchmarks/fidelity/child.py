"""One run, in a process of its own: the name of its row, a seed and the folder for its traces."""

import sys
from pathlib import Path

import torch
from lightning import seed_everything

from benchmarks.fidelity.rows import LIMIT, ROWS, SCALE, Row
from benchmarks.ours import make_trainer
from benchmarks.papers.child import PROMPTS as ALL
from benchmarks.papers.child import TASK, GivenLengths, drafts_end_at, read_lengths
from benchmarks.papers.rows import MODEL, alike, distinct
from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import RolloutLogger
from lit_rlsched.data.tasks import ReasoningGym
from lit_rlsched.engines import ProcessEngine
from lit_rlsched.processes import keep_heap


def run(row: Row, seed: int, folder: Path) -> None:
    """Train some rounds; the folder gets their traces."""
    keep_heap()
    drafts_end_at(read_lengths(SCALE))
    torch.set_num_threads(1)
    seed_everything(seed, verbose=False)
    data = RolloutDataModule(
        ReasoningGym(TASK, "train", ALL).rows(),
        [distinct if row.trains else alike],
        engine=ProcessEngine(GivenLengths(SCALE)),
        num_engines=row.engines,
        prompts_per_round=row.prompts,
        num_generations=row.generations,
        max_completion_length=LIMIT,
        micro_batch_tokens=2048,
        seed=seed,
    )
    trainer = make_trainer(
        folder,
        max_epochs=row.rounds,
        limit_val_batches=0,
        callbacks=[*row.callbacks(), RolloutLogger(num_completions=0, report_every_n_rounds=99)],
    )
    trainer.fit(GRPOModule(MODEL, learning_rate=1e-6), datamodule=data)


if __name__ == "__main__":
    name, seed, folder = sys.argv[1:]
    run(ROWS[name], int(seed), Path(folder))
