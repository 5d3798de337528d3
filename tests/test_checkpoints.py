"""Checkpoint files: whole or not there, and refused in one sentence where damaged."""

import errno
import os
import random
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from seen_rounds import At

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import RNGState
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.run.saving.checkpoints import (
    AtomicCheckpointIO,
    CheckpointError,
    read_checkpoint,
)
from lit_rlsched.run.saving.resuming import FORMAT
from lit_rlsched.settings import UsageError

PLACES = ("write", "fsync", "replace", "end")
"""Where a writer is killed."""


def checkpoint(step=1, size=1 << 10):
    return {
        "state_dict": {"weight": torch.full((size,), float(step))},
        "pytorch-lightning_version": "2.6.6",
        "global_step": step,
    }


def load(path):
    return AtomicCheckpointIO().load_checkpoint(path)


def save(contents, path):
    AtomicCheckpointIO().save_checkpoint(contents, path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_of_a_mebibyte():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Writing.


@pytest.mark.slow
def test_killed_while_it_overwrites_a_checkpoint(tmp_path):
    files = {place: tmp_path / place / f"{place}.ckpt" for place in PLACES}
    for path in files.values():
        save(checkpoint(1), path)
    elsewhere = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_writer.py"), *files.values()],
        env={**os.environ, "TMPDIR": str(elsewhere)},
        timeout=120,
        check=True,
    )
    for place, path in files.items():
        assert load(path)["global_step"] == (2 if place == "end" else 1), place
        save(checkpoint(3), path)
        assert names(path.parent) == [path.name], "what the killed process had begun is removed"


def test_a_limit_on_the_size_of_files_leaves_the_old_file_and_no_stump(tmp_path):
    save(checkpoint(1), tmp_path / "last.ckpt")
    for name in ("last.ckpt", "new.ckpt"):
        with files_of_a_mebibyte(), pytest.raises(OSError, match="cannot be written") as raised:
            save(checkpoint(2, size=1 << 20), tmp_path / name)
        assert raised.value.errno == errno.EFBIG and name in str(raised.value)
    assert names(tmp_path) == ["last.ckpt"]
    assert load(tmp_path / "last.ckpt")["global_step"] == 1


def test_others_can_read_it(tmp_path):
    save(checkpoint(7), tmp_path / "new" / "folder" / "a.ckpt")
    path = tmp_path / "new" / "folder" / "a.ckpt"
    assert torch.load(path)["global_step"] == read_checkpoint(path)["global_step"] == 7
    umask = os.umask(0o022)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_checksums_are_written_whatever_torch_is_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save(checkpoint(), tmp_path / "a.ckpt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert load(tmp_path / "a.ckpt")["global_step"] == 1


# Reading.


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "whole.ckpt"
    save(checkpoint(), path)
    return path


def test_a_file_of_an_earlier_version_is_loaded_and_checked(whole):
    comment = b"lit_rlsched crc32 01234567"  # a checksum of the file, which they added
    with whole.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(len(comment).to_bytes(2, "little") + comment)
    assert load(whole)["global_step"] == read_checkpoint(whole)["global_step"] == 1
    changed = bytearray(whole.read_bytes())
    changed[len(changed) // 2] ^= 1
    whole.write_bytes(changed)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        load(whole)


def test_a_flipped_bit_is_refused_or_changes_nothing(whole, tmp_path):
    data, dice, refused = whole.read_bytes(), random.Random(0), 0
    places = {*range(0, len(data), 7), *range(len(data) - 100, len(data))}
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << dice.randrange(8)
        (tmp_path / "changed.ckpt").write_bytes(changed)
        try:
            found = load(tmp_path / "changed.ckpt")
        except CheckpointError as error:
            assert str(tmp_path / "changed.ckpt") in str(error)
            refused += 1
        else:
            assert torch.equal(found.pop("state_dict")["weight"], torch.ones(1 << 10))
            assert found == {"pytorch-lightning_version": "2.6.6", "global_step": 1}
    assert refused > 0.8 * len(places)


def test_a_file_that_is_cut_off_is_refused(whole, tmp_path):
    data, cut = whole.read_bytes(), tmp_path / "cut.ckpt"
    for length in {*range(0, len(data), 31), *range(len(data) - 60, len(data))}:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"is empty|or cut off|is not a Lightning"):
            load(cut)


def test_what_is_no_checkpoint_is_refused(tiny_model, tmp_path):
    torch.save({"weight": torch.ones(3)}, tmp_path / "weights.pt")
    torch.save({**checkpoint(), "odd": Trainer}, tmp_path / "odd.ckpt")
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("PK? no")
    (tmp_path / "empty.ckpt").touch()
    for path, why in {
        "weights.pt": "holds tensors, but is not a Lightning checkpoint",
        "odd.ckpt": "cannot be unpickled",
        "model.safetensors": "is not a Lightning checkpoint",
        "notes.txt": "is not a Lightning checkpoint",
        "empty.ckpt": "is empty",
        tiny_model: "is a folder, not a Lightning checkpoint",
    }.items():
        with pytest.raises(CheckpointError) as raised:
            load(tmp_path / path)
        message = str(raised.value)
        assert f"`{tmp_path / path}` {why}" in message and "\n" not in message
    with pytest.raises(UsageError):
        load(tmp_path / "nowhere.ckpt")


# The run's state in it.


@pytest.fixture
def saved(fit, tmp_path):
    fit(
        callbacks=[ModelCheckpoint(tmp_path / "c", save_last=True)],
        trainer={"enable_checkpointing": True, "max_epochs": 1, "plugins": [AtomicCheckpointIO()]},
    )
    return tmp_path / "c" / "last.ckpt"


def without(path, *keys):
    contents = torch.load(path)
    for key in keys:
        del contents[key]
    save(contents, path)
    return path


def test_a_checkpoint_without_the_runs_state_is_refused(saved, fit):
    path = without(saved, "RolloutDataModule")
    with pytest.raises(CheckpointError, match=r"last.ckpt` has no state of `RolloutDataModule`"):
        fit(ckpt_path=path)


def test_a_checkpoint_of_weights_alone_is_refused(saved, fit):
    with pytest.raises(CheckpointError, match="holds the weights alone"):
        fit(ckpt_path=without(saved, "optimizer_states", "lr_schedulers"))


def test_weights_alone_can_be_validated(saved, fit, tiny_model, sums, digits, tmp_path):
    path = without(saved, "optimizer_states", "lr_schedulers", "RolloutDataModule")
    data = RolloutDataModule(
        sums, [digits], val_data=sums[:4], engine=TransformersEngine(), max_completion_length=16
    )
    Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path).validate(
        GRPOModule(tiny_model), datamodule=data, ckpt_path=path, verbose=False
    )


def test_adapters_alone_resume_and_are_checked(fit, tiny_model, tmp_path):
    def run(epochs, ckpt_path=None):
        seed_everything(0)  # of the adapters, too
        return fit(
            GRPOModule(tiny_model, learning_rate=1e-3, lora_rank=2),
            [RNGState(), ModelCheckpoint(tmp_path / f"c{epochs}", save_last=True)],
            {"enable_checkpointing": True, "max_epochs": epochs, "plugins": [AtomicCheckpointIO()]},
            ckpt_path,
        )[1]

    last = tmp_path / "c1" / "last.ckpt"
    run(1)
    assert all("lora_" in name for name in load(last)["state_dict"])
    resumed, whole = run(2, last), run(2)
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    changed = bytearray(last.read_bytes())
    weight = next(iter(load(last)["state_dict"].values()))
    changed[changed.index(weight.numpy().tobytes())] ^= 1  # between the parts of a file are gaps
    last.write_bytes(changed)
    with pytest.raises(CheckpointError, match="is damaged"):
        run(2, last)


@pytest.fixture
def other():
    """Another reward function, which workers need not import."""

    def other(prompts, completions, completion_ids, **kwargs):
        return [0.5] * len(completions)

    return other


# Formats.


@pytest.mark.parametrize("number", [FORMAT + 1, FORMAT - 1, None])
def test_another_format_is_refused_with_its_version(saved, fit, number):
    contents = torch.load(saved)
    state = contents["RolloutDataModule"]
    assert state.pop("format") == FORMAT
    state.update({"version": "9.8.7"} | ({} if number is None else {"format": number}))
    save(contents, saved)
    said = rf"has format {number or 0}, written by lit_rlsched 9\.8\.7, and this version reads"
    with pytest.raises(CheckpointError, match=said):
        fit(ckpt_path=saved)


# Other settings in the middle of a pool.


def test_what_is_drawn_already_fixes_rewards_and_lengths(fit, tmp_path, digits, other):
    path, small = tmp_path / "middle.ckpt", {"steps_per_round": 2, "num_generations": 2}
    # after the first step, when the round is not trained on as a whole
    keep = At(lambda trainer, *_: trainer.save_checkpoint(path), "on_train_batch_end")
    fit(callbacks=[keep], trainer={"max_steps": 1}, **small)
    with pytest.raises(UsageError, match=r"`max_completion_length=24`.*`max_completion_length=16`"):
        fit(ckpt_path=path, max_completion_length=16, **small)
    with pytest.raises(
        ValueError, match=r"`reward_funcs=.*this run has `reward_funcs=\['digits', "
    ):
        fit(ckpt_path=path, reward_funcs=[digits, other], **small)
    with pytest.raises(UsageError, match=r"`reward_funcs=\['digits'\]`.*\['other'\]"):
        fit(ckpt_path=path, reward_funcs=[other], **small)
    trainer, *_ = fit(ckpt_path=path, max_completion_length=30, **small)
    assert trainer.global_step == 4


def test_between_rounds_rewards_and_lengths_may_change(saved, fit, digits, other):
    trainer, *_ = fit(ckpt_path=saved, max_completion_length=16, reward_funcs=[digits, other])
    assert trainer.global_step == 2
