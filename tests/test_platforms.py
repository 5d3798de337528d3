"""What is said where a part cannot run; other systems are imitated by `sys.platform`."""

import ast
import sys
from pathlib import Path

import pytest

import lit_rlsched
from lit_rlsched.cli.main import main
from lit_rlsched.engines import ProcessEngine, RayEngine, SimulatedEngine, VLLMEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.run.saving.run_folder import occupy
from lit_rlsched.settings import UsageError

UNIX = {"fcntl", "grp", "pwd", "resource", "termios"}
PACKAGE = Path(lit_rlsched.__file__).parent


@pytest.fixture
def one():
    def one(prompts, completions, completion_ids, **kwargs):
        return [1.0]

    return one  # a function of no module: else a worker would import all of this one


def test_nothing_of_unix_is_needed_to_import_a_module():
    """Else Windows gets a ModuleNotFoundError in place of the refusal."""
    for file in PACKAGE.rglob("*.py"):
        if "benchmark" in file.parts:
            continue
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", ())]
            assert not UNIX & {getattr(node, "module", None), *names}, file


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")


def test_windows_is_refused_by_the_command_line(windows, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--help"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: `lit-rlsched` cannot run on Windows. Use Linux, macOS")
    assert "Traceback" not in said


def test_windows_is_refused_by_each_part_when_it_starts(windows, one, tmp_path):
    spec = EngineSpec("none", 1, 8, (1,))
    with pytest.raises(UsageError, match="The reward workers cannot run on Windows"):
        RewardScheduler([one]).start()
    with pytest.raises(UsageError, match="`ProcessEngine` cannot run on Windows"):
        ProcessEngine(SimulatedEngine()).start(spec)
    with pytest.raises(UsageError, match="`RayEngine` cannot run on Windows"):
        RayEngine(SimulatedEngine()).start(spec)
    with pytest.raises(UsageError, match=r"`VLLMEngine` runs on Linux only, .* `win32`"):
        VLLMEngine().start(spec)
    with pytest.raises(UsageError, match="The lock of a run's folder cannot run on Windows"):
        occupy(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_macos_has_no_vllm(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match=r"`darwin`\. Choose .*engine=TransformersEngine"):
        VLLMEngine().start(EngineSpec("none", 1, 8, (1,)))


def test_macos_is_told_that_memory_has_no_limit(monkeypatch, one, recwarn):
    monkeypatch.setattr(sys, "platform", "darwin")
    said = r"`reward_memory_limit=1024MiB` has no effect: .* Linux only, and this is `darwin`"
    rewards = RewardScheduler([one], memory_limit="1GiB")
    with pytest.warns(UserWarning, match=said), rewards:
        rewards.submit("a", prompt="1+1=", completion="2", completion_ids=[4], columns={})
        assert rewards.wait(60)
        (job,) = rewards.poll()
        assert job.scores == [1.0]
    with RewardScheduler([one]):  # nobody asked for a limit
        pass
    assert not recwarn
