"""The JSON Schema of configuration files, which editors use."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILE = ROOT / "lit_rlsched/lit-rlsched.schema.json"
CHECK = jsonschema.Draft202012Validator(json.loads(FILE.read_text()))
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*/*.md")]
BLOCKS = {
    f"{page.name}-{number}": block
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)
    )
}
FILES = {
    path.name: path.read_text() for path in ROOT.glob("configs/*.yaml") if path.stem != "sweep"
}


def complaints(text: str) -> list[str]:
    return [error.message for error in CHECK.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("name", [*FILES, *BLOCKS])
def test_what_is_shown_is_valid(name: str) -> None:
    assert not complaints((FILES | BLOCKS)[name])


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(CHECK.schema)
    assert len(FILES) > 10 and len(BLOCKS) > 5


@pytest.mark.parametrize(
    "wrong",
    [
        "modell: {}",
        "data: {num_generation: 8}",
        "data: {num_generations: eight}",
        "model: {class_path: GRPOModule, init_args: {lora_rang: 8}}",
        "model: {class_path: GRPOModule, init_args: {loss_type: ppo}}",
        "model: {class_path: GRPOModul}",
        "trainer: {max_epoch: 8}",
        "trainer: {callbacks: [{class_path: MicroGroupSampling, init_args: {slot: 8}}]}",
        "trainer: {callbacks+: [{class_path: MicroGroupSamplin}]}",
        "trainer: {callbacks: [{class_path: lit_rlsched.callbacks.RNGState, init_args: {a: 1}}]}",
        "data: {engine: {class_path: VLLMEngine, init_args: {gpu_memory_utilisation: 0.4}}}",
    ],
)
def test_what_is_wrong_is_not(wrong: str) -> None:
    assert complaints(wrong)


def test_other_classes_are_accepted_by_their_import_path() -> None:
    assert not complaints("trainer: {callbacks: [{class_path: mine.Callback, init_args: {a: 1}}]}")
    assert not complaints("data: {reward_funcs: [mine.reward, {class_path: mine.Judge}]}")


def pinned(package: str) -> bool:
    """Whether the installed version is that of `requirements/cpu.txt`."""
    return f"{package}=={version(package)}\n" in (ROOT / "requirements/cpu.txt").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(pinned, ("jsonargparse", "lightning"))), reason="another parser or Trainer"
)
def test_it_is_up_to_date() -> None:
    """If not: `python scripts/config_schema.py`."""
    code = "import json; from config_schema import config_schema as s; print(json.dumps(s()))"
    command = [sys.executable, "-c", code]
    env: dict[str, Any] = {"cwd": ROOT / "scripts", "text": True, "stdout": subprocess.PIPE}
    shown = subprocess.run(command, check=True, timeout=240, **env).stdout
    assert json.loads(shown.splitlines()[-1]) == CHECK.schema
