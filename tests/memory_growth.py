"""Resident memory of a run on vLLM, round by round: `memory_growth.py partial` or `... drafts`.

Requests go on from what earlier rounds drew, with other numbers of tokens in every step. The model
is the tests' tiny one. A line for each round: its number, MB of the trainer, MB of the engine's
process (0 where it is in the trainer's). The last line has the slopes from round 200 on.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import psutil
from conftest import make_model
from lightning import Trainer, seed_everything

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import (
    MicroGroupSampling,
    RolloutCallback,
    SortedBatching,
    TailBatching,
)
from lit_rlsched.engines import ProcessEngine, VLLMEngine

SCHEDULES = {
    "partial": (VLLMEngine, [SortedBatching(3, mode="partial"), MicroGroupSampling(slots=7)]),
    "drafts": (ProcessEngine, [TailBatching(1.5, max_deferrals=8)]),
}


def digits(prompts, completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


class Resident(RolloutCallback):
    """Writes down what is resident after each round."""

    def __init__(self):
        self.megabytes = []

    def on_train_epoch_end(self, trainer, pl_module):
        pids = [None, getattr(trainer.datamodule.run.settings.engine, "pid", 0)]
        held = [0 if pid == 0 else psutil.Process(pid).memory_info().rss / 2**20 for pid in pids]
        self.megabytes.append(held)
        print(trainer.current_epoch, *(f"{h:.2f}" for h in held), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", choices=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    seed_everything(0)
    engine, callbacks = SCHEDULES[options.schedule]
    resident = Resident()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=options.rounds,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            callbacks=[*callbacks, resident],
        )
        data = RolloutDataModule(
            [{"prompt": f"{a}+{b}="} for a in range(30) for b in range(30)],
            [digits],
            engine=engine(),
            prompts_per_round=3,
            num_generations=3,
            max_completion_length=64,
            micro_batch_tokens=512,
        )
        module = GRPOModule(make_model(Path(folder) / "model", tied=True), learning_rate=1e-5)
        trainer.fit(module, datamodule=data)
    late = np.array(resident.megabytes[200:])
    if len(late) > 1:
        print("MB a round from 200 on:", *np.polyfit(range(len(late)), late, 1)[0].round(4))


if __name__ == "__main__":
    main()
