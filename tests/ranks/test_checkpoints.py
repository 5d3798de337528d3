"""Checkpoints do not depend on the number of ranks, nor on how they shard the policy."""

from itertools import chain

import pytest
import torch
from several_ranks import ALONE, DDP, FSDP2, ended
from transformers import AutoModelForCausalLM

from lit_rlsched.run.saving.export import export

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


@pytest.mark.parametrize("lora", [0, 4])
def test_a_folder_of_parts_is_gone_on_with_by_any_number_of_ranks(run, exact_model, tmp_path, lora):
    settings = {"precision": "64-true", "module": {"lora_rank": lora}}
    parts = {**settings, "strategy": "folders"}
    folders = [str(tmp_path / name) for name in ("two", "four")]
    saves = [{"RoundCheckpoint": {"dirpath": folder, "keep": 1}} for folder in folders]
    whole, _, second, four, one = results = run(
        {**settings, **ALONE, "rounds": 4},
        {**parts, "ranks": 2, "rounds": 2, "callbacks": saves[0]},
        {**parts, "ranks": 2, "rounds": 4, "ckpt_path": f"newest of {folders[0]}"},
        {**parts, "ranks": 4, "rounds": 3, "ckpt_path": f"newest of {folders[0]}"}
        | {"callbacks": saves[1]},
        {**settings, **ALONE, "rounds": 4, "ckpt_path": f"newest of {folders[1]}"},
        model=exact_model,
    )
    drawn, *others = [ended(result)["ranks"][0]["rounds"] for result in results]
    assert others == [drawn[:2], drawn[2:], drawn[2:3], drawn[3:]]
    for result in (second, one):
        assert float((result["weights"] - whole["weights"]).abs().max()) <= 1e-12
        assert result["ranks"][0]["counters"] == whole["ranks"][0]["counters"]
    (folder,) = (tmp_path / "four").iterdir()
    assert folder.is_dir() and folder.name.startswith("round_00003")
    exported = export(str(folder), str(tmp_path / "export"), dtype="float32")
    if not lora:  # GPT-2's head is its embedding
        model = AutoModelForCausalLM.from_pretrained(exported)
        flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
        assert float((flat - four["weights"]).abs().max()) <= 1e-6


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.1), (0.1, 0.0)])
def test_another_weight_decay_holds_with_shards_too(run, exact_model, tmp_path, before, after):
    """The checkpoint has another number of groups than the run; its own decay goes on."""
    file, folder = str(tmp_path / "saved.ckpt"), str(tmp_path / "parts")
    settings = {"precision": "64-true", "module": {"weight_decay": before}}
    parts = {**settings, "strategy": "folders", "ranks": 2}
    whole, saved, sharded = run(
        {**settings, **ALONE, "rounds": 3},
        {**settings, **ALONE, "rounds": 1, "save": file},
        {**parts, "rounds": 1, "callbacks": {"RoundCheckpoint": {"dirpath": folder}}},
        model=exact_model,
    )
    assert ended(saved) and ended(sharded)
    settings["module"] = {"weight_decay": after}
    resumed = run(
        {**settings, **FSDP2, "rounds": 3, "ckpt_path": file},
        {**settings, **FSDP2, "rounds": 3, "ckpt_path": f"newest of {folder}"},
        model=exact_model,
    )
    for result in resumed:
        assert any("`weight_decay=" in text for text in ended(result)["said"])
        assert float((result["weights"] - whole["weights"]).abs().max()) <= 1e-12
