"""Our side of the comparison: the run of `configs/quickstart.yaml` without loggers."""

from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer, seed_everything

from benchmarks import common
from lit_rlsched import callbacks
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.module import GRPOModule
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.types import Group


class Measure(RolloutCallback):
    """Read clock and counters at the end of each rollout and of each update."""

    def __init__(self, meter: common.Meter, setting: common.Setting, folder: Path) -> None:
        self.meter, self.setting, self.folder = meter, setting, folder

    def on_round_start(
        self, trainer: Trainer, pl_module: LightningModule, plan: list[Group]
    ) -> None:
        """Start the clock in the first round."""
        self.meter.start()

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Record the rollout."""
        self.meter.lap("rollout")
        assert round.trace is not None
        counts, lengths = self.meter.counts, [len(c.token_ids) for c in round.completions]
        counts.completions += len(lengths)
        counts.tokens += round.trace.tokens
        counts.decode_steps += round.trace.decode_steps
        counts.decode_rows += round.trace.busy_slot_steps
        self.meter.rewards.append(round.metrics["reward"])
        self.meter.equal.append(round.metrics["frac_reward_zero_std"])
        self.meter.lengths.append(sum(lengths) / len(lengths))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: OptimizerStep,
        batch_idx: int,
    ) -> None:
        """Record the update."""
        counts = self.meter.counts
        counts.skipped += batch.totals.sequences - sum(map(len, batch.micro_batches))
        padding = batch.padding()
        counts.positions += padding.positions
        counts.padding += padding.padding
        for rows in batch.micro_batches:
            lengths = [len(r.completion.token_ids) for r in rows]
            counts.updates += 1
            counts.completion_positions += len(rows) * max(lengths)
            counts.completion_padding += len(rows) * max(lengths) - sum(lengths)
        self.meter.lap("update")
        common.save(pl_module.model, self.folder, self.setting, len(self.meter.lengths))


def make_engine(name: str) -> RolloutEngine:
    """Return the engine named `vllm` or `transformers`."""
    return VLLMEngine() if name == "vllm" else TransformersEngine()


def make_trainer(folder: Path, **kwargs: Any) -> Trainer:
    """Return a Trainer without loggers, checkpoints and progress bar."""
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **kwargs,
    )


def train(setting: common.Setting, folder: Path) -> dict[str, Any]:
    """Train, save the weights and return the figures."""
    seed_everything(setting.seed, verbose=False)
    module = GRPOModule(
        setting.model,
        learning_rate=setting.learning_rate,
        betas=common.BETAS,
        warmup_steps=common.WARMUP_STEPS,
        gradient_clip_val=common.CLIP,
    )
    engine = make_engine(setting.engine)
    data = RolloutDataModule(
        common.training_rows(setting),
        [common.TASKS[setting.task].reward],
        engine=ProcessEngine(engine) if setting.own_process else engine,
        prompts_per_round=setting.prompts,
        num_generations=setting.generations,
        micro_batch_tokens=setting.micro_batch_tokens,
        max_completion_length=setting.limit,
        mask_truncated_completions=setting.mask_truncated,
        temperature=common.TEMPERATURE,
        seed=setting.seed,
    )
    meter = common.Meter()
    measure = Measure(meter, setting, folder)
    schedule = [getattr(callbacks, name)(**given) for name, given in setting.callbacks.items()]
    trainer = make_trainer(folder, max_epochs=setting.rounds, callbacks=[*schedule, measure])
    trainer.fit(module, datamodule=data)
    return meter.result()


if __name__ == "__main__":
    common.run_side(train)
