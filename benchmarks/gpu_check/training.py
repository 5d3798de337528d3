"""A short run of the Trainer, and what it has logged."""

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
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.types import Group

LOGP_MEAN = "sampling/sampling_logp_difference/mean"
SPARED = 2 << 30
"""Bytes that `Hoard` leaves to others."""
LOGP_MAX = "sampling/sampling_logp_difference/max"


class Rounds(RolloutCallback):
    """Figures, seconds and peak memory of each round."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []
        self._marks: dict[str, float] = {}

    def on_round_start(
        self, trainer: Trainer, pl_module: LightningModule, plan: list[Group]
    ) -> None:
        """The rollout begins."""
        self._marks["start"] = now()

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Any) -> None:
        """The update begins."""
        self._marks["drawn"] = now()
        tokens = sum(len(c.token_ids) for c in round.completions)
        self._marks["tokens"] = tokens
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The round is over."""
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        marks, end = self._marks, now()
        logged["seconds/rollout"] = marks["drawn"] - marks["start"]
        logged["seconds/update"] = end - marks["drawn"]
        logged["tokens/s"] = marks["tokens"] / logged["seconds/rollout"]
        if torch.cuda.is_available():
            logged["peak"] = torch.cuda.max_memory_allocated()
        self.figures.append(logged)

    def column(self, name: str) -> list[float]:
        """A figure in each round; NaN where it was not logged."""
        return [figures.get(name, float("nan")) for figures in self.figures]


class Hoard(RolloutCallback):
    """Leaves nearly all memory in torch's allocator after each update, freed and not given back.

    A large update does so too; the engine's next wake has to get it all the same.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The engine is asleep."""
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            torch.empty(max(0, free - SPARED), dtype=torch.uint8, device="cuda")


class CountedVLLM(VLLMEngine):
    """Knows how much memory of torch's allocator is its own, awake or asleep."""

    bytes = 0

    def start(self, spec: EngineSpec) -> None:
        """As ever."""
        before = allocated()
        super().start(spec)
        self.bytes = allocated() - before


@dataclass
class Fitted:
    """A run that is over."""

    trainer: Trainer
    module: GRPOModule
    data: RolloutDataModule
    rounds: Rounds


def now() -> float:
    """Seconds, once the GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated() -> int:
    """Bytes of torch's allocator on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def rows(count: int, words: int = 8) -> list[dict[str, Any]]:
    """Prompts of about so many words that differ from the first on."""
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
    """A Trainer, a module and a data module; nothing is loaded yet.

    Args:
        setting: Where it is to run.
        model: Folder or hub name.
        accelerator: In place of the setting's.
        rounds: To train.
        precision: The Trainer's.
        engine: In place of vLLM's defaults.
        callbacks: Besides ours.
        module: Arguments of `GRPOModule`.
        words: Of each prompt.
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
    """Train; see `prepare`."""
    rounds = Rounds()
    settings["callbacks"] = [*settings.get("callbacks", ()), rounds]
    trainer, module, data = prepare(setting, model, **settings)
    trainer.fit(module, datamodule=data)
    return Fitted(trainer, module, data, rounds)


def judge_rounds(found: Findings, rounds: Rounds, expected: int, mean_gap: float) -> None:
    """All rounds over, every weight sync right, every loss finite.

    Args:
        found: What is judged goes there.
        rounds: Of the run.
        expected: How many there must be.
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
    """The largest; NaN where one is, or where there are none."""
    return float(torch.tensor(values or [float("nan")]).max())
