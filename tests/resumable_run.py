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

import forked_engines
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from plain_module import Plain
from schedules import RESUMED, SETTINGS, coin, digits

from lit_rlsched import RolloutDataModule, engines
from lit_rlsched.callbacks import (
    LengthPrediction,
    RNGState,
    RolloutCallback,
    RolloutLogger,
    RoundCheckpoint,
)
from lit_rlsched.run.record import CURVES
from lit_rlsched.run.saving.checkpoints import AtomicCheckpointIO
from lit_rlsched.run.saving.run_folder import newest_checkpoint
from lit_rlsched.scheduling.sorted_batching import SortedRound


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
        self.seen["third"] = self.seen["resumed"] = 0
        self.partial = any(c.token_ids for group in plan for c in group.completions)

    def on_completion_end(self, trainer, pl_module, completion):
        drawn, number = (
            trainer.datamodule.run.counters["num_completions"],
            trainer.datamodule.run.num_rounds,
        )
        self._count("completion", lambda at: drawn + self.seen["completion"] % 16 == at)
        self._count("third", lambda at: number == at and self.seen["third"] == 3)
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


class Seen(RolloutCallback):
    """What became of every completion, of drafts and of validations, kept in the checkpoint."""

    KEPT = "spans", "groups", "validations", "recovered"

    def __init__(self):
        self.spans, self.groups, self.validations, self.recovered = [], [], [], 0

    def on_validation_end(self, trainer, pl_module):
        found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        self.validations.append([trainer.global_step, found])

    def on_round_end(self, trainer, pl_module, round):
        self.recovered += round.metrics.get("drafts/accepted_tokens", 0)
        self.spans.extend(len(c.segments) for c in round.completions)
        for group in round.groups:
            ends = [
                (c.drawn, [*(c.scores or ())], c.dropped or c.finish_reason, [*c.segments])
                for c in group.completions
            ]
            self.groups.append((group.id, round.ordinal, round.version, group.deferred, ends))

    def state_dict(self):
        return {name: vars(self)[name] for name in self.KEPT}

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


class Rows(RolloutLogger):
    """Writes completions, but no report, which takes as long as the run."""

    def _report(self, trainer, going_on):
        pass


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


def main(folder, engine, model, name, place, stops):
    schedule = RESUMED[name]
    beside = schedule.own_process
    if beside:
        forked_engines.begin()
    folder = Path(folder)
    seed_everything(1)
    rows = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
    settings = SETTINGS | schedule.data
    reward = {"digits": digits, "coin": coin}[settings.pop("reward_funcs", "digits")]
    decoder = getattr(engines, engine)()
    data = RolloutDataModule(
        rows[:30],
        [reward],
        val_data=rows[30:34],
        val_num_generations=2,
        engine=engines.ProcessEngine(decoder) if beside else decoder,
        **{"val_greedy": False, **settings},
    )
    seen, prediction = Seen(), LengthPrediction(probe_tokens=4)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0)
    if stops:
        checkpoints = RoundCheckpoint(max_share=1e-9)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=schedule.trainer.get("max_steps", 8),
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            RNGState(),
            *schedule.callbacks(),
            prediction,
            Rows(num_completions=4),
            seen,
            checkpoints,
            Die(place),
        ],
        plugins=[DyingIO(place)],
    )
    module = Plain(model) if name == "automatic optimization" else schedule.module(model)
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
        "pool": state_hash(data.run.pool.state_dict()["pool"]),
        "drafts": [*data.run.drafts.weights],
        "draft_weights": state_hash(data.run.drafts.weights),
        "recovered": seen.recovered,
        "audit": {k: v for k, v in data.run.pool._audit.state_dict().items() if "seconds" not in k},
        "validations": seen.validations if stops else [],
        "record": [
            [{k: row.get(k) for k in ("round", "step", *CURVES[:-1])} for row in record.rounds],
            seen.groups,
            record.validations if stops else [],
        ],
        "uids": [group[0] for group in seen.groups],
        "spans": seen.spans,
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
