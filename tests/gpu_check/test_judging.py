"""A check that cannot fail is worth nothing: each is shown something broken, and fails."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.gpu_check import (
    decoding,
    environment,
    processes,
    real,
    runs,
    sleeping,
    transfers,
)
from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.gpu_check.setting import Setting
from benchmarks.gpu_check.training import Rounds, judge_rounds
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.types import Request

ASKED = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]


class Copying(TransformersEngine):
    """Has weights of its own, which it takes over at each sync."""

    def start(self, spec):
        self.own = copy.deepcopy(spec.policy)
        super().start(dataclasses.replace(spec, eos_token_ids=(), policy=self.own))
        self.turn = 0

    def sync_weights(self, named_tensors, version):
        named_tensors, self.turn = dict(named_tensors), self.turn + 1
        super().sync_weights(named_tensors.items(), version)
        with torch.no_grad():
            for name, parameter in self.own.named_parameters():
                parameter.copy_(named_tensors[name])


class Deaf(Copying):
    """Stays with the weights of the checkpoint."""

    def sync_weights(self, named_tensors, version):
        TransformersEngine.sync_weights(self, named_tensors, version)


def reseeded(request: Request, seed: int) -> Request:
    fields = {name: getattr(request, name) for name in Request.__slots__}
    return Request(**{**fields, "seed": seed})


class Fickle(Copying):
    """Draws otherwise after each sync."""

    def submit(self, requests):
        super().submit([reseeded(r, r.seed + 1000 * self.turn) for r in requests])


class Forgetful(Copying):
    """Goes on after a pause with other noise."""

    def submit(self, requests):
        super().submit([reseeded(r, r.seed + 1000 * bool(r.prefix_ids)) for r in requests])


def broken(found: Findings) -> list[str]:
    return [figure.name for figure in found.figures if figure.ok is False]


def started(kind, policy):
    engine = kind()
    engine.start(EngineSpec("", len(ASKED), 128, (), policy=policy))
    return engine


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Copying, []),
        (Deaf, ["mean log-prob gap"]),
        (Fickle, ["the same seeds draw the same tokens", "tokens after a pause as without one"]),
        (Forgetful, ["tokens after a pause as without one"]),
    ],
)
def test_draws(tiny_policy, kind, wrong):
    found, engine = Findings(), started(kind, tiny_policy)
    # the tightest limits let what is right pass, the loosest let nothing pass that is broken
    limits = (decoding.MEAN_GAP_BF16, 0.4) if wrong else (5e-3, 0.9)
    decoding.judge_draws(found, engine, tiny_policy, ASKED, *limits)
    assert broken(found) == wrong


class Hasty(Copying):
    """Keeps other tokens than it draws."""

    def step(self):
        events = super().step()
        for event in events:
            event.token_ids[0] ^= event.request_id.endswith("/again")
        return events


def test_the_quick_task_shows_weights_that_were_not_synced():
    """By its own model: a small step of its weights is more than the looser limit."""
    from lit_rlsched.training.policy import load_policy

    policy, found = load_policy(decoding.QUICK_TASK), Findings()
    engine = started(Deaf, policy)
    decoding.judge_draws(found, engine, policy, ASKED, decoding.MEAN_GAP_BF16, 0.4)
    assert broken(found) == ["mean log-prob gap"]


class Memory:
    """Of a fake GPU, on which an engine of 1,000 MiB sleeps."""

    def __init__(self, kept: int = 20, leak: int = 0):
        self.used, self.kept, self.leak = 500, kept, leak

    def __call__(self) -> int:
        return self.used * 2**20


class Sleeper(Copying):
    def set(self, memory: Memory, spoils: bool = False):
        self.memory, self.spoils, self.cycle = memory, spoils, 0
        return self

    def wake(self):
        self.memory.used = 1500 + self.memory.leak * self.cycle

    def sleep(self):
        self.cycle += 1
        self.memory.used = 500 + self.memory.kept + self.memory.leak * self.cycle
        if self.spoils:
            self.turn += 1000

    def submit(self, requests):
        spoilt = self.turn // 1000
        super().submit([reseeded(r, r.seed + spoilt) for r in requests])


@pytest.mark.parametrize(
    ("memory", "spoils", "wrong"),
    [
        (Memory(), False, []),
        (Memory(kept=1000), False, ["given back asleep, in every cycle"]),
        (Memory(leak=20), False, ["drift awake", "drift asleep"]),
        (Memory(), True, ["every cycle draws the same tokens"]),
    ],
    ids=["frees", "frees nothing", "leaks", "spoils the cache"],
)
def test_sleep(tiny_policy, memory, spoils, wrong):
    found, engine = Findings(), started(Sleeper, tiny_policy).set(memory, spoils)
    before = memory()
    sleeping.judge_cycles(found, engine, tiny_policy, ASKED, memory, before)
    assert broken(found) == wrong


def test_runner_and_backend():
    good = {
        "runner": "vllm.v1.worker.gpu.model_runner",
        "backends": ["TRITON_ATTN"],
        "graphs": "FULL_AND_PIECEWISE",
    }

    def judged(dtype="fp32", **other):
        found = Findings()
        decoding.judge_runner(found, {**good, **other}, "cuda", dtype, True)
        return broken(found)

    assert judged() == []
    assert judged(runner="vllm.v1.worker.gpu_model_runner") == ["model runner"]
    assert judged(backends=["FLASH_ATTN"]) == ["attention backend"]  # it takes no fp32
    assert judged(backends=["FLASH_ATTN"], dtype="bf16") == []
    assert judged(backends=[]) == ["attention backend"]
    assert judged(graphs="NONE") == ["CUDA graphs are captured"]


def rounds(**columns) -> Rounds:
    recorder = Rounds()
    good = {"loss": 0.1, "sampling/sampling_logp_difference/mean": 0.01, "sync/max_logp_diff": 0.1}
    recorder.figures = [{**good, **columns} for _ in range(3)]
    return recorder


def judged_rounds(recorder: Rounds) -> list[str]:
    found = Findings()
    judge_rounds(found, recorder, 3, 0.05)
    return broken(found)


def test_rounds():
    gap = "sampling/sampling_logp_difference/mean"
    worst = "mean log-prob gap of what was drawn, in the worst round"
    assert judged_rounds(rounds()) == []
    assert judged_rounds(rounds(loss=math.nan)) == ["every loss is finite"]
    assert judged_rounds(rounds(**{gap: 0.2})) == [worst]
    assert judged_rounds(rounds(**{gap: math.nan})) == [worst]
    short = rounds()
    short.figures.pop()
    assert judged_rounds(short) == ["rounds"]
    assert judged_rounds(Rounds()) == ["rounds", "every loss is finite", worst]


def test_quickstart():
    def judged(*accuracy, gap=0.001):
        figures = {
            "loss": [0.1] * 10,
            "sampling/sampling_logp_difference/mean": [gap] * 10,
            "sampling/sampling_logp_difference/max": [gap] * 10,
            "sync/max_logp_diff": [gap] * 10,
            "val/accuracy": list(accuracy),
        }
        found = Findings()
        runs.judge_quickstart(found, figures, 10, "cuda", "32-true")
        return broken(found)

    assert judged(0.43, 0.55) == []
    assert judged(0.2, 0.3) == ["held-out accuracy of the untrained model"]
    assert judged(0.43, 0.2) == ["held-out accuracy after training"]
    assert judged(0.43, 0.5, gap=0.02) == [
        "mean log-prob gap of what was drawn, in the worst round"
    ]


def test_speed_memory_and_processes():
    found = Findings()
    real.judge_speed(found, {256: 9000.0, 512: 14000.0, 1024: 20000.0}, 2000.0)
    real.judge_peak(found, 10.0 * 2**30, 9 * 2**30)
    processes.judge_process(found, 0, 3, [(0.5, 10**9)])
    assert broken(found) == []
    real.judge_speed(found, {256: 900.0, 512: 800.0, 1024: 700.0}, 2000.0)
    real.judge_peak(found, 20.0 * 2**30, 9 * 2**30)
    real.judge_peak(found, 2.0 * 2**30, 9 * 2**30)
    processes.judge_process(found, 1, 2, [(0.5, 10**9)])
    assert broken(found) == [
        "tokens/s with 256 slots",
        "tokens/s with 1024 slots over those with 256",
        "over the estimate",
        "over the estimate",
        "wakes",
        "restarts of the engine's process",
    ]


def test_weights_that_arrive_late_or_not_at_all(tiny_model, tiny_policy, monkeypatch, tmp_path):
    def judged(engine):
        monkeypatch.setattr(transfers, "load_policy", lambda *args: copy.deepcopy(tiny_policy))
        monkeypatch.setattr(transfers, "shape_model", lambda *args: tiny_model)
        monkeypatch.setattr(transfers, "spec_of", lambda *args: spec)
        found, spec = Findings(), EngineSpec(tiny_model, 16, 256, (), policy=tiny_policy)
        transfers.measure(Setting("cpu", str(tmp_path), ""), found, engine, 0, 0.0)
        assert "through host memory" in found.skipped
        return broken(found)

    assert judged(Copying()) == []
    assert judged(Deaf()) == ["mean log-prob gap of the worst engine"]
    found = Findings()
    for limit in (0.3, 0.2):
        transfers.judge_sync(found, [0.1, 0.25], 10**9, limit)
    assert broken(found) == ["weight sync"]


def test_checks_of_several_gpus_name_what_is_missing(monkeypatch, tmp_path):
    gpu = Setting("cuda", str(tmp_path), "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for check, message in (
        (lambda: transfers.transfer(gpu, Findings(), "nccl"), "needs 2 GPUs, and .* has 1"),
        (lambda: transfers.ranks(gpu, Findings(), "ipc"), "needs 2 GPUs"),
        (lambda: transfers.ranks(gpu, Findings(), "nccl"), "needs 4 GPUs"),
        (lambda: transfers.nodes(gpu, Findings()), "`RAY_ADDRESS`"),
    ):
        with pytest.raises(Skip, match=message):
            check()


def test_rotary_frequencies(tiny_policy):
    def judged(module: nn.Module) -> list[str]:
        found = Findings()
        real.judge_rotary(found, SimpleNamespace(module=module))
        return broken(found)

    assert judged(tiny_policy) == []
    assert judged(tiny_policy.to(torch.bfloat16)) == ["rotary frequencies are fp32"]
    assert judged(nn.Linear(2, 2)) == ["rotary frequencies are fp32"]  # nothing was looked at


@pytest.mark.parametrize(
    ("said", "wrong"),
    [("580.95.05", []), ("550.54", ["driver branch"]), (None, ["driver branch"])],
)
def test_a_driver_that_is_too_old_for_torch(monkeypatch, said, wrong):
    monkeypatch.setattr(environment, "driver", lambda: said)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = Findings()
    environment.see_driver(found)
    assert broken(found) == wrong


def test_completions_that_differ(tmp_path):
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    line = '{"round": 0, "prompt": "a", "completion": "%s"}\n'
    ours.write_text(line % "x" + line % "y")
    theirs.write_text(line % "y" + line % "x")
    assert runs.same_completions(ours, theirs) == 1.0
    theirs.write_text(line % "y" + line % "z")
    assert runs.same_completions(ours, theirs) == pytest.approx(1 / 3)
