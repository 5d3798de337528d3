"""One row of the table, in a process of its own: its name, a seed and its folder."""

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything

from benchmarks.common import cpu_seconds
from benchmarks.ours import make_trainer
from benchmarks.papers.rows import MODEL, ROWS, Row, recorded_lengths
from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import RolloutLogger
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.data.tasks import ReasoningGym
from lit_rlsched.engines import ProcessEngine, VLLMEngine
from lit_rlsched.processes import keep_heap
from lit_rlsched.training.block_verification import Trial
from lit_rlsched.training.round import Round
from lit_rlsched.types import Event, Request

TASK, PROMPTS = "gsm_symbolic", 32
ROLLOUT = ("decode_steps", "tokens", "slot_steps", "idle_slot_steps", "peak_kv_tokens")


def read_lengths(scale: int) -> dict[tuple[str, int], int]:
    """Return each completion's length, divided by this, by the prompt's uid and its own index."""
    recorded = recorded_lengths().items()
    return {(uid, i): -(-n // scale) for uid, of in recorded for i, n in enumerate(of)}


class GivenLengths(VLLMEngine):
    """vLLM whose completions have the recorded lengths.

    Tokens are drawn as always. EOS does not end a completion, its recorded length does.

    Args:
        scale: What the recorded lengths are divided by.
    """

    def __init__(self, scale: int) -> None:
        super().__init__()
        self._lengths = read_lengths(scale)

    def start(self, spec: Any) -> None:
        self._ends: set[str] = set()
        """Requests that run to their recorded length."""
        super().start(spec)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([self._shortened(request) for request in requests])

    def _shortened(self, request: Request) -> Request:
        uid, _, rest = request.id.partition("@")
        end = self._lengths.get((uid, int(rest.rpartition("/")[2] or -1)))
        self._ends.discard(request.id)  # it may have been aborted
        if end is None or end > request.limit:
            return request  # the check of new weights; truncated, or paused before its end
        self._ends.add(request.id)
        sampling = replace(request.sampling, max_completion_length=end)
        return replace(request, sampling=sampling, pause_at=None)

    def _sampling_params(self, request: Request) -> Any:
        params = super()._sampling_params(request)
        params.stop_token_ids = []
        return params

    def step(self) -> list[Event]:
        events = super().step()
        for event in events:
            if event.finish_reason is not None and event.request_id in self._ends:
                self._ends.remove(event.request_id)
                event.finish_reason = "stop"
        return events


def drafts_end_at(lengths: Mapping[tuple[str, int], int]) -> None:
    """Let verified drafts end at these lengths too, in place of EOS."""

    def become(trial: Trial, completion: Any, version: int, _: Sequence[int]) -> None:
        drawn, group = len(completion.token_ids), trial.sample.group
        completion.segments = [(version, drawn)]
        end, limit = lengths[group.prompt.uid, completion.index], group.sampling
        if drawn >= min(end, limit.max_completion_length):
            completion.finish_reason = "stop" if drawn >= end else "length"

    Trial.become = become  # type: ignore


class Clock(RolloutCallback):
    """Seconds and counts of each round, from the end of the one before to the end of its update."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self._last = (0.0, 0.0)
        self._drawn: dict[str, float] = {}

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Keep what was drawn."""
        assert round.trace is not None
        lengths = [len(c.token_ids) for c in round.completions]
        names = [f"rollout/{name}" for name in ROLLOUT]
        names += ["time/rollout", "time/drafts", "async_rollout/engine_wait_seconds"]
        self._drawn = {n.split("/")[-1]: round.metrics[n] for n in names if n in round.metrics}
        self._drawn |= {"completions": len(lengths), "trained_tokens": sum(lengths)}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the clocks."""
        now = time.perf_counter(), cpu_seconds()
        wall, cpu = (a - b for a, b in zip(now, self._last, strict=True))
        self.rounds.append({"seconds": wall, "cpu_seconds": cpu, **self._drawn})
        self._last = now


def data_of(row: Row, seed: int) -> RolloutDataModule:
    """Return the data module of a row."""
    engine: Any = GivenLengths(row.scale)
    return RolloutDataModule(
        ReasoningGym(TASK, "train", PROMPTS).rows(),
        [row.reward],
        engine=ProcessEngine(engine) if row.own_process else engine,
        prompts_per_round=row.prompts,
        num_generations=row.generations,
        max_completion_length=512 // row.scale,
        micro_batch_tokens=2048,
        seed=seed,
    )


def run(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """Train some rounds and return the means over those that are measured; keep their traces."""
    keep_heap()
    drafts_end_at(read_lengths(row.scale))
    torch.set_num_threads(row.threads)
    seed_everything(seed, verbose=False)
    module = GRPOModule(MODEL, learning_rate=1e-6)
    clock = Clock()
    trainer = make_trainer(
        folder,
        max_epochs=row.warm_up + row.rounds + row.after,
        limit_val_batches=0,
        callbacks=[*row.callbacks(), clock, RolloutLogger(num_completions=0)],
    )
    trainer.fit(module, datamodule=data_of(row, seed))
    peaks = (
        resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    figures = means(whole_pools(clock.rounds, row))
    return {**figures, "peak_mib": sum(peaks) / 1024, "rounds": clock.rounds}


def whole_pools(rounds: Sequence[Mapping[str, float]], row: Row) -> Sequence[Mapping[str, float]]:
    """Return the measured rounds: from the end of a pool to that of another one."""
    size = row.prompts * row.generations * row.pool
    drawn = accumulate(each["completions"] for each in rounds[: row.warm_up + row.rounds])
    ends = [i for i, number in enumerate(drawn, 1) if i >= row.warm_up and number % size == 0]
    return rounds[ends[0] : ends[-1]]


def means(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over the rounds that have it."""
    names = dict.fromkeys(name for each in rounds for name in each)
    return {name: fmean(each[name] for each in rounds if name in each) for name in names}


if __name__ == "__main__":
    name, seed, folder = sys.argv[1:]
    figures = run(ROWS[name], int(seed), Path(folder))
    Path(folder, "result.json").write_text(json.dumps(figures))
