"""A run that kills itself where it is told to: `resumable_run.py FOLDER ENGINE MODEL PLACE`."""

import hashlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlsched import GRPOModule, RolloutDataModule, engines
from lit_rlsched.callbacks import (
    LengthPrediction,
    MicroGroupSampling,
    RNGState,
    RolloutCallback,
    RolloutLogger,
)


def digits(prompts, completions, completion_ids, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


class Die(RolloutCallback):
    """Counts what happens in this process and in those before it, and dies at the place."""

    def __init__(self, place):
        self.event, _, count = place.partition(" ")
        self.at = int(count or 0)
        self.seen = Counter()

    def _count(self, event, reached):
        self.seen[event] += 1
        if event == self.event and reached(self.at):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._count("step", lambda at: trainer.global_step == at)

    def on_completion_end(self, trainer, pl_module, completion):
        drawn = trainer.datamodule.counters["num_completions"]
        self._count("completion", lambda at: drawn + self.seen["completion"] % 16 == at)

    def on_round_end(self, trainer, pl_module, round):
        self._count("round_end", lambda at: round.number == at)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        number = trainer.global_step // 2
        self._count("validation", lambda at: number == at and batch_idx == 2)


class Uids(RolloutCallback):
    """The prompts of every round, kept in the checkpoint."""

    def __init__(self):
        self.uids = []

    def on_round_end(self, trainer, pl_module, round):
        self.uids.extend(g.id for g in round.groups)

    def state_dict(self):
        return {"uids": self.uids}

    def load_state_dict(self, state_dict):
        self.uids = state_dict["uids"]


def state_hash(state):
    """Of numbers, strings and tensors, however nested."""
    if isinstance(state, torch.Tensor):
        state = hashlib.sha256(state.numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        state = [[key, state_hash(value)] for key, value in sorted(state.items(), key=str)]
    elif isinstance(state, (list, tuple)):
        state = [state_hash(value) for value in state]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def main(folder, engine, model, place):
    folder = Path(folder)
    seed_everything(1)
    rows = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
    data = RolloutDataModule(
        rows[:30],
        [digits],
        val_data=rows[30:],
        val_num_generations=2,
        engine=getattr(engines, engine)(),
        prompts_per_round=4,
        num_generations=4,
        steps_per_round=2,
        max_completion_length=24,
        micro_batch_tokens=256,
    )
    uids, prediction = Uids(), LengthPrediction(probe_tokens=4)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=1)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=10,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            RNGState(),
            MicroGroupSampling(slots=6),
            prediction,
            RolloutLogger(num_completions=4),
            uids,
            checkpoints,
            Die(place),
        ],
    )
    module = GRPOModule(model, learning_rate=1e-3)
    trainer.fit(module, datamodule=data, ckpt_path="last")
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    rows = (folder / "completions.jsonl").read_text()
    figures = {
        "weights": hashlib.sha256(weights).hexdigest(),
        "steps": trainer.global_step,
        "rounds": data.num_rounds + 1,
        "num_completions": data.counters["num_completions"],
        "num_tokens": data.counters["num_tokens"],
        "uids": uids.uids,
        "predictor": state_hash(prediction.state_dict()),
        "completions": hashlib.sha256(rows.encode()).hexdigest(),
    }
    print("\n" + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
