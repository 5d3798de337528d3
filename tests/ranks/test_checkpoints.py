"""Checkpoints do not depend on the number of ranks, nor on how they shard the policy."""

from itertools import chain

import pytest
from several_ranks import ALONE, DDP, FSDP2, ended

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lora", [0, 4])
def test_from_one_rank_to_two_and_back(run, exact_model, tmp_path, lora):
    files = [str(tmp_path / f"{name}.ckpt") for name in ("first", "second", "third")]
    settings = {
        "precision": "64-true",
        "module": {"lora_rank": lora},
        "data": {"steps_per_round": 2},
    }
    whole, first, second, third = run(
        {**settings, **ALONE, "rounds": 4},
        {**settings, **ALONE, "rounds": 1, "save": files[0]},
        {**settings, **FSDP2, "rounds": 2, "ckpt_path": files[0], "save": files[1]},
        {**settings, **DDP, "rounds": 3, "ckpt_path": files[1], "save": files[2]},
        model=exact_model,
    )
    (last,) = run({**settings, **ALONE, "rounds": 4, "ckpt_path": files[2]}, model=exact_model)
    parts = [ended(result)["ranks"][0]["rounds"] for result in (first, second, third, last)]
    assert [*chain(*parts)] == ended(whole)["ranks"][0]["rounds"]
    assert float((last["weights"] - whole["weights"]).abs().max()) <= 1e-12
    assert last["ranks"][0]["counters"] == whole["ranks"][0]["counters"]


def test_a_checkpoint_of_another_model_is_refused_by_name(run, exact_model, tiny_model, tmp_path):
    file = str(tmp_path / "other.ckpt")
    saved, refused = run(
        {**ALONE, "rounds": 1, "save": file},
        {**FSDP2, "ckpt_path": file, "model": tiny_model},
        model=exact_model,
    )
    ended(saved)
    assert refused["codes"] == [1, 1]
    assert all("another configuration" in said for said in refused["said"])


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.1), (0.1, 0.0)])
def test_another_weight_decay_holds_with_shards_too(run, exact_model, tmp_path, before, after):
    file = str(tmp_path / "saved.ckpt")
    settings = {"precision": "64-true", "module": {"weight_decay": before}}
    whole, saved = run(
        {**settings, **ALONE, "rounds": 3},
        {**settings, **ALONE, "rounds": 1, "save": file},
        model=exact_model,
    )
    assert ended(saved)
    settings["module"] = {"weight_decay": after}
    (result,) = run({**settings, **FSDP2, "rounds": 3, "ckpt_path": file}, model=exact_model)
    assert any("`weight_decay=" in text for text in ended(result)["said"])
    assert float((result["weights"] - whole["weights"]).abs().max()) <= 1e-12
