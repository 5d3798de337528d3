"""Runs with one or several ranks: `ranked_run.py FOLDER`, with a list of runs as JSON on stdin.

All ranks are forks of this process, which has done the imports and nothing else. A run is a dict:
`name`, `ranks`, `strategy`, and optionally `rounds`, `precision`, `model`, `module`, `data`,
`callbacks`, `ckpt_path`, `save`, `plain`, `engine`, `engine_settings`, `wrong`, `faults`,
`of_rank`, `nodes`, `ray`, `hang`, `silence`, `held`, `pause`, `waits`. Rank
0 writes `FOLDER/NAME.json`; exit codes, times and what was printed are in the answer on stdout.
"""

import dataclasses
import faulthandler
import gc
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import forked_engines
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from plain_module import Plain
from struck_engines import struck

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule, callbacks, engines
from lit_rlsched import ranks as team_watch
from lit_rlsched.callbacks import RNGState, RolloutCallback
from lit_rlsched.engines import process_engine
from lit_rlsched.run import run_config, same_ranks, training_run
from lit_rlsched.run.saving.checkpoints import AtomicCheckpointIO
from lit_rlsched.run.saving.run_folder import newest_checkpoint
from lit_rlsched.training import weight_sync

LIMIT = 200.0
"""Seconds after which a run counts as hanging."""


def digits(prompts, completions, completion_ids, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        1.0 if text.startswith(a) else sum(c.isdigit() for c in text) / max(1, len(text))
        for text, a in zip(texts, answer, strict=True)
    ]


SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


class OwnCopy(engines.TransformersEngine):
    """Decodes with its own copy of the policy, as in a child process, but without its imports."""

    def start(self, spec):
        super().start(dataclasses.replace(spec, policy=None))


class Recorder(RolloutCallback):
    """What rank 0 draws, and what every rank sees."""

    def __init__(self, wrong=None, begun=None):
        self.rounds, self.losses, self.hooks, self.wrong = [], [], 0, wrong or {}
        self.begun = begun

    def on_round_end(self, trainer, pl_module, round):
        self.hooks += 1
        drawn = [(g.id, c.index, [*c.token_ids]) for g in round.groups for c in g.completions]
        self.rounds.append(hashlib.blake2b(repr(drawn).encode(), digest_size=8).hexdigest())
        if self.begun is not None:
            self.begun.touch()
        self._go_wrong(trainer, "round")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.callback_metrics.get("loss", 0.0)))
        self._go_wrong(trainer, "step")

    def _go_wrong(self, trainer, place):
        rank, where, number, what = self.wrong or (None,) * 4
        counted = len(self.rounds if place == "round" else self.losses)
        if (trainer.global_rank, place, counted) == (rank, where, number):
            if what == "raise":
                raise ValueError("something is wrong here")
            os.kill(os.getpid(), getattr(signal, what))


class Held(RolloutCallback):
    """Waits once in a phase of the second round, so that something can happen to a host there.

    Each rank that comes to the phase then leaves the file `PATH.PHASE`.
    """

    def __init__(self, path, phase, seconds=2.0):
        self.path, self.phase, self.seconds = Path(f"{path}.{phase}"), phase, seconds
        self.late = False
        reader = weight_sync.PolicyReader
        read = reader._weights

        def held(reader):
            for number, named in enumerate(read(reader)):
                if number == 1:
                    self.here("sync")
                yield named

        reader._weights = held

    def here(self, phase):
        if self.late and phase == self.phase and not self.path.exists():
            self.path.touch()
            time.sleep(self.seconds)

    def on_train_epoch_start(self, trainer, pl_module):
        self.late = trainer.current_epoch > 0

    def on_completion_end(self, trainer, pl_module, completion):
        self.here("rollout")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.late = trainer.current_epoch > 0
        self.here("update")

    def on_evaluation_progress(self, trainer, pl_module, done, total):
        self.here("validation")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.here("checkpoint")


def weights(module):
    from torch.distributed.tensor import DTensor

    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().double().flatten() for p in whole])


def run(folder, name, ranks=1, strategy="auto", rounds=2, precision="32-true", model=None, **more):
    """Train; with several `nodes` a launcher has started each rank's process."""
    os.chdir(folder)
    nodes = more.get("nodes", 1)
    team_watch.SILENCE = more.get("silence", team_watch.SILENCE)
    same_ranks.SLOW, limit = more.get("waits", (same_ranks.SLOW, None))
    if "hang" in more:
        process_engine.ANSWER = more["hang"]
    kinds = {"grpo": GRPOModule, "rloo": RLOOModule}
    settings = {"learning_rate": 3e-4, **more.get("module", {})}
    kind = kinds[settings.pop("kind", "grpo")]
    module = Plain(model) if more.get("plain") else kind(model, **settings)
    if more.get("ray"):
        own = more.get("engine_settings", {})
        engine = engines.RayEngine(getattr(engines, more["engine"])(), **own)
    elif "engine" in more:
        base, own = getattr(engines, more["engine"]), more.get("engine_settings", {})
        engine = struck(base, Path(folder, name), more.get("faults", []), **own)
    else:
        engine = OwnCopy()
        training_run.in_own_process = lambda engine: engine
    data = {
        "train_data": SUMS[:80],
        "reward_funcs": [digits],
        "engine": engine,
        "prompts_per_round": 4,
        "num_generations": 4,
        "max_completion_length": 24,
        "micro_batch_tokens": 128,
        "seed": 3,
        **more.get("data", {}),
    }
    if more.get("long_prompts"):
        data["train_data"] = [{**row, "prompt": 20 * row["prompt"]} for row in SUMS[:80]]
    recorder = Recorder(more.get("wrong"), Path(folder, f"{name}.rounds"))
    held = (
        [Held(Path(folder, name), more["held"], more.get("pause", 2.0))] if "held" in more else []
    )
    made = [
        getattr(callbacks, name, ModelCheckpoint)(**settings)
        for name, settings in more.get("callbacks", {}).items()
    ]
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=rounds,
        precision=precision,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing="RoundCheckpoint" in more.get("callbacks", {}),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[recorder, *held, *made, RNGState()],
        plugins=[
            AtomicCheckpointIO(),
            *([LightningEnvironment()] if ranks > 1 and nodes == 1 else []),
        ],
    )
    if limit:
        trainer.strategy._timeout = timedelta(seconds=limit)
    datamodule = RolloutDataModule(**data)
    path = more.get("ckpt_path")
    if path and path.startswith("newest of "):
        path = newest_checkpoint(Path(path.removeprefix("newest of ")))
    trainer.fit(module, datamodule=datamodule, ckpt_path=path)
    if more.get("save"):
        trainer.save_checkpoint(more["save"])
    flat = weights(module)
    if trainer.global_rank == 0:
        torch.save(flat, Path(folder, f"{name}.pt"))
    metrics = {k: float(v) for k, v in sorted(trainer.callback_metrics.items())}
    said = {
        "rounds": recorder.rounds,
        "losses": recorder.losses,
        "hooks": recorder.hooks,
        "shares": None if more.get("plain") else module.row_cost() is not None,
        "weights": hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest(),
        "metrics": {k: v for k, v in metrics.items() if not k.startswith("time/")},
        "counters": dict(datamodule.run.counters),
    }
    Path(folder, f"{name}.{trainer.global_rank}.json").write_text(json.dumps(said))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork(rank, port, log, folder, one):
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    torch.set_num_threads(1)  # else threads that load weights race to make a fork's thread pool
    ranks = one.get("ranks", 1)
    if ranks > 1:
        os.environ |= {
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    # in a fork, adapters round differently, and AdamW makes much of the rounding of small gradients
    if rank == 0 and "engine" in one and "engine_settings" not in one:
        forked_engines.begin()
    of_rank = one.pop("of_rank", {}).get(str(rank), {})
    run_config.__version__ = of_rank.pop("version", run_config.__version__)
    ended_by(lambda: run(folder, **{**one, **of_rank}))


def ended_by(call):
    """Make a call, and end this process with what becomes of it."""
    code = 1
    try:
        call()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        print(f"RAISED {type(error).__name__}: {error} {notes}", flush=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_ranks(folder, one):
    Path(folder, one["name"]).mkdir(exist_ok=True)
    port, began = free_port(), time.monotonic()
    logs = [tempfile.TemporaryFile("w+") for _ in range(one.get("ranks", 1))]  # noqa: SIM115
    pids = [fork(rank, port, log, folder, one) for rank, log in enumerate(logs)]
    codes, ended = {}, {}
    while len(codes) < len(pids) and time.monotonic() - began < one.get("limit", LIMIT):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                ended[pid] = time.monotonic() - began
        time.sleep(0.02)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGUSR1)  # says where it hangs
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read())
    return {
        "name": one["name"],
        "codes": [codes.get(pid) for pid in pids],  # None: it hung
        "seconds": [ended.get(pid) for pid in pids],
        "said": said,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gc.collect()
    gc.freeze()
    print(json.dumps([run_ranks(sys.argv[1], one) for one in json.load(sys.stdin)]))
