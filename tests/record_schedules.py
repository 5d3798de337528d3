"""Record what runs do, schedule by schedule, and compare two recordings bit for bit.

`record_schedules.py record OUT [--only NAME ...] [--engine vllm] [--seed N] [--ranks N]` writes one
JSON file per schedule; `compare OLD NEW` prints for each whether it is equal or where it differs,
and exits with 1 if any does. For changes of the code that must not change what it does: record
before, record after, compare. CPUs round differently: both on one machine. `against REVISION` makes
both and compares them; it keeps those of the revision in `runs/recordings`.

`--renamed OLD=NEW` is another name of a metric, a column or a file (`OLD=`: it is gone). `--keys`
such as `completions versions weights` compares these alone.

Each schedule runs once from beginning to end and, with one rank, once in pieces: it is stopped by
SIGTERM at the places in `Schedule.stops` and resumed from the checkpoint of `RoundCheckpoint`. The
task is a small one, a random model of two layers that is rewarded for digits: the quick task's own
model is too slow for this many runs, and a random one earns no reward there.

Only the public interface is used, so that this file and `schedules.py` run on the code before and
after a change. A schedule that the code does not have is skipped.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import argparse
import hashlib
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from character_tokenizer import CHARACTERS, SPECIAL, make_tokenizer
from lightning import Trainer, seed_everything
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from schedules import ROWS, SCHEDULES, SETTINGS, Schedule, coin, digits
from transformers import Qwen3Config, Qwen3ForCausalLM

import lit_rlsched
from lit_rlsched import RolloutDataModule, callbacks, engines
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError

TIMED = re.compile("^time/|seconds|per_second|/bubble_ratio$|ahead_steps$|^streamed_training/")
"""Metrics that follow the clock. Only their names are recorded."""
OF_COMPLETIONS = (
    *("index", "token_ids", "text", "finish_reason", "segments", "scores", "extra", "logged"),
    *("dropped", "advantage", "attempts", "logprobs", "old_logprobs", "ref_logprobs", "draft"),
)
PARTS = {
    "completions": ("index", "token_ids", "logprobs", "finish_reason", "text", "scores"),
    "versions": ("index", "segments"),
}
"""Keys to compare by: what of each completion of a round."""


def make_model(folder: Path) -> str:
    """A random model; one draw in about twenty ends a completion."""
    vocabulary = len(SPECIAL) + len(CHARACTERS)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [1, vocabulary - 1, vocabulary - 2, vocabulary - 3]
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


class Recorder(callbacks.RolloutCallback):
    """Writes down what a run does, and stops it by SIGTERM at a place such as `completion 1 5`.

    What it has so far is in the checkpoint.
    """

    def __init__(self, stop: str | None) -> None:
        keys = ("plans", "rounds", "metrics", "left_out", "weights", "syncs", "hooks")
        self.record: dict[str, Any] = {key: [] for key in keys}
        self._ended: dict[str, Counter[str]] = {"completions": Counter(), "groups": Counter()}
        event, number, times = [*(stop or "never 0").split(), "1"][:3]
        self.place, self.times, self.stopped = (event, int(number)), int(times), False

    def at(self, event: str) -> None:
        if (event, len(self.record["plans"]) - 1) == self.place:
            self.times -= 1
            if self.times == 0:
                self.stopped = True
                signal.raise_signal(signal.SIGTERM)  # handled before this returns

    def watch(self, engine: Any) -> None:
        """Note each time that the engine gets weights: their version, rounds begun."""
        for name in {"sync_weights", "update_weights"} & set(dir(engine)):
            setattr(engine, name, partial(self._sync, getattr(engine, name)))

    def _sync(self, give: Callable[..., None], weights: Any, version: int) -> None:
        if (sync := [version, len(self.record["plans"])]) not in self.record["syncs"]:
            self.record["syncs"].append(sync)
        give(weights, version)

    def note(self, metrics: dict[str, float], step: int | None) -> None:
        """What loggers get."""
        left_out = {name for name in metrics if TIMED.search(name)}
        self.record["left_out"] = sorted(left_out.union(self.record["left_out"]))
        kept = {k: float(v) for k, v in sorted(metrics.items()) if k not in left_out}
        self.record["metrics"].append({"step": step, **kept})

    def on_round_start(self, trainer, pl_module, plan):
        self._ended["groups"].clear()
        del self.record["plans"][len(self.record["rounds"]) :]  # begun once more after a stop
        self.record["plans"].append([describe(group) for group in plan])

    def on_completion_end(self, trainer, pl_module, completion):
        self._ended["completions"][_drawn(completion)] += 1
        self.at("completion")

    def on_group_end(self, trainer, pl_module, group):
        self._ended["groups"][group.id] += 1

    def on_round_end(self, trainer, pl_module, round):
        groups = [describe(group) for group in round.groups]
        about = {"number": round.number, "version": round.version}
        self.record["rounds"].append({**about, "groups": groups})
        # Hooks come when scores come: what loses a race may have none, and what waits in a pool may
        # get its own in an earlier round. So only what is here, in this order, since the run began.
        drawn = [_drawn(c) for group in round.groups for c in group.completions]
        times = [self._ended["completions"][key] for key in drawn]
        self.record["hooks"].append([times, [self._ended["groups"][g.id] for g in round.groups]])
        self.at("round_end")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.at("step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        weights, step = self.record["weights"], trainer.global_step
        if weights and weights[-1][0] == step:  # micro-batches of one optimizer step
            weights.pop()
        weights.append([step, hash_of_weights(pl_module)])

    def on_train_epoch_end(self, trainer, pl_module):
        self.at("epoch_end")

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.at("validation")

    def state_dict(self):
        return {"record": json.dumps(self.record)}

    def load_state_dict(self, state_dict):
        self.record |= json.loads(state_dict["record"])


class RecordingLogger(Logger):
    """Hands what is logged to the recorder."""

    name, version = "recording", 0

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def log_metrics(self, metrics, step=None):
        self.recorder.note(metrics, step)

    def log_hyperparams(self, *args, **kwargs):
        pass


def hash_of_weights(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _drawn(completion: Any) -> str:
    return json.dumps([completion.index, list(completion.token_ids), list(completion.logprobs)])


def describe(group: Any) -> dict[str, Any]:
    """All of a group that is deterministic, as it is now."""
    of_group = {name: getattr(group, name) for name in ("id", "deferred")}
    of_prompt = {name: getattr(group.prompt, name) for name in ("uid", "text", "token_ids")}
    drawn = [{name: getattr(c, name) for name in OF_COMPLETIONS} for c in group.completions]
    found = {**of_group, "prompt": of_prompt, "completions": drawn}
    return json.loads(json.dumps(found, default=_as_json))


def _as_json(value: Any) -> list[Any]:
    return list(value) if isinstance(value, array) else list(asdict(value).values())


def read_folder(folder: Path) -> dict[str, Any]:
    """What a run has written: completions, what ran when (counted in steps), names of files."""
    traces, tables = Traces(folder / "traces"), {}
    for name in ("spans", "steps"):
        columns = traces.table(name).to_pydict()
        kept = {k: v for k, v in sorted(columns.items()) if k not in ("start", "end", "seconds")}
        if kept:
            tables[name] = kept
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    files = {name for name in files if Path(name).suffix not in (".parquet", "")}
    rows = {
        name: [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]
        for name in ("completions.jsonl", "predictions.jsonl")
        if name in files
    }
    return {**rows, "traces": tables, "files": sorted(files)}


def run(
    schedule: Schedule, model: str, folder: Path, engine: str, seed: int, stops: tuple[str, ...]
) -> dict[str, Any]:
    """The record of one run, stopped and resumed at each of `stops` on its way."""
    ckpt_path: Path | None = None
    stopped_at = []
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    for place in (*stops, None):
        seed_everything(seed, verbose=False)
        kinds = {"transformers": "TransformersEngine", "vllm": "VLLMEngine"}
        decoder: Any = getattr(engines, kinds[engine])()
        if schedule.own_process or ranks > 1:
            decoder = engines.ProcessEngine(decoder)
        settings: dict[str, Any] = SETTINGS | schedule.data
        if schedule.held_out:
            settings["val_data"] = ROWS[42:]
            settings["predict_data"] = [{"prompt": row["prompt"]} for row in ROWS[40:44]]
        reward = {"digits": digits, "coin": coin}[settings.pop("reward_funcs", "digits")]
        data = RolloutDataModule(ROWS[:42], [reward], engine=decoder, **settings)
        steps = settings.get("steps_per_round", 1) * settings.get("num_iterations", 1)
        steps = schedule.trainer.get("limit_train_batches", steps)
        recorder, checkpoints = Recorder(place), callbacks.RoundCheckpoint(max_share=1e-9)
        recorder.watch(decoder)
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            max_steps=schedule.rounds * steps,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            logger=RecordingLogger(recorder),
            callbacks=[
                callbacks.RNGState(),
                *schedule.callbacks(),
                callbacks.RolloutLogger(num_completions=1000),
                callbacks.CompletionWriter(),
                recorder,
                checkpoints,
            ],
            **{"num_sanity_val_steps": 0, **schedule.trainer},
        )
        module = schedule.module(model)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        except SIGTERMException:
            if not recorder.stopped:
                raise RuntimeError("SIGTERM came from elsewhere: record once more.") from None
            stopped_at.append([place, trainer.global_step, checkpoints.last_path.name])
            ckpt_path = checkpoints.last_path
        else:
            assert place is None, f"{place}: the run came to its end"
    if schedule.held_out:
        trainer.test(module, datamodule=data, verbose=False)
        trainer.predict(module, datamodule=data, return_predictions=False)
    if stops:
        del recorder.record["hooks"], recorder.record["syncs"]  # some were called before a stop
    return {
        "stopped_at": stopped_at,
        "rounds_over": data.run.rounds_over,
        "weights_at_end": hash_of_weights(module),
        **recorder.record,
        **read_folder(folder),
    }


def run_ranks(ranks: int, folder: Path, *how: Any) -> dict[str, Any]:
    """The record of rank 0. Ranks are forks of this process, which has trained nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        if pid := os.fork():
            pids.append(pid)
            continue
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            recorded = run(*how)
            if rank == 0:
                (folder / "rank_0.json").write_text(json.dumps(recorded), encoding="utf-8")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), f"exit codes of the ranks: {codes}"
    return json.loads((folder / "rank_0.json").read_text("utf-8"))


def record_schedule(
    name: str, out: Path, model: str, engine: str = "transformers", seed: int = 1, ranks: int = 1
) -> dict[str, Any]:
    """Run a schedule whole and in pieces, and write the file."""
    schedule = SCHEDULES[name]
    recorded: dict[str, Any] = {"schedule": name, "engine": engine, "seed": seed, "ranks": ranks}
    kinds = {"whole": (), "resumed": schedule.stops} if ranks == 1 else {"whole": ()}
    for kind, stops in kinds.items():
        if kind == "whole" or stops:
            with tempfile.TemporaryDirectory() as folder:
                how = (schedule, model, Path(folder, "run"), engine, seed, stops)
                recorded[kind] = run(*how) if ranks == 1 else run_ranks(ranks, Path(folder), *how)
    whole, resumed = recorded["whole"], recorded.get("resumed", recorded["whole"])
    ours = ("rounds", "weights", "weights_at_end", "completions.jsonl", "metrics")
    differ = [key for key in ours if [*differences(whole[key], resumed[key])]]
    recorded["resumed_differs_in"] = differ
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(recorded, indent=0), encoding="utf-8")
    return recorded


def record(out: Path, names: list[str], engine: str, seed: int, ranks: int) -> None:
    """Record schedules, except those that this code does not have."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for name in names:
            try:
                SCHEDULES[name].callbacks()
            except (AttributeError, TypeError, UsageError) as error:
                print(f"{name}: skipped, {error}", flush=True)
                continue
            began = time.perf_counter()
            differs = record_schedule(name, out, model, engine, seed, ranks)["resumed_differs_in"]
            said = f"; resumed differs in {', '.join(differs)}" if differs else ""
            print(f"{name}: {time.perf_counter() - began:.1f} s{said}", flush=True)


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two records differ, in order: the place and the two values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            at = f"{path}[{key!r}]"
            if key in old and key in new:
                yield from differences(old[key], new[key], at)
            else:
                yield at, old.get(key, "(not there)"), new.get(key, "(not there)")
    elif isinstance(old, list) and isinstance(new, list):
        for i, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from differences(one, other, f"{path}[{i}]")
        if len(old) != len(new):
            yield f"len({path})", len(old), len(new)
    elif json.dumps(old) != json.dumps(new):  # NaN equals itself, 0.0 is not -0.0
        yield path, old, new


def rename(record: Any, names: dict[str, str]) -> Any:
    """The record with other names of metrics, columns and files; what has none is left out."""
    if isinstance(record, dict):
        named = {names.get(key, key): rename(value, names) for key, value in record.items()}
        return {key: value for key, value in named.items() if key}
    if isinstance(record, list):
        kept = [v for v in record if not isinstance(v, str) or names.get(v) != ""]
        return [names.get(v, v) if isinstance(v, str) else rename(v, names) for v in kept]
    return record


def view(run: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Some keys of a run, or parts of its completions."""
    seen = {key: run[key] for key in keys if key not in PARTS}
    for key in PARTS.keys() & set(keys):
        seen[key] = [
            [
                [g["prompt"]["uid"], [[c[k] for k in PARTS[key]] for c in g["completions"]]]
                for g in groups
            ]
            for groups in (round["groups"] for round in run["rounds"])
        ]
    return seen


def compare(
    old: Path,
    new: Path,
    renamed: dict[str, str] | None = None,
    keys: list[str] | None = None,
    names: list[str] | None = None,
) -> bool:
    """Whether two recordings, or what they have of `names`, are equal; prints where they differ."""
    files = names or sorted({path.stem for folder in (old, new) for path in folder.glob("*.json")})
    equal = bool(files)
    for name in files:
        paths = old / f"{name}.json", new / f"{name}.json"
        if missing := [path.parent for path in paths if not path.exists()]:
            print(f"{name}: not in {missing[0]}")
            equal = False
            continue
        before, after = (json.loads(path.read_text("utf-8")) for path in paths)
        before = rename(before, renamed or {})
        kinds = {"whole", "resumed"} & before.keys()
        for kind in kinds:  # the list is sorted by name
            before[kind]["left_out"].sort()
        if keys:
            before, after = (
                {kind: view(of[kind], keys) for kind in kinds} for of in (before, after)
            )
        found = list(differences(before, after))
        if not found:
            print(f"{name}: equal")
            continue
        equal = False
        where, one, other = found[0]
        print(f"{name}: {len(found)} differences, first {where}: {one!r} -> {other!r}")
        places = Counter(re.sub(r"\['(whole|resumed)'\]|\[\d+\]", "", at) for at, *_ in found)
        for place, times in places.items() if len(places) > 1 else ():
            print(f"    {times} in {place}")
    return equal


def against(given: argparse.Namespace) -> bool:
    """Record a revision, where that is still to be done, and this code; compare them."""
    root = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(root)]
    commit = subprocess.check_output([*git, "rev-parse", f"{given.revision}^{{commit}}"], text=True)
    tool = [*map(Path(__file__).with_name, ("schedules.py", "character_tokenizer.py")), __file__]
    cpu = re.findall("model name.*", Path("/proc/cpuinfo").read_text())[:1]
    how = [f"--engine={given.engine}", f"--seed={given.seed}", f"--ranks={given.ranks}"]
    made_by = [commit, how, cpu, *(Path(path).read_text("utf-8") for path in tool)]
    kept = root / "runs" / "recordings" / hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]
    asked = given.only or [*SCHEDULES]
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "new")
        for path in tool:
            shutil.copy(path, folder)
        archive = subprocess.check_output([*git, "archive", commit.strip(), "lit_rlsched"])
        before = Path(folder, "before")  # not beside this file: Python looks there first
        before.mkdir()
        subprocess.run(["tar", "-x", "-C", before], input=archive, check=True)
        missing = [name for name in asked if not (kept / f"{name}.json").exists()]
        for code, out, names in ((before, kept, missing), (root, new, asked)):
            if names:
                print(f"What {code} does, recorded in {out}:", flush=True)
                command = [sys.executable, Path(folder, "record_schedules.py"), "record", out, *how]
                environ = os.environ | {"PYTHONPATH": str(code), "RECORDS": str(code)}
                command += ["--only", *names]
                # processes of engines look into the folder that they start in first
                subprocess.run(command, env=environ, cwd=code, check=True)
        both = [n for n in asked if all((of / f"{n}.json").exists() for of in (kept, new))]
        return bool(both) and compare(kept, new, given.renamed, given.keys, both)


def main(arguments: list[str]) -> int:
    recording, comparing = (argparse.ArgumentParser(add_help=False) for _ in range(2))
    recording.add_argument("--only", nargs="+", choices=SCHEDULES, metavar="NAME")
    recording.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    recording.add_argument("--seed", type=int, default=1)
    recording.add_argument("--ranks", type=int, default=1)
    comparing.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW")
    comparing.add_argument("--keys", nargs="+")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", parents=[recording]).add_argument("out", type=Path)
    comparison = commands.add_parser("compare", parents=[comparing])
    comparison.add_argument("old", type=Path)
    comparison.add_argument("new", type=Path)
    commands.add_parser("against", parents=[recording, comparing]).add_argument("revision")
    given = parser.parse_args(arguments)
    if given.command != "record":
        given.renamed = dict(pair.split("=", 1) for pair in given.renamed)
    if given.command == "compare":
        return 0 if compare(given.old, given.new, given.renamed, given.keys) else 1
    if given.command == "against":
        return 0 if against(given) else 1
    if not Path(lit_rlsched.__file__).is_relative_to(code := os.environ.get("RECORDS", "/")):
        raise RuntimeError(f"{lit_rlsched.__file__} is imported, not what is in {code}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    record(given.out, given.only or list(SCHEDULES), given.engine, given.seed, given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
