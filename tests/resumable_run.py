"""Runs that kill themselves where they are told to.

`runs` first makes a run in `FOLDER/whole` that nothing stops; then, in `FOLDER/killed`, one process
after the other is killed at each place, each resumes where the one before was killed, and a last
one runs to the end. The two that come to their end print their figures. All are forks of the
process that `runs` is called in, which has done the imports and nothing else. At a place that
begins with TERM, the process is sent SIGTERM instead, and must save the run and exit with 143;
nothing else saves then.
"""

import hashlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import cloudpickle
import forked_engines
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from plain_module import Plain

from lit_rlsched import GRPOModule, RolloutDataModule, engines
from lit_rlsched.callbacks import (
    AheadRollout,
    DownSampling,
    DrainFilling,
    DynamicSampling,
    InFlightUpdates,
    LengthPrediction,
    MicroGroupSampling,
    RNGState,
    RolloutCallback,
    RolloutLogger,
    RoundCheckpoint,
    SortedBatching,
    StreamedTraining,
    TailBatching,
)
from lit_rlsched.run.record import CURVES
from lit_rlsched.run.saving.checkpoints import AtomicCheckpointIO
from lit_rlsched.run.saving.run_folder import newest_checkpoint
from lit_rlsched.scheduling.sorted_batching import SortedRound

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else reward workers import torch
SCHEDULES = {
    **{
        name: (
            {"steps_per_round": 2, "max_completion_length": 24, "num_generations": 4},
            10,
            lambda: [MicroGroupSampling(slots=6)],
        )
        for name in ("full", "automatic optimization")
    },
    **{
        mode: (
            {"prompts_per_round": 2, "max_completion_length": 40, "num_generations": 3},
            8,
            lambda mode=mode: [SortedBatching(3, mode=mode), MicroGroupSampling(slots=7)],
        )
        for mode in ("on_policy", "partial")
    },
    "tail": (
        {"prompts_per_round": 2, "max_completion_length": 40, "num_generations": 3},
        8,
        lambda: [TailBatching(completion_ratio=1.25), MicroGroupSampling(slots=7)],
    ),
    "streamed": (
        {"prompts_per_round": 2, "max_completion_length": 40, "num_generations": 3},
        8,
        lambda: [TailBatching(), StreamedTraining(start=0)],
    ),
    **{
        name: (
            {
                "prompts_per_round": 2,
                "max_completion_length": 40,
                "num_generations": 3,
                "steps_per_round": 2,
            },
            8,
            lambda correction=correction: [AheadRollout(correction)],
        )
        for name, correction in (("ahead", "verify"), ("ahead importance", "importance"))
    },
    "ahead streamed": (
        {
            "prompts_per_round": 2,
            "max_completion_length": 40,
            "num_generations": 3,
            "num_iterations": 2,
            "micro_batch_tokens": 64,
        },
        8,
        lambda: [AheadRollout(), StreamedTraining(start=0)],
    ),
    "in flight": (
        {
            "prompts_per_round": 2,
            "max_completion_length": 40,
            "num_generations": 3,
            "steps_per_round": 2,
        },
        8,
        lambda: [InFlightUpdates(turns=6)],
    ),
    "drafts": (
        {"prompts_per_round": 2, "max_completion_length": 40, "num_generations": 3},
        8,
        lambda: [
            TailBatching(completion_ratio=1.25, reuse_drafts=True),
            MicroGroupSampling(slots=7),
        ],
    ),
    "drain": (
        {"prompts_per_round": 2, "max_completion_length": 40, "num_generations": 3},
        8,
        lambda: [TailBatching(1.5), DrainFilling(), MicroGroupSampling(slots=7)],
    ),
    "losers go on": (
        {"prompts_per_round": 2, "max_completion_length": 40, "num_generations": 3},
        8,
        lambda: [TailBatching(2.0, max_deferrals=2), MicroGroupSampling(slots=7)],
    ),
    "selected": (
        {"steps_per_round": 2, "max_completion_length": 40, "num_generations": 6},
        8,
        lambda: [
            DownSampling(2, early_stop=True),
            DynamicSampling(),
            MicroGroupSampling(slots=7, order="least_attained"),
        ],
    ),
}


def digits(prompts, completions, completion_ids, log_extra, log_metric, **kwargs):
    shares = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
    log_extra("vowels", [sum(c in "aeiou" for c in text) for text in completions])
    log_metric("share", sum(shares) / len(shares))
    return shares


def coin(prompts, completions, **kwargs):
    """0 or 1, and never a 1 for every other prompt: groups stop, and prompts are replaced."""
    shares = digits(prompts, completions, **kwargs)
    return [float(s > 0.12 and p[0] in "024") for s, p in zip(shares, prompts, strict=True)]


class Die(RolloutCallback):
    """Counts what happens in this process and in those before it, and dies at the place."""

    def __init__(self, place):
        self.signal = signal.SIGTERM if place.startswith("TERM ") else signal.SIGKILL
        self.event, _, count = place.removeprefix("TERM ").partition(" ")
        self.at = int(count or 0)
        self.seen = Counter()
        self.partial = False

    def _count(self, event, reached):
        self.seen[event] += 1
        if event == self.event and reached(self.at):
            os.kill(os.getpid(), self.signal)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if getattr(batch, "is_first", True):  # of a micro-batch, in automatic optimization
            self.seen["micro"] = 0
        self._count("step", lambda at: trainer.global_step == at)

    def on_before_backward(self, trainer, pl_module, loss):
        self._count("micro", lambda at: trainer.global_step == at and self.seen["micro"] == 2)

    def on_validation_start(self, trainer, pl_module):
        number = trainer.global_step // trainer.datamodule.run.settings.steps_per_epoch
        self._count("answers", lambda at: number == at)

    def on_round_start(self, trainer, pl_module, plan):
        self.seen["harvest"] = self.seen["resumed"] = 0
        self.partial = any(c.token_ids for group in plan for c in group.completions)

    def on_completion_end(self, trainer, pl_module, completion):
        drawn, number = (
            trainer.datamodule.run.counters["num_completions"],
            trainer.datamodule.run.num_rounds,
        )
        self._count("completion", lambda at: drawn + self.seen["completion"] % 16 == at)
        self._count("harvest", lambda at: number == at and self.seen["harvest"] == 3)
        if self.partial:  # in a round that goes on with what another began
            self._count("resumed", lambda at: number >= at and self.seen["resumed"] == 2)

    def on_round_end(self, trainer, pl_module, round):
        self._count("round_end", lambda at: round.number == at)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        data = trainer.datamodule
        number = trainer.global_step // data.run.settings.steps_per_epoch
        inside = len(data.run.pool) or not isinstance(data.run.schedule.rule, SortedRound)
        self._count("validation", lambda at: number == at and batch_idx == 2 and inside)
        self._count("last", lambda at: number == at and batch_idx == 3)


class Bomb:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


class DyingIO(AtomicCheckpointIO):
    """Dies in the middle of writing the file of a certain save."""

    def __init__(self, place):
        self.left = int(place.removeprefix("save ")) if place.startswith("save ") else -1

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.left -= 1
        if self.left == 0:
            checkpoint["bomb"] = Bomb()
        super().save_checkpoint(checkpoint, path, storage_options)


class Spans(RolloutCallback):
    """The policy versions of every completion, kept in the checkpoint."""

    def __init__(self):
        self.spans = []

    def on_round_end(self, trainer, pl_module, round):
        self.spans.extend(len(c.segments) for c in round.completions)

    def state_dict(self):
        return {"spans": self.spans}

    def load_state_dict(self, state_dict):
        self.spans = state_dict["spans"]


class Rows(RolloutLogger):
    """Writes completions, and draws no pictures: they take as long as the run."""

    def _draw(self, trainer):
        pass


class History(RolloutCallback):
    """The figures of every validation, kept in the checkpoint."""

    def __init__(self):
        self.figures = []

    def on_validation_end(self, trainer, pl_module):
        found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        self.figures.append([trainer.global_step, found])

    def state_dict(self):
        return {"figures": self.figures}

    def load_state_dict(self, state_dict):
        self.figures = state_dict["figures"]


class Recovered(RolloutCallback):
    """Tokens of drafts that were accepted, kept in the checkpoint."""

    def __init__(self):
        self.tokens = 0

    def on_round_end(self, trainer, pl_module, round):
        self.tokens += round.metrics.get("drafts/accepted_tokens", 0)

    def state_dict(self):
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict):
        self.tokens = state_dict["tokens"]


def state_hash(state):
    """Of numbers, strings and tensors, however nested."""
    if isinstance(state, torch.Tensor):
        state = hashlib.sha256(state.numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        state = [
            [key, state_hash(value)]
            for key, value in sorted(state.items(), key=lambda item: str(item[0]))
        ]
    elif isinstance(state, (list, tuple)):
        state = [state_hash(value) for value in state]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def main(folder, engine, model, schedule, place, stops):
    beside = schedule in ("streamed", "in flight") or schedule.startswith("ahead")
    if beside:
        forked_engines.begin()
    folder = Path(folder)
    seed_everything(1)
    rows = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
    settings, steps, callbacks = SCHEDULES[schedule]
    decoder = getattr(engines, engine)()
    data = RolloutDataModule(
        rows[:30],
        [coin if schedule == "selected" else digits],
        val_data=rows[30:34],
        val_num_generations=2,
        val_greedy=schedule == "full",  # decoded greedily, few completions end early
        engine=engines.ProcessEngine(decoder) if beside else decoder,
        **{"prompts_per_round": 4, "micro_batch_tokens": 256, **settings},
    )
    spans, recovered, prediction = Spans(), Recovered(), LengthPrediction(probe_tokens=4)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0)
    if stops:
        checkpoints = RoundCheckpoint(max_share=1e-9)
    history = History()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            RNGState(),
            *callbacks(),
            prediction,
            Rows(num_completions=4),
            spans,
            recovered,
            history,
            checkpoints,
            Die(place),
        ],
        plugins=[DyingIO(place)],
    )
    automatic = schedule == "automatic optimization"
    module = Plain(model) if automatic else GRPOModule(model, learning_rate=1e-3)
    ckpt_path = newest_checkpoint(folder) if stops else "last"
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    rows, record = (folder / "completions.jsonl").read_text(), data.run.record
    figures = {
        "weights": hashlib.sha256(weights).hexdigest(),
        "steps": trainer.global_step,
        "rounds": data.run.num_rounds,
        **{f"num_{n}": data.run.counters[f"num_{n}"] for n in ("completions", "tokens")},
        "num_discarded_tokens": data.run.counters["num_discarded_tokens"],
        "dropped": {k: n for k, n in data.run.counters.items() if k.startswith("dropped/")},
        "pool": state_hash(data.run.pool.state_dict()),
        "drafts": [*data.run.rounds.drafts.weights],
        "draft_weights": state_hash(data.run.rounds.drafts.weights),
        "recovered": recovered.tokens,
        "audit": {
            k: v for k, v in data.run.rounds.runner.audit.state_dict().items() if "seconds" not in k
        },
        "validations": history.figures if stops else [],
        "record": [
            [{k: row.get(k) for k in ("round", "step", *CURVES[:-1])} for row in record.rounds],
            [*record.prompts],
            record.validations if stops else [],
        ],
        "uids": [row["id"] for row in record.prompts],
        "spans": spans.spans,
        "columns": sorted(json.loads(rows.splitlines()[-1])),
        "predictor": state_hash(prediction.state_dict()),
        "completions": hashlib.sha256(rows.encode()).hexdigest(),
    }
    print("\n" + json.dumps(figures), flush=True)


def run(*args, function=main):
    """A function in a process of its own; its exit status, negative where a signal ended it."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            function(*args)
            status = 0
        except SIGTERMException:
            status = 128 + signal.SIGTERM
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def runs(folder, engine, model, schedule, *places):
    """A run that nothing stops, and one that ends at each place in its turn."""
    settings = engine, model, schedule
    stops = any(place.startswith("TERM ") for place in places)
    for name, place in [("whole", "never"), *(("killed", p) for p in (*places, "never"))]:
        status = run(f"{folder}/{name}", *settings, place, stops)
        expected = 128 + signal.SIGTERM if place.startswith("TERM ") else -signal.SIGKILL
        assert status == (0 if place == "never" else expected), f"{place}: ended with {status}"
