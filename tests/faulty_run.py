"""A run whose processes are killed and stopped where it is told.

A strike is `engine KILL rollout`: which process, which signal and in which phase of the run; they
fall in their order, one in a round at most but for those in a start. Where the trainer is killed,
another process goes on from its last checkpoint: all are forks of the one that `runs` is called in,
which has done the imports by then and nothing else.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import cloudpickle
import forked_engines
import psutil
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from resumable_run import run
from schedules import digits

from lit_rlsched import GRPOModule, RolloutDataModule, engines
from lit_rlsched.callbacks import RNGState, RolloutCallback
from lit_rlsched.run.saving.checkpoints import AtomicCheckpointIO

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else each reward worker imports torch
with suppress(ImportError):
    import_module("setproctitle").getproctitle()  # it looks for the first environment
PHASES = ("start", "sync", "rollout", "scoring", "update", "validation", "checkpoint")
SIGNALS = ("KILL", "STOP")
STEPS = {"TransformersEngine": len(PHASES) * len(SIGNALS) + 1, "VLLMEngine": 3}
"""One more than strikes."""
STOPPED = 1
"""Seconds that the trainer is stopped for."""
MARKS = {
    "engine": "_engine_server",
    "reward": "workers/scores.py",
    "worker": "Worker_TP1",
}
"""Of command lines or names."""


class Run:
    """What the processes of a run know of each other: files in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reach(self, phase: str) -> None:
        """A process is in that phase; if it is time for the next strike, it falls here."""
        strikes = (self.folder / "strikes").read_text().splitlines()
        number = len([*self.folder.glob("struck *")])
        if number == len(strikes):
            return
        who, how, where = strikes[number].split()
        if number > int((self.folder / "step").read_text()) and where != "start":
            return
        targets = self.processes(who)
        if where != phase or not targets:
            return
        try:
            os.close(os.open(self.folder / f"struck {number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.record()
        self.strike(who, how, targets[0])

    def strike(self, who: str, how: str, target: psutil.Process) -> None:
        if how == "STOP" and who == "trainer":
            go_on = f"sleep {STOPPED}; kill -CONT {target.pid}"
            subprocess.Popen(["sh", "-c", go_on], start_new_session=True)
        elif how == "STOP" and who != "reward":  # a reward has a limit of its own
            (self.folder / "hung").write_text(str(target.pid))
        target.send_signal(signal.Signals[f"SIG{how}"])

    def processes(self, who: str) -> list[psutil.Process]:
        trainer = psutil.Process(int((self.folder / "trainer").read_text()))
        if who == "trainer":
            return [trainer]
        return [p for p in trainer.children(recursive=True) if MARKS[who] in named(p)]

    def record(self) -> None:
        """Write down who runs now, and what each has mapped of `/dev/shm`."""
        trainer = self.processes("trainer")[0]
        with (self.folder / "processes").open("a") as file:
            for process in [trainer, *trainer.children(recursive=True)]:
                with suppress(OSError, psutil.NoSuchProcess):  # it has just ended
                    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                    shared = {line.split("/dev/shm/")[1] for line in maps if "/dev/shm/" in line}
                    names = sorted(name.removesuffix(" (deleted)") for name in shared)
                    file.write(json.dumps([process.pid, process.create_time(), names]) + "\n")

    def hangs(self) -> bool:
        """Whether a process was stopped and nobody has killed it yet."""
        hung = self.folder / "hung"
        try:
            status = psutil.Process(int(hung.read_text())).status()
        except (FileNotFoundError, psutil.NoSuchProcess):
            return False
        return status != psutil.STATUS_ZOMBIE


class Phases(RolloutCallback):
    """Those that the trainer is in."""

    def __init__(self, here: Run) -> None:
        self.here, self.tokens, self.differences = here, [], []

    def on_train_start(self, trainer, pl_module):
        (self.here.folder / "step").write_text(str(trainer.global_step))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.here.reach("update")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (self.here.folder / "step").write_text(str(trainer.global_step))
        metrics = trainer.callback_metrics
        self.differences.append(float(metrics["sampling/sampling_logp_difference/max"]))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.here.reach("validation")

    def on_round_end(self, trainer, pl_module, round):
        self.here.record()
        self.tokens.append([list(c.token_ids) for c in round.completions])

    def state_dict(self):
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict):
        self.tokens = state_dict["tokens"]


def named(process: psutil.Process) -> str:
    """Its name and its command line, where it still runs."""
    try:
        return process.name() + " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def struck(base: type, here: Run) -> type:
    """That engine, in the phases of its process."""

    class Struck(base):
        steps = 0

        def start(self, spec):
            Path("/proc/self/comm").write_text("_engine_server")  # a fork's command line is another
            here.reach("start")
            super().start(spec)

        def sync_weights(self, named_tensors, version):
            here.reach("sync")
            self.steps = 0
            super().sync_weights(named_tensors, version)

        def step(self):
            self.steps += 1
            if self.steps > 3:
                here.reach("rollout")
            return super().step()

    return Struck


def main(folder: str, engine: str, model: str) -> None:
    forked_engines.begin(split=engine == "VLLMEngine")
    here = Run(Path(folder))
    (here.folder / "trainer").write_text(str(os.getpid()))
    replace = os.replace

    def reach_and_replace(source, target):
        if str(source).endswith("checkpoint-tmp"):
            here.reach("checkpoint")
        replace(source, target)

    os.replace = reach_and_replace

    def reward(prompts, completions, completion_ids, **kwargs):
        here.reach("scoring")
        return digits(prompts, completions, completion_ids, **kwargs)

    seed_everything(1)
    rows = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
    split = {"tensor_parallel_size": 2, "kv_cache_gib": 0.01} if engine == "VLLMEngine" else {}
    decoder = engines.ProcessEngine(struck(getattr(engines, engine), here)(**split))
    # on a busy machine anything may last longer than a test can wait
    decoder.limit = lambda starts: 0.5 if here.hangs() else 1e9  # type: ignore[method-assign]
    data = RolloutDataModule(
        rows[:30],
        [reward],
        val_data=rows[30:32],
        val_num_generations=1,
        engine=decoder,
        reward_workers=1,
        reward_timeout=2 if "reward STOP" in (here.folder / "strikes").read_text() else 30,
        prompts_per_round=2,
        num_generations=4,
        max_completion_length=16,
        micro_batch_tokens=256,
    )
    phases = Phases(here)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS[engine],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            RNGState(),
            ModelCheckpoint(here.folder, every_n_train_steps=1, save_last=True, save_top_k=0),
            phases,
        ],
    )
    module = GRPOModule(model, learning_rate=1e-3)
    trainer.fit(module, datamodule=data, ckpt_path="last")
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.save(weights, here.folder / "weights.pt")
    figures = {
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "steps": trainer.global_step,
        "tokens": phases.tokens,
        "difference": max(phases.differences),
        "restarts": decoder.restarts,
        "counters": dict(data.run.counters),
    }
    print("\n" + json.dumps(figures), flush=True)


def runs(folder: str, engine: str, model: str, *strikes: str) -> None:
    """A run to its end; it prints its figures."""
    Path(folder).mkdir()
    (Path(folder) / "strikes").write_text("\n".join(strikes))
    (Path(folder) / "step").write_text("0")
    killed = sum(strike.startswith("trainer KILL") for strike in strikes)
    for _ in range(killed):
        status = run(folder, engine, model, function=main)
        assert status == -signal.SIGKILL, f"ended with {status}"
    sys.exit(run(folder, engine, model, function=main))
