"""Record what runs do, schedule by schedule, and compare two recordings bit for bit.

`record_schedules.py record OUT [--only NAME ...] [--engine transformers|vllm] [--seed N]` writes
one JSON file per schedule. `record_schedules.py compare OLD NEW [--renamed old=new ...]` prints for
each schedule `equal` or the first difference, and exits with 1 if there is any. For changes of the
code that must not change what it does: record before, record after, compare.

Each schedule runs for five rounds, once from beginning to end and once in pieces: it is stopped by
SIGTERM at the places in `Schedule.stops` and resumed from the checkpoint of `RoundCheckpoint`. The
task is a small one, a random model of two layers that is rewarded for digits: the quick task's own
model is too slow for this many runs, and a random one earns no reward there.

Only the public interface is used, so that this file and `schedules.py` run on the code before and
after a change.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import argparse
import hashlib
import json
import logging
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from character_tokenizer import CHARACTERS, SPECIAL, make_tokenizer
from lightning import Trainer, seed_everything
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from schedules import ROWS, SCHEDULES, SETTINGS, Schedule, coin, digits
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_rlsched import RolloutDataModule, engines
from lit_rlsched.callbacks import (
    CompletionWriter,
    RNGState,
    RolloutCallback,
    RolloutLogger,
    RoundCheckpoint,
)
from lit_rlsched.scheduling.trace_files import Traces

ROUNDS = 5
TIMED = re.compile(
    r"^time/|seconds|per_second|/bubble_ratio$|^rollout/ahead_steps$|^streamed_training/"
)
"""Metrics that follow the clock. Only their names are recorded."""
LEFT_OUT_OF_TRACES = ("start", "end", "seconds")
"""Columns of a trace that are times."""


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


class Recorder(RolloutCallback):
    """Writes down what a run does; what it has so far is in the checkpoint."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"plans": [], "rounds": [], "metrics": [], "left_out": []}
        self.record |= {"weights": [], "hooks": []}
        self._ended: dict[str, Counter[str]] = {"completions": Counter(), "groups": Counter()}

    def note(self, metrics: dict[str, float], step: int | None) -> None:
        """What loggers get."""
        left_out = {name for name in metrics if TIMED.search(name)}
        self.record["left_out"] = sorted(left_out.union(self.record["left_out"]))
        kept = {name: value for name, value in sorted(metrics.items()) if name not in left_out}
        self.record["metrics"].append({"step": step, **kept})

    def on_round_start(self, trainer, pl_module, plan):
        self._ended["groups"].clear()
        del self.record["plans"][len(self.record["rounds"]) :]  # begun once more after a stop
        self.record["plans"].append([describe_group(group) for group in plan])

    def on_completion_end(self, trainer, pl_module, completion):
        self._ended["completions"][_drawn(completion)] += 1

    def on_group_end(self, trainer, pl_module, group):
        self._ended["groups"][group.id] += 1

    def on_round_end(self, trainer, pl_module, round):
        groups = [describe_group(group) for group in round.groups]
        self.record["rounds"].append(
            {"number": round.number, "version": round.version, "groups": groups}
        )
        # Hooks come when scores come: what loses a race may have none, and what waits in a pool may
        # get its own in an earlier round. So only what is here, in this order, since the run began.
        here = {
            "completions": [_drawn(c) for group in round.groups for c in group.completions],
            "groups": [group.id for group in round.groups],
        }
        times = {name: [self._ended[name][key] for key in keys] for name, keys in here.items()}
        self.record["hooks"].append({"round": round.number, **times})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        weights, step = self.record["weights"], trainer.global_step
        if weights and weights[-1][0] == step:  # micro-batches of one optimizer step
            weights.pop()
        weights.append([step, hash_of_weights(pl_module)])

    def state_dict(self):
        return {"record": json.dumps(self.record)}

    def load_state_dict(self, state_dict):
        self.record = json.loads(state_dict["record"])


class RecordingLogger(Logger):
    """Hands what is logged to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    name, version = "recording", 0

    def log_metrics(self, metrics, step=None):
        self.recorder.note({name: float(value) for name, value in metrics.items()}, step)

    def log_hyperparams(self, *args, **kwargs):
        pass


class Stop(RolloutCallback):
    """Sends SIGTERM to its own process at a place such as `completion 1 5`."""

    def __init__(self, place: str, recorder: Recorder) -> None:
        self.recorder = recorder
        self.event, number, times = [*place.split(), "1"][:3]
        self.number, self.times, self.seen, self.reached = int(number), int(times), 0, False

    def _at(self, event: str) -> None:
        number = len(self.recorder.record["plans"]) - 1
        if event == self.event and number == self.number and not self.reached:
            self.seen += 1
            if self.seen == self.times:
                self.reached = True
                signal.raise_signal(signal.SIGTERM)  # handled before this returns

    def on_completion_end(self, trainer, pl_module, completion):
        self._at("completion")

    def on_round_end(self, trainer, pl_module, round):
        self._at("round_end")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._at("step")

    def on_train_epoch_end(self, trainer, pl_module):
        self._at("epoch_end")

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self._at("validation")


def hash_of_weights(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _drawn(completion: Any) -> str:
    return json.dumps([completion.index, list(completion.token_ids), list(completion.logprobs)])


def describe(completion: Any) -> dict[str, Any]:
    """All of a completion that is deterministic. JSON writes numbers so that they read back."""
    c = completion
    draft = c.draft and [list(c.draft.token_ids), list(c.draft.logprobs), c.draft.versions[0]]
    return {
        "index": c.index,
        "token_ids": list(c.token_ids),
        "text": c.text,
        "finish_reason": c.finish_reason,
        "version_spans": [list(span) for span in c.segments],
        "scores": c.scores,
        "extra": c.extra,
        "logged": c.logged,
        "dropped": c.dropped,
        "advantage": c.advantage,
        "attempts": c.attempts,
        "logprobs": list(c.logprobs),
        "old_logprobs": c.old_logprobs and list(c.old_logprobs),
        "ref_logprobs": c.ref_logprobs and list(c.ref_logprobs),
        "draft": draft,
    }


def describe_group(group: Any) -> dict[str, Any]:
    return {
        "id": group.id,
        "uid": group.prompt.uid,
        "prompt": group.prompt.text,
        "prompt_ids": list(group.prompt.token_ids),
        "deferred": group.deferred,
        "completions": [describe(completion) for completion in group.completions],
    }


def read_traces(folder: Path) -> dict[str, Any]:
    """What ran when, counted in steps."""
    traces, tables = Traces(folder), {}
    for name in ("spans", "steps", "updates"):
        columns = traces.table(name).to_pydict()
        kept = {k: v for k, v in sorted(columns.items()) if k not in LEFT_OUT_OF_TRACES}
        if kept:
            tables[name] = kept
    return tables


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(
    schedule: Schedule, model: str, folder: Path, engine: str, seed: int, stops: tuple[str, ...]
) -> dict[str, Any]:
    """The record of one run, stopped and resumed at each of `stops` on its way."""
    ckpt_path: Path | None = None
    stopped_at = []
    for place in (*stops, None):
        seed_everything(seed, verbose=False)
        decoder: Any = {"transformers": "TransformersEngine", "vllm": "VLLMEngine"}[engine]
        decoder = getattr(engines, decoder)()
        settings: dict[str, Any] = SETTINGS | schedule.data
        if schedule.held_out:
            settings["val_data"] = ROWS[42:]
            settings["predict_data"] = [{"prompt": row["prompt"]} for row in ROWS[40:44]]
        data = RolloutDataModule(
            ROWS[:42],
            [{"digits": digits, "coin": coin}[settings.pop("reward_funcs", "digits")]],
            engine=engines.ProcessEngine(decoder) if schedule.own_process else decoder,
            **settings,
        )
        steps = settings.get("steps_per_round", 1) * settings.get("num_iterations", 1)
        steps = schedule.trainer.get("limit_train_batches", steps)
        recorder, checkpoints = Recorder(), RoundCheckpoint(max_share=1e-9)
        stop = [] if place is None else [Stop(place, recorder)]
        trainer = Trainer(
            accelerator="cpu",
            max_steps=ROUNDS * steps,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            logger=RecordingLogger(recorder),
            callbacks=[
                RNGState(),
                *schedule.callbacks(),
                RolloutLogger(num_completions=1000),
                CompletionWriter(),
                recorder,
                *stop,
                checkpoints,
            ],
            **{"num_sanity_val_steps": 0, **schedule.trainer},
        )
        module = schedule.module(model)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        except SIGTERMException:
            if not (stop and stop[0].reached):
                raise RuntimeError("SIGTERM came from elsewhere: record once more.") from None
            stopped_at.append([place, trainer.global_step, checkpoints.last_path.name])
            ckpt_path = checkpoints.last_path
        else:
            assert place is None, f"{place}: the run came to its end"
    if schedule.held_out:
        trainer.test(module, datamodule=data, verbose=False)
        trainer.predict(module, datamodule=data, return_predictions=False)
    if stops:
        del recorder.record["hooks"]  # some were called before a stop
    return {
        "stopped_at": stopped_at,
        "rounds_over": data.run.rounds_over,
        "weights_at_end": hash_of_weights(module),
        **recorder.record,
        "completions.jsonl": read_rows(folder / "completions.jsonl"),
        "predictions.jsonl": read_rows(folder / "predictions.jsonl"),
        "traces": read_traces(folder / "traces"),
        "files": sorted(
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.suffix not in (".parquet", "")
        ),
    }


def record_schedule(
    name: str, out: Path, model: str, engine: str = "transformers", seed: int = 1
) -> Path:
    """Run a schedule both ways and write the file."""
    schedule = SCHEDULES[name]
    recorded: dict[str, Any] = {"schedule": name, "engine": engine, "seed": seed}
    kinds: dict[str, tuple[str, ...]] = {"whole": ()}
    if schedule.stops:
        kinds["resumed"] = schedule.stops
    for kind, stops in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            recorded[kind] = run(schedule, model, Path(folder), engine, seed, stops)
    ours = ("rounds", "weights", "weights_at_end", "completions.jsonl", "metrics")
    recorded["resumed_differs_in"] = [
        key
        for key in ours
        if schedule.stops and [*differences(recorded["whole"][key], recorded["resumed"][key])]
    ]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(recorded, indent=0), encoding="utf-8")
    return path


def record(out: Path, names: list[str] | None, engine: str = "transformers", seed: int = 1) -> None:
    """Record schedules, all of them or, on vLLM, a few by default."""
    names = names or [n for n, s in SCHEDULES.items() if engine == "transformers" or s.vllm]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for name in names:
            began, cpu = time.perf_counter(), time.process_time()
            recorded = json.loads(record_schedule(name, out, model, engine, seed).read_text())
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
            differs = ", ".join(recorded["resumed_differs_in"])
            said = f"; resumed differs in {differs}" if differs else ""
            print(f"{name}: {took:.1f} s, {cpu:.1f} s of CPU{said}", flush=True)


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
    """The record with other names of metrics, wherever they stand."""
    if isinstance(record, dict):
        return {names.get(key, key): rename(value, names) for key, value in record.items()}
    if isinstance(record, list):
        renamed = [rename(value, names) for value in record]
        return [names.get(v, v) if isinstance(v, str) else v for v in renamed]
    return record


def compare(old: Path, new: Path, renamed: dict[str, str] | None = None) -> bool:
    """Whether two recordings are equal; prints the first difference of each schedule."""
    files = sorted({p.name for folder in (old, new) for p in folder.glob("*.json")})
    equal = bool(files)
    for name in files:
        if missing := [str(f) for f in (old, new) if not (f / name).exists()]:
            print(f"{Path(name).stem}: not in {missing[0]}")
            equal = False
            continue
        before, after = (json.loads((f / name).read_text("utf-8")) for f in (old, new))
        before = rename(before, renamed or {})
        for kind in {"whole", "resumed"} & before.keys():  # the list is sorted by name
            before[kind]["left_out"].sort()
        found = list(differences(before, after))
        if not found:
            print(f"{Path(name).stem}: equal")
            continue
        equal = False
        where, was, now = found[0]
        print(f"{Path(name).stem}: {len(found)} differences, first {where}: {was!r} -> {now!r}")
    return equal


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", nargs="+", choices=SCHEDULES, metavar="NAME")
    recording.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    recording.add_argument("--seed", type=int, default=1)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW")
    given = parser.parse_args(arguments)
    if given.command == "record":
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        record(given.out, given.only, given.engine, given.seed)
        return 0
    renamed = dict(pair.split("=", 1) for pair in given.renamed)
    return 0 if compare(given.old, given.new, renamed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
