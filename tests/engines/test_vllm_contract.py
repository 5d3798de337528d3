"""What the engine touches of vLLM is there in every release allowed, and in the newest beyond."""

import json
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest
import torch
import vllm_contract
from foreign_attributes import foreign_uses
from packaging.specifiers import SpecifierSet
from vllm_contract import (
    Touch,
    gaps,
    installed,
    misfits,
    newest_beyond,
    recorded,
    requirement,
    touches,
)

import lit_rlsched
from lit_rlsched.engines._vllm_args import engine_args
from lit_rlsched.engines._vllm_guest import import_vllm
from lit_rlsched.engines.spec import AdapterSpec, EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine

RECORD: vllm_contract.Record = json.loads(vllm_contract.RECORD.read_text())
PACKAGE = Path(lit_rlsched.__file__).parent
CODE = (
    "vllm",
    "_vllm_guest",
    "_vllm_worker",
)
"""Modules of `lit_rlsched.engines` that reach into vLLM."""

OURS = {"kept_noise", "lit_rlsched_noise"}
PLAIN = {"clear", "get", "items", "keys", "ravel", "removeprefix", "startswith", "tolist", "values"}
PLAIN |= {"any", "max", "new_zeros", "get_state", "set_state"}
"""Methods of dictionaries, strings, arrays and torch's generators."""
MODEL = {"head_dim", "hidden_size", "num_attention_heads", "kv_lora_rank"}
"""Of configurations of transformers."""
NAMESPACE = {
    "CPUAttentionBackend",
    "EngineArgs",
    "LLMEngine",
    "SamplingParams",
}
"""Classes and modules on the way to what is touched."""
BY_FRAME_OR_TYPE = {
    "MultiprocExecutor.workers",
    "MultiprocExecutor.shutdown",
    "VocabParallelEmbedding.quant_method",
    "UnquantizedEmbeddingMethod.process_weights_after_loading",
    "GPUModelRunner.reload_weights",  # called by the worker with what the worker is given
    "GroupCoordinator.destroy",
    "PyNcclCommunicator.broadcast",  # by the trainer, in `weight_transfer.py`, as all below
    "PyNcclCommunicator.destroy",
    "NCCLWeightTransferInitInfo",
    "NCCLWeightTransferUpdateInfo",
}
"""Touched where the code does not say whose they are."""

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def test_every_allowed_release_has_what_the_engine_touches() -> None:
    assert not gaps(RECORD, touches(), requirement().specifier)


def test_so_has_the_newest_release_beyond() -> None:
    """If not: put the problems here, and into docs/howto/gpu.md, before the range is raised."""
    beyond = newest_beyond(RECORD["released"].split(), requirement().specifier)
    assert beyond == [*RECORD["beyond"]], "run `python tests/vllm_contract.py`"
    assert misfits(RECORD, touches(), beyond) == []
    text = (PACKAGE.parent / "docs" / "howto" / "gpu.md").read_text()
    for newest, builds in RECORD["beyond"].items():
        assert "vllm" in builds.split()
        assert f"**vLLM {newest}**" in text


@pytest.mark.parametrize(
    ("allowed", "beyond"),
    [(">=0.1,<0.3", ["0.3.0"]), (">=0.1,<0.4", []), (">=0.1,<0.2", ["0.3.0"])],
)
def test_the_newest_beyond_is_what_the_range_excludes(allowed: str, beyond: list[str]) -> None:
    assert newest_beyond(["0.1.2", "0.2.0", "0.3.0"], SpecifierSet(allowed)) == beyond


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        ("def add(id) -> str: return id", True),
        ("def add(id): return id", False),
        ("def add(id) -> None: ...", False),
        ("add = None", False),
    ],
    ids=["as declared", "not annotated", "returns nothing", "no function"],
)
def test_what_a_call_returns_is_part_of_it(tmp_path: Path, source: str, fits: bool) -> None:
    (tmp_path / "engine.py").write_text(source)
    found = vllm_contract.Source(tmp_path).find(touch := Touch("engine", "add(id) -> str"))
    assert touch.holds(found) is fits
    assert ("-> str" in str(found)) is fits


SLEEP = Touch("vllm.v1.engine.llm_engine", "LLMEngine.sleep(level=)")
KIND = "(level=1, mode='abort')"


def small_record(kinds: dict[str, str]) -> vllm_contract.Record:
    return {"released": "0.1.2 0.2.0 0.3.0", "found": {str(SLEEP): kinds}}


@pytest.mark.parametrize(
    ("kinds", "allowed", "problem"),
    [
        ({KIND: "0.1.2 0.2.0"}, ">=0.1.2,<0.3", ""),
        ({KIND: "0.1.2 0.2.0 0.3.0"}, ">=0.1.2,<0.5", "no release of 0.4 is recorded"),
        ({KIND: "0.1.2 0.2.0"}, ">=0.1.0,<0.3", "0.1.0, the oldest that is allowed, is not rec"),
        ({KIND: "0.1.2"}, ">=0.1.2,<0.3", "0.2.0 has no vllm.v1.engine.llm_engine:LLMEngine.sleep"),
        ({KIND: "0.1.2", "(depth=1)": "0.2.0"}, ">=0.1.2,<0.3", "0.2.0 cannot take LLMEngine.sle"),
        ({KIND: "0.1.2", "(level, tags)": "0.2.0"}, ">=0.1.2,<0.3", "0.2.0 cannot take"),
        ({KIND: "0.1.2", "attribute": "0.2.0"}, ">=0.1.2,<0.3", "0.2.0 cannot take"),
        ({}, ">=0.1.2,<0.3", "0.1.2 has no"),
    ],
    ids=["fits", "newer", "older", "gone", "renamed", "more to give", "no method", "not recorded"],
)
def test_a_gap_is_named(kinds: dict[str, str], allowed: str, problem: str) -> None:
    found = gaps(small_record(kinds), [SLEEP], SpecifierSet(allowed))
    assert found[0].startswith(problem) if problem else not found


@needs_vllm
@pytest.mark.parametrize("touch", touches(), ids=lambda touch: f"{touch.module}.{touch.path}")
def test_the_installed_release_is_as_recorded(touch: Touch) -> None:
    source = installed()
    assert source is not None
    found = source.find(touch)
    assert touch.holds(found)
    assert found == recorded(RECORD, touch, installed_version())


def installed_version() -> str:
    for build in vllm_contract.BUILDS:
        try:
            return version(build)
        except PackageNotFoundError:
            pass
    raise AssertionError("vLLM has no version")


@needs_vllm
@pytest.mark.slow
def test_what_runs_is_what_was_read() -> None:
    """The package's lazy namespace and its decorators hand out what the sources say."""
    vllm = import_vllm()
    for touch in touches():
        if touch.call and touch.module.startswith(("vllm.v1.engine.llm", "vllm.v1.core")):
            owner, _, name = touch.path.partition(".")
            live = getattr(getattr(import_module(touch.module), owner), name)
            read = recorded(RECORD, touch, installed_version())
            assert read is not None
            assert [p for p in signature(live).parameters if p != "self"] == [
                *vllm_contract.signature(read).parameters
            ]
    for name in ("LLMEngine", "EngineArgs", "SamplingParams"):
        module = next(t.module for t in touches() if t.path.partition(".")[0] == name)
        assert getattr(vllm, name) is getattr(import_module(module), name)


def test_the_engine_touches_nothing_else() -> None:
    calls = {(t.path.rpartition(".")[2], shape(t)) for t in touches() if t.call}
    names = {t.path.rpartition(".")[2] for t in touches()} | NAMESPACE | OURS | MODEL
    names |= {keyword for t in touches() for keyword in t.keywords}
    for file in CODE:
        for name, call in foreign_uses((PACKAGE / f"engines/{file}.py").read_text(), "vllm"):
            known = name in names if call is None else (name, call) in calls or name in PLAIN
            assert known or name in NAMESPACE, (
                f"{file}.py touches `{name}` of vLLM, which `tests/vllm_touched.py` does not have: "
                "add it, then run `python tests/vllm_contract.py`."
            )


def shape(touch: Touch) -> tuple[int, frozenset[str]]:
    return len(touch.call.args) if touch.call else 0, frozenset(touch.keywords)


def test_nothing_is_declared_that_nobody_touches() -> None:
    code = [(PACKAGE / f"engines/{file}.py").read_text() for file in CODE]
    used = {name for text in code for name, _ in foreign_uses(text, "vllm")}
    for touch in touches():
        name = touch.path.rpartition(".")[2]
        text = f'"{name}"' in "".join(code)
        assert name in used or text or touch.path in BY_FRAME_OR_TYPE, f"{touch} is not used"


def test_nothing_else_imports_vllm() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "engines" or path.stem not in CODE:
            text = path.read_text()
            assert 'import_module("vllm' not in text, path
            assert not re.search(r"^\s*(from|import) vllm", text, re.MULTILINE), path


def test_engine_arguments_and_sampling_parameters_are_declared(
    tiny_model: str,
) -> None:
    declared = {t.path: set(t.keywords) for t in touches() if t.path.count(".") == 0}
    given: set[str] = set()
    adapters = AdapterSpec(4, ("q_proj",), 1000)
    for device, size in (("cpu", 1), ("cpu", 2), ("cuda:0", 1)):
        spec = EngineSpec(tiny_model, 4, 128, (1,), device=torch.device(device), adapters=adapters)
        engine = VLLMEngine(tensor_parallel_size=size, enable_lora=True)
        engine.weight_transfer = "nccl"
        given |= set(engine_args(engine, spec))
    assert given == declared["EngineArgs"]


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("def f(self, output: Any):\n    return output.outputs[0].token_ids", "token_ids"),
        ("def f(self):\n    for r in import_module('vllm.x').queue:\n        r.tries", "tries"),
        ("def f(self):\n    self.a = import_module('vllm.x')\ndef g(self):\n    self.a.b", "b"),
        (
            "@property\ndef live(self) -> Any: ...\ndef f(self):\n    x = [self.live.s]\n    "
            "return {y.z for y in list(self.live.t)}",
            "z",
        ),
        ("def f(worker: Any):\n    getattr(worker, 'deep', None)", "deep"),
    ],
)
def test_new_touches_are_seen(code: str, use: str) -> None:
    assert use in {name for name, _ in foreign_uses(code, "vllm")}
    assert use not in {name for name, _ in foreign_uses(code.replace("Any", "int"), "other")}
