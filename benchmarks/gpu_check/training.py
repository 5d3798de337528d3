"""A short run of the Trainer and its logged metrics."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule, Trainer

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.setting import Setting
from benchmarks.ledger import spread
from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import RolloutCallback
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.types import Group

LOGP_MEAN = "sampling/sampling_logp_difference/mean"
SPARED = 2 << 30
"""Bytes that `Hoard` leaves free."""
LOGP_MAX = "sampling/sampling_logp_difference/max"


class Rounds(RolloutCallback):
    """Record metrics, seconds and peak memory of each round."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []
        self._marks: dict[str, float] = {}

    def on_round_start(
        self, trainer: Trainer, pl_module: LightningModule, plan: list[Group]
    ) -> None:
        """Start the clock of the rollout."""
        self._marks["start"] = now()

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Any) -> None:
        """Start the clock of the update."""
        self._marks["drawn"] = now()
        tokens = sum(len(c.token_ids) for c in round.completions)
        self._marks["tokens"] = tokens
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the round."""
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        marks, end = self._marks, now()
        logged["seconds/rollout"] = marks["drawn"] - marks["start"]
        logged["seconds/update"] = end - marks["drawn"]
        logged["tokens/s"] = marks["tokens"] / logged["seconds/rollout"]
        if torch.cuda.is_available():
            logged["peak"] = torch.cuda.max_memory_allocated()
        self.figures.append(logged)

    def column(self, name: str) -> list[float]:
        """Return a metric of each round; NaN if it was not logged."""
        return [figures.get(name, float("nan")) for figures in self.figures]


class Hoard(RolloutCallback):
    """Leave nearly all memory in torch's allocator after each update, freed but not released.

    A large update does this, too, and the engine has to wake all the same.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Allocate and free while the engine sleeps."""
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            torch.empty(max(0, free - SPARED), dtype=torch.uint8, device="cuda")


class CountedVLLM(VLLMEngine):
    """Measure the engine's memory in torch's allocator, awake and asleep."""

    bytes = 0

    def start(self, spec: EngineSpec) -> None:
        """Measure around the call."""
        before = allocated()
        super().start(spec)
        self.bytes = allocated() - before


@dataclass
class Fitted:
    """Result of a run."""

    trainer: Trainer
    module: GRPOModule
    data: RolloutDataModule
    rounds: Rounds


def now() -> float:
    """Return the time after the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated() -> int:
    """Return the bytes of torch's allocator on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def rows(count: int, words: int = 8) -> list[dict[str, Any]]:
    """Return prompts of about this many words, which all differ from the first word on."""
    texts = (f"{i} " + " ".join(str((i * 7 + j) % 97) for j in range(words)) for i in range(count))
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def prepare(
    setting: Setting,
    model: str,
    *,
    accelerator: str | None = None,
    rounds: int = 2,
    precision: str = "32-true",
    engine: Any = None,
    callbacks: Iterable[Any] = (),
    module: dict[str, Any] | None = None,
    words: int = 8,
    **data: Any,
) -> tuple[Trainer, GRPOModule, RolloutDataModule]:
    """Make a Trainer, a module and a data module without loading anything.

    Args:
        setting: Where the run takes place.
        model: Folder or hub name.
        accelerator: Accelerator in place of the setting's.
        rounds: Rounds to train.
        precision: Precision of the Trainer.
        engine: Engine in place of a default `VLLMEngine`.
        callbacks: Additional callbacks.
        module: Arguments of `GRPOModule`.
        words: Words per prompt.
        **data: Arguments of `RolloutDataModule`.
    """
    trainer = Trainer(
        accelerator=accelerator or setting.pick("gpu", "cpu"),
        devices=1,
        max_epochs=rounds,
        precision=precision,  # type: ignore[arg-type]
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=setting.folder,
        callbacks=[*callbacks],
    )
    settings: dict[str, Any] = {
        "train_data": rows(64, words),
        "reward_funcs": [spread],
        "engine": VLLMEngine() if engine is None else engine,
        "prompts_per_round": 4,
        "num_generations": 4,
        "max_completion_length": 32,
        "micro_batch_tokens": 2048,
        "seed": 0,
    }
    ours = GRPOModule(model, **{"learning_rate": 1e-5, **(module or {})})
    return trainer, ours, RolloutDataModule(**{**settings, **data})


def fit(setting: Setting, model: str, **settings: Any) -> Fitted:
    """Train with the arguments of `prepare`."""
    rounds = Rounds()
    settings["callbacks"] = [*settings.get("callbacks", ()), rounds]
    trainer, module, data = prepare(setting, model, **settings)
    trainer.fit(module, datamodule=data)
    return Fitted(trainer, module, data, rounds)


def judge_rounds(found: Findings, rounds: Rounds, expected: int, mean_gap: float) -> None:
    """Check that all rounds ran, every weight sync is right and every loss is finite.

    Args:
        found: Findings of the check.
        rounds: Rounds of the run.
        expected: Expected number of rounds.
        mean_gap: Largest mean difference of engine's and trainer's log-probs in any round.
    """
    found.equal("rounds", len(rounds.figures), expected, "The run ended early. Report the log.")
    losses = rounds.column("loss")
    finite = all(map(torch.isfinite, map(torch.tensor, losses)))
    found.equal("every loss is finite", bool(losses) and finite, True, "Report this page.")
    found.at_most(
        "mean log-prob gap of what was drawn, in the worst round",
        worst(rounds.column(LOGP_MEAN)),
        mean_gap,
        "nats",
        "The engine's distribution is not the trainer's. Report this page.",
    )
    found.record("largest log-prob gap of a token", worst(rounds.column(LOGP_MAX)), "nats")
    found.record(
        "largest gap of the probe after a sync", worst(rounds.column("sync/max_logp_diff"))
    )


def worst(values: Sequence[float]) -> float:
    """Return the largest value; NaN if one is NaN or if there is none."""
    return float(torch.tensor(values or [float("nan")]).max())
