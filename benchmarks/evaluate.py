"""Held-out accuracy of saved weights, measured in the same way for both sides."""

import shutil
from pathlib import Path
from typing import Any

from lightning import seed_everything

from benchmarks import common
from benchmarks.ours import make_engine, make_trainer
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.module import GRPOModule

SAMPLES = 4


def accuracy(model: str, setting: common.Setting, folder: Path) -> dict[str, float]:
    """Return the metrics `val/*` of these weights; the seeds are the same for all weights."""
    seed_everything(0, verbose=False)
    task = common.TASKS[setting.task]
    data = RolloutDataModule(
        task.rows("train", setting.prompts),  # required, but not used here
        [task.reward],
        val_data=task.rows("heldout", setting.held_out),
        tokenizer=setting.model,
        engine=make_engine(setting.engine),
        prompts_per_round=setting.prompts,
        num_generations=setting.generations,
        max_completion_length=setting.limit,
        temperature=common.TEMPERATURE,
        val_num_generations=SAMPLES,
        val_greedy=False,
        seed=0,
    )
    [figures] = make_trainer(folder).validate(GRPOModule(model), datamodule=data, verbose=False)
    return dict(figures)


def evaluate(setting: common.Setting, folder: Path) -> dict[str, Any]:
    """Evaluate each trained model beside `folder` and their initial model."""
    found = {"start": setting.model}
    found |= {p.parent.name: str(p) for p in sorted(folder.parent.glob("*/model"))}
    results = {}
    for name, model in found.items():
        results[name] = accuracy(model, setting, folder)
        if model != setting.model:
            shutil.rmtree(model)
    return results


if __name__ == "__main__":
    common.run_side(evaluate)
