"""Reward workers in memory cgroups, where this user may make them."""

import os
from pathlib import Path

import pytest
import reward_cases as cases
from harness import alive, collect, score, submit, wait_until

from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.rewards import worker_process as process
from lit_rlsched.rewards.cgroup import PREFIX, remove_leftovers, writable_cgroup

GOOD = ["a" * n for n in range(1, 11)]
FOLDER = writable_cgroup()
needs_cgroup = pytest.mark.skipif(
    FOLDER is None,
    reason="no cgroup v2 with the memory controller in which this user may make others "
    "(`systemd-run --user --scope` starts a command in one)",
)


@pytest.fixture
def no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel alone."""
    monkeypatch.setattr(process.WorkerProcess, "check_memory", lambda worker: None)


@needs_cgroup
@pytest.mark.usefixtures("no_watch")
@pytest.mark.parametrize(
    "way", ["mapped", "written to a memfd", "a mapped memfd", "eight processes"]
)
def test_the_kernel_ends_a_worker_that_shares_too_much(way: str) -> None:
    jobs, counters = score(
        [cases.share], [*GOOD[:5], way, *GOOD[5:]], memory_limit="256MiB", timeout=60.0
    )
    assert jobs.pop(way).failures == ["out_of_memory: its cgroup has a limit of 256 MiB"]
    assert {text: job.scores for text, job in jobs.items()} == {g: [float(len(g))] for g in GOOD}
    assert counters.pop("rewards/share/out_of_memory") == 1 and not any(counters.values())
    assert FOLDER is not None and not list(FOLDER.glob(f"{PREFIX}*"))


@needs_cgroup
def test_a_daemon_that_hides_ends_with_its_worker(tmp_path: Path) -> None:
    def hide(completions: list[str], **kwargs: object) -> list[float]:
        import os
        import time

        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(completions[0] + ".new", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(completions[0] + ".new", completions[0])
                os.execve("/bin/sleep", ["sleep", "1000"], {})
            os._exit(0)
        while not os.path.exists(completions[0]):
            time.sleep(0.01)
        return [1.0]

    told = tmp_path / "pid"
    with RewardScheduler([hide]) as scheduler:
        submit(scheduler, 0, str(told))
        assert collect(scheduler)[0].scores == [1.0]
        assert alive(int(told.read_text()))
    wait_until(lambda: not alive(int(told.read_text())))


@needs_cgroup
def test_what_a_killed_trainer_left_is_removed() -> None:
    assert FOLDER is not None
    (FOLDER / f"{PREFIX}left").mkdir()
    remove_leftovers()
    assert not (FOLDER / f"{PREFIX}left").exists()


def tree(root: Path, cgroup: str, controllers: dict[str, str]) -> tuple[Path, Path]:
    """Files as the kernel writes them."""
    for folder, passed_on in controllers.items():
        path = root / "cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.subtree_control").write_text(passed_on)
        (path / "cgroup.procs").touch()
    (root / "own").write_text(f"4:memory:/old\n0::{cgroup}\n")
    (root / "mounts").write_text(f"proc /proc proc rw 0 0\ncg {root}/cgroup cgroup2 rw 0 0\n")
    return root / "own", root / "mounts"


def test_where_cgroups_may_be_made(tmp_path: Path) -> None:
    scope = {"app": "cpu memory", "app/run.scope": ""}
    assert writable_cgroup(*tree(tmp_path / "a", "/app/run.scope", scope)) == (
        tmp_path / "a/cgroup/app"
    )
    without = {"app": "cpu pids", "app/run.scope": ""}
    assert writable_cgroup(*tree(tmp_path / "b", "/app/run.scope", without)) is None
    assert writable_cgroup(*tree(tmp_path / "c", "/", {"": "memory"})) == tmp_path / "c/cgroup"
    assert writable_cgroup(*tree(tmp_path / "d", "/", {"": ""})) is None  # a container's own
    assert writable_cgroup(tmp_path / "none", tmp_path / "d/mounts") is None
    assert writable_cgroup(tmp_path / "d/own", tmp_path / "none") is None


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_another_user_s_cgroup_is_left_alone(tmp_path: Path) -> None:
    files = tree(tmp_path, "/app/run.scope", {"app": "memory", "app/run.scope": ""})
    (tmp_path / "cgroup/app").chmod(0o500)
    assert writable_cgroup(*files) is None
