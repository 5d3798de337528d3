"""The recorder sees equal runs as equal, and others not."""

import json

import pytest
import record_schedules
from record_schedules import compare, differences, main, make_model, record_schedule

pytestmark = pytest.mark.logs("share")  # by the recorder's reward function


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two recordings of a tiny schedule, and one with another seed."""
    folder = tmp_path_factory.mktemp("recorded")
    model = make_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        tiny = record_schedules.Schedule(
            data={"prompts_per_round": 2, "num_generations": 2, "max_completion_length": 6},
            stops=(),
            rounds=2,
        )
        patch.setitem(record_schedules.SCHEDULES, "tiny", tiny)
        for name, seed in (("one", 1), ("again", 1), ("other", 2)):
            record_schedule("tiny", folder / name, model, seed=seed)
    return folder


@pytest.mark.slow  # three runs
def test_a_recording_repeats_and_tells_runs_apart(recorded, capsys):
    assert compare(recorded / "one", recorded / "again")
    assert capsys.readouterr().out == "tiny: equal\n"
    assert not compare(recorded / "one", recorded / "other")
    assert "differences, first" in capsys.readouterr().out
    found = json.loads((recorded / "one" / "tiny.json").read_text())
    assert [len(r["groups"]) for r in found["whole"]["rounds"]] == [2, 2]
    assert "time/rollout" in found["whole"]["left_out"]
    assert {"reward", "loss"} <= {name for row in found["whole"]["metrics"] for name in row}


def write(folder, metrics, left_out=(), name="plain", **more):
    folder.mkdir(exist_ok=True)
    run = {"metrics": metrics, "left_out": [*left_out], **more}
    (folder / f"{name}.json").write_text(json.dumps({"whole": run, "resumed": run}))
    return str(folder)


def test_the_first_difference_is_named_and_all_are_counted(tmp_path, capsys):
    old = write(tmp_path / "old", [{"a": 1.0, "b": float("nan"), "c": 1.0}, {"a": 1.0}])
    new = write(tmp_path / "new", [{"a": 1.5, "b": float("nan"), "c": 2.0}, {"a": 2.0}])
    assert main(["compare", old, new]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "plain: 6 differences, first ['resumed']['metrics'][0]['a']: 1.0 -> 1.5",
        "    4 in ['metrics']['a']",
        "    2 in ['metrics']['c']",
    ]
    assert main(["compare", old, old]) == 0


def test_a_renamed_metric_is_equal_and_a_vanished_one_is_not(tmp_path):
    old = write(tmp_path / "old", [{"a": 1.0}], ["time/a", "time/b"])
    new = write(tmp_path / "new", [{"c": 1.0}], ["time/b", "time/c"])
    assert main(["compare", old, new]) == 1
    assert main(["compare", old, new, "--renamed", "a=c", "time/a=time/c"]) == 0
    vanished = write(tmp_path / "vanished", [{"c": 1.0}], ["time/b"])
    assert main(["compare", new, vanished]) == 1
    assert main(["compare", new, vanished, "--renamed", "time/c="]) == 0


def round_of(*tokens, version=0):
    drawn = dict.fromkeys(("logprobs", "finish_reason", "text", "scores"))
    drawn |= {"index": 0, "token_ids": [*tokens], "segments": [[version, len(tokens)]]}
    group = {"id": "a@0", "prompt": {"uid": "a"}, "completions": [drawn]}
    return {"version": 3, "groups": [group]}


def test_some_keys_alone_are_compared(tmp_path, capsys):
    old = write(tmp_path / "old", [{"a": 1.0}], rounds=[round_of(1, 2)])
    new = write(tmp_path / "new", [], rounds=[round_of(1, 2, version=1)])
    both = ["compare", old, new, "--keys"]
    assert main([*both, "completions"]) == 0
    assert capsys.readouterr().out.endswith(": equal\n")
    assert main([*both, "completions", "versions"]) == 1
    assert "['versions']" in capsys.readouterr().out
    write(tmp_path / "new", [], rounds=[round_of(1, 3)])
    assert main([*both, "completions"]) == 1


def test_a_schedule_that_the_code_does_not_have_is_skipped(tmp_path, capsys, monkeypatch):
    for name, make in {
        "gone": lambda c: c.Gone(),
        "older": lambda c: c.TailBatching(old=1),
    }.items():
        made = record_schedules.Schedule(lambda make=make: [make(record_schedules.callbacks)])
        monkeypatch.setitem(record_schedules.SCHEDULES, name, made)
    record_schedules.record(tmp_path / "out", ["gone", "older"], "transformers", 1, 1)
    gone, older = capsys.readouterr().out.splitlines()
    assert gone.startswith("gone: skipped, ") and "Gone" in gone
    assert older.startswith("older: skipped, ") and "old" in older
    assert not (tmp_path / "out").exists()


def test_a_schedule_without_a_recording_is_a_difference(tmp_path):
    old = write(tmp_path / "old", [{"a": 1.0}])
    (tmp_path / "new").mkdir()
    assert main(["compare", old, str(tmp_path / "new")]) == 1
    assert main(["compare", str(tmp_path / "new"), str(tmp_path / "new")]) == 1


@pytest.mark.parametrize(("old", "new"), [(0.0, -0.0), (1, 1.0), ([1], [1, 2]), ({}, {"a": None})])
def test_nothing_counts_as_almost_equal(old, new):
    assert list(differences(old, new))
    assert not list(differences(old, old))
