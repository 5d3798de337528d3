"""The quick task as a run in this process, for benchmarks that look into it."""

from typing import Any

from lightning import LightningModule, Trainer, seed_everything

from benchmarks.common import Setting
from lit_rlsched import RolloutDataModule
from lit_rlsched.data.tasks import Countdown
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.rewards.functions import countdown_reward


def fit_quick_task(module: LightningModule, callbacks: list[Any], seed: int, rounds: int) -> None:
    """Train on the quick task with vLLM in this process, without validation and loggers."""
    setting = Setting("")
    seed_everything(seed, verbose=False)
    data = RolloutDataModule(
        Countdown("train", size=setting.train_size),
        [countdown_reward],
        engine=VLLMEngine(),
        prompts_per_round=setting.prompts,
        num_generations=setting.generations,
        max_completion_length=setting.limit,
        micro_batch_tokens=setting.micro_batch_tokens,
        seed=seed,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )
    trainer.fit(module, datamodule=data)
