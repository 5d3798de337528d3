"""Runs with tools that kill themselves at a place, and are resumed; see `runs`."""

import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from resumable_run import Rows, run
from worlds import CHATS, notes

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import AsyncRollout, MicroGroupSampling, RNGState, SortedBatching
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.turns import Turns
from lit_rlsched.run.saving.checkpoints import AtomicCheckpointIO
from lit_rlsched.training.weight_sync import WeightSync

PLACES = {
    "weights": (WeightSync, "__call__", 3),  # the engine is about to get new weights
    "turn": (Turns, "ended", 36),  # a turn has ended, nothing is called yet
    "call": (EnvironmentScheduler, "call", 12),  # a tool runs
    "reply": (Turns, "_replied", 12),  # it has answered, and the reply is not appended yet
    "reward": (EnvironmentScheduler, "reward", 20),  # the environment is asked for its reward
    "score": (Scorer, "submit", 20),  # other functions score the completion
}
"""Each with how often it comes about before the second rollout of a process has ended."""
HOW = {
    "plain": lambda: ([], {}),
    "partial": lambda: ([SortedBatching(mode="partial", pool_rounds=2)], {}),
    # a round is drawn in a thread, and replies have their step
    "beside": lambda: ([AsyncRollout()], {"tool_steps": 4, "max_sessions": 9}),
}


def die_at(place):
    """Kill this process once something has happened so many times."""
    name, _, number = place.partition(" ")
    if name not in PLACES:
        return
    owner, method, _ = PLACES[name]
    original, seen = getattr(owner, method), []

    def counted(self, *args, **kwargs):
        after = name in ("call", "reward")
        result = original(self, *args, **kwargs) if after else None
        seen.append(place)
        if len(seen) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return result if after else original(self, *args, **kwargs)

    setattr(owner, method, counted)


def main(folder, model, tokenizer, how, place):
    die_at(place)
    schedule, settings = HOW[how]()
    folder = Path(folder)
    seed_everything(1)
    module = GRPOModule(model, learning_rate=1e-3)
    data = RolloutDataModule(
        CHATS,
        engine=ProcessEngine(TransformersEngine()),
        tokenizer=tokenizer,
        environment_factory=notes(lambda key, seed: 0.01),
        prompts_per_round=4,
        num_generations=4,
        max_completion_length=96,
        micro_batch_tokens=512,
        seed=3,
        **settings,
    )
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=9,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            RNGState(),
            *schedule,
            MicroGroupSampling(slots=4),
            Rows(num_completions=99),
            ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0),
        ],
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(module, datamodule=data, ckpt_path="last")
    rows = [json.loads(row) for row in (folder / "completions.jsonl").read_text().splitlines()]
    drawn = [[row[name] for name in ("prompt", "completion", "Notes", "round")] for row in rows]
    torch.save([p.detach() for p in module.parameters()], folder / "weights.pt")
    figures = {
        "completions": hashlib.sha256(json.dumps(drawn).encode()).hexdigest(),
        "number": len(drawn),
        "calls": sum(m["role"] == "tool" for row in rows for m in row["completion"]),
        "counters": dict(data.run.counters),
    }
    print("\n" + json.dumps(figures), flush=True)


def runs(folder, model, tokenizer, how, *places):
    """A run that nothing stops, and one that is killed at each place in its turn."""
    for name, place in [("whole", "never"), *(("killed", p) for p in (*places, "never"))]:
        status = run(f"{folder}/{name}", model, tokenizer, how, place, function=main)
        assert status == (0 if place == "never" else -signal.SIGKILL), f"{place}: {status}"
        assert Path(folder, name, "last.ckpt").exists(), f"{place}: nothing to go on from"
