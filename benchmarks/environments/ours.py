"""One row of our side, in a process of its own: its name, the seconds of a call and a file."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything

from benchmarks.environments.slow import (
    CONTEXT,
    GENERATIONS,
    LIMIT,
    MODEL,
    PROMPTS,
    SLOTS,
    environment,
    rows,
    turns,
)
from benchmarks.ours import make_trainer
from benchmarks.papers.child import Clock
from examples.lookup.lookup import right
from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import AsyncRollout, MicroGroupSampling
from lit_rlsched.engines import ProcessEngine, VLLMEngine
from lit_rlsched.environments.chat import Call
from lit_rlsched.environments.scheduler import Answer, EnvironmentScheduler
from lit_rlsched.processes import keep_heap
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.turns import Turns
from lit_rlsched.training.round import Round
from lit_rlsched.types import ENVIRONMENT, Event, Request, Sample

ROUNDS = 8
"""The first two and the last are not measured: nothing is drawn beside the last update."""
NAMES = (
    "rollout/decode_steps",
    "rollout/tokens",
    "rollout/bubble_ratio",
    "rollout/prefill_tokens",
    "time/rollout",
    "tools/call_frequency",
    "tools/wait_ratio",
)


class Measure(Clock):
    """Seconds and counts of each round."""

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Keep what was drawn."""
        self._drawn = {n.split("/")[-1]: round.metrics[n] for n in NAMES}
        replies = sum(
            n for c in round.completions for author, n in c.segments if author == ENVIRONMENT
        )
        prompts = sum(len(group.prompt.token_ids) for group in round.groups)
        self._drawn |= {"new_tokens": prompts + replies, "reward": round.metrics["reward"]}


def calling(turns: Turns) -> int:
    """Return the number of completions whose tools run."""
    sessions = turns._scheduler._sessions.values()
    return sum(session.waits_for == "call" for session in sessions)


def hold_slots() -> None:
    """Let a completion keep its slot while its tools run."""
    answered = Rollout._answered

    def held(self: Rollout, turns: Turns) -> list[Sample]:
        over = answered(self, turns)
        worker = self.session.worker
        worker.admission.slots = worker.slots - calling(turns)
        return over

    Rollout._answered = held  # type: ignore[method-assign]


def in_lockstep() -> None:
    """Answer no call before all completions wait for one; calls of a turn run side by side."""
    poll, wait, run = (
        EnvironmentScheduler.poll,
        EnvironmentScheduler.wait,
        Rollout._answered,
    )
    came: list[Answer] = []
    decodes = [False]

    def answered(self: Rollout, turns: Turns) -> list[Sample]:
        decodes[0] = bool(self._requests.live)
        return run(self, turns)

    def waits(self: EnvironmentScheduler) -> bool:
        return any(session.waits_for is not None for session in self._sessions.values())

    def poll_all(self: EnvironmentScheduler) -> list[Answer]:
        came.extend(poll(self))
        if decodes[0] or waits(self):
            return []
        answers = [*came]
        came.clear()
        return answers

    def wait_for_one(self: Any, timeout: float | None = None) -> bool:
        return waits(self) and wait(self, timeout)

    EnvironmentScheduler.poll = poll_all  # type: ignore[method-assign]
    EnvironmentScheduler.wait = wait_for_one  # type: ignore[method-assign]
    Rollout._answered = answered  # type: ignore[method-assign]


class GivenTurns(VLLMEngine):
    """vLLM whose turns have made-up lengths; tokens are drawn as always."""

    def start(self, spec: Any) -> None:
        self._left: dict[str, list[int]] = {}
        super().start(spec)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([self._shortened(request) for request in requests])

    def _shortened(self, request: Request) -> Request:
        uid, _, rest = request.id.partition("@")
        if not rest:
            return request  # the check of new weights
        left = self._left.setdefault(request.id, turns(uid, int(rest.rpartition("/")[2])))
        most = len(request.prefix_ids) + left[0]
        sampling = replace(request.sampling, max_completion_length=most)
        return replace(request, sampling=sampling)

    def _sampling_params(self, request: Request) -> Any:
        params = super()._sampling_params(request)
        params.stop_token_ids = []
        return params

    def step(self) -> list[Event]:
        events = super().step()
        for event in events:
            if event.finish_reason is not None and self._left.get(event.request_id):
                self._left[event.request_id].pop(0)
                event.finish_reason = "stop"
        return events


def call_until_the_last_turn(engine: GivenTurns) -> None:
    """Let each turn but the last call the tool, whatever its tokens say."""

    def calls(self: Turns, turn: Any, start: int, end: int) -> list[Call]:
        sample = turn.sample
        sample.completion.messages.append({"role": "assistant", "content": ""})
        return [Call("get", {"key": "a"})] if engine._left[sample.id] else []

    Turns._calls = calls  # type: ignore[method-assign]


ALONE: dict[str, Any] = {
    "a slot is free while tools run": lambda: None,
    "a slot is held while tools run": hold_slots,
    "in lockstep, tools side by side": in_lockstep,
}
APART: dict[str, Any] = {
    "own process": lambda: None,
    "own process, in lockstep": in_lockstep,
    "own process, AsyncRollout, one step off": lambda: AsyncRollout(1, PROMPTS, "wait"),
    "own process, AsyncRollout": AsyncRollout,
}
"""The engine has a process and a core of its own."""
CASES = ALONE | APART


def run(case: str, median: float, made_up: bool = False) -> dict[str, Any]:
    """Train some rounds and return the means over those that are measured."""
    keep_heap()
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    beside = [each] if (each := CASES[case]()) else []
    clock, engine = Measure(), GivenTurns() if made_up else VLLMEngine()
    if isinstance(engine, GivenTurns):
        call_until_the_last_turn(engine)
    data = RolloutDataModule(
        rows(ROUNDS),
        [right],
        engine=ProcessEngine(engine) if case in APART else engine,
        environment_factory=environment(median),
        prompts_per_round=PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=CONTEXT if made_up else LIMIT,
        shuffle=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            Path(folder),
            max_epochs=ROUNDS,
            limit_val_batches=0,
            callbacks=[*beside, MicroGroupSampling(slots=SLOTS), clock],
        )
        trainer.fit(GRPOModule(MODEL, learning_rate=1e-6), datamodule=data)
    measured = clock.rounds[2:-1]
    return {name: fmean(each[name] for each in measured) for name in measured[0]}


if __name__ == "__main__":
    name, seconds, out, *made_up = sys.argv[1:]
    Path(out).write_text(json.dumps(run(name, float(seconds), bool(made_up))))
