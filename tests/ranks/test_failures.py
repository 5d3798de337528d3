"""A rank that fails, dies or stops ends all of them, with a sentence that names it."""

import pytest
from several_ranks import DDP, FSDP2

from lit_rlsched.run.saving.run_folder import newest_checkpoint

pytestmark = pytest.mark.slow

CASES = {
    "a callback of the leader": ({**DDP, "wrong": [0, "round", 1, "raise"]}, "Rank 0, which draws"),
    "rank 1 in a step": ({**DDP, "wrong": [1, "step", 1, "raise"]}, "something is wrong here"),
    "rank 1 is killed": ({**FSDP2, "wrong": [1, "step", 1, "SIGKILL"]}, "has died"),
    "the leader is killed": ({**DDP, "wrong": [0, "round", 1, "SIGKILL"]}, "Rank 0 (process"),
    "rank 1 is stopped": (
        {**DDP, "wrong": [1, "step", 1, "SIGSTOP"], "silence": 5, "limit": 30},
        "shows no sign of life",
    ),
    "the leader is stopped": (
        {**FSDP2, "wrong": [0, "round", 1, "SIGSTOP"], "silence": 5, "limit": 30},
        "shows no sign of life",
    ),
}


def test_all_ranks_end_and_one_says_why(run):
    results = run(*({"rounds": 3, "limit": 60, **case} for case, _ in CASES.values()))
    for name, result, (case, words) in zip(CASES, results, CASES.values(), strict=True):
        rank, _, _, what = case["wrong"]
        others = [code for i, code in enumerate(result["codes"]) if i != rank]
        text = f"{name}: {result['codes']}\n" + "\n".join(result["said"])[-6000:]
        assert all(others) and None not in others, text  # they ended, and not as if all were well
        if what != "SIGSTOP":
            assert result["codes"][rank] not in (0, None), text
        assert any(words in said for i, said in enumerate(result["said"]) if i != rank), text


def test_a_signal_stops_all_ranks_between_two_steps_and_the_run_goes_on(run, tmp_path, exact_model):
    settings = {"precision": "64-true", **DDP, "rounds": 4}
    saves = {"RoundCheckpoint": {"dirpath": str(tmp_path / "stopped")}}
    stops = {**settings, "callbacks": saves}
    whole, stopped = run(
        settings, {**stops, "wrong": [0, "round", 2, "SIGTERM"]}, model=exact_model
    )
    assert whole["codes"] == [0, 0], "\n".join(whole["said"])[-6000:]
    assert stopped["codes"] == [1, 1], "\n".join(stopped["said"])[-6000:]
    assert not any("error" in said for said in stopped["said"])
    file = newest_checkpoint(tmp_path / "stopped")
    (resumed,) = run({**stops, "ckpt_path": str(file)}, model=exact_model)
    assert resumed["codes"] == [0, 0], "\n".join(resumed["said"])[-6000:]
    # the second round was drawn when the signal came, and is trained on without drawing it again
    assert resumed["ranks"][0]["rounds"] == whole["ranks"][0]["rounds"][2:]
    assert resumed["ranks"][0]["losses"] == whole["ranks"][0]["losses"][1:]
    assert bool((resumed["weights"] == whole["weights"]).all())
