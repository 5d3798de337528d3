"""Several ranks with several engines: killed, and resumed with the same and other numbers."""

import pytest
from several_ranks import ALONE, DDP, FSDP2, ended
from struck_engines import fallen, left

pytestmark = pytest.mark.slow
ROUNDS = 6
EXACT = {
    "precision": "64-true",
    "rounds": ROUNDS,
    "engine": "TransformersEngine",
    # log-probs of tokens that were drawn before a fault are rounded in another way
    "module": {"importance_sampling_mode": None},
}


def with_engines(number, ranks, **more):
    return {**EXACT, **ranks, "data": {"num_engines": number, "steps_per_round": 2}, **more}


def saves(folder):
    return {"RoundCheckpoint": {"dirpath": str(folder), "max_share": 1.0, "keep": 99}}


def test_killed_and_resumed_with_the_same_and_with_other_numbers(run, exact_model, tmp_path):
    first, other = tmp_path / "first", tmp_path / "other"
    begun, gone_on = ({"ckpt_path": f"newest of {folder}"} for folder in (first, other))
    faults = [[1, 8, "rollout", 2, "SIGKILL"], [0, 10, "rollout", 2, "SIGSTOP"]]
    faults += [[0, 10, "sync", 3, "SIGKILL"]]
    results = run(
        with_engines(2, DDP),
        # the leader is killed when the third round is drawn; then a run of other numbers goes on
        with_engines(2, DDP, callbacks=saves(first), wrong=[0, "round", 3, "SIGKILL"]),
        with_engines(1, ALONE, **begun, callbacks=saves(other), wrong=[0, "step", 3, "SIGTERM"]),
        with_engines(3, FSDP2, **gone_on),
        # and so do runs of the same numbers: rank 1 is killed, then stopped, then the engines are
        with_engines(2, DDP, **begun, callbacks=saves(first), wrong=[1, "step", 1, "SIGKILL"]),
        with_engines(2, DDP, **begun, callbacks=saves(first), wrong=[1, "step", 2, "SIGTERM"]),
        with_engines(2, DDP, **begun, faults=faults),
        model=exact_model,
    )
    whole, killed, alone, sharded, lost, stopped, struck = results
    (drawn,) = {tuple(rank["rounds"]) for rank in ended(whole)["ranks"] if rank["hooks"]}
    assert killed["codes"][0] == -9 and killed["codes"][1] not in (0, None), killed["said"]
    assert alone["codes"] == [1], alone["said"]
    assert lost["codes"][1] == -9 and lost["codes"][0] not in (0, None), lost["said"]
    assert stopped["codes"] == [1, 1], stopped["said"]
    for result, tolerance in ((sharded, 1e-6), (struck, 0.0)):
        (rounds,) = [rank["rounds"] for rank in ended(result)["ranks"] if rank["hooks"]]
        assert 2 <= len(rounds) < ROUNDS and tuple(rounds) == drawn[-len(rounds) :]
        assert float((result["weights"] - whole["weights"]).abs().max()) <= tolerance
        assert result["ranks"][0]["counters"] == whole["ranks"][0]["counters"]
    assert fallen(tmp_path / struck["name"]) == [*range(len(faults))]
    assert struck["ranks"][0]["metrics"]["rollout/engine_restarts"] == len(faults)
    assert not [pid for result in results for pid in left(tmp_path / result["name"])]
