"""A resumed run knows its best model, however the checkpoint and its folder are named."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlsched.callbacks import RolloutCallback, RoundCheckpoint
from lit_rlsched.cli.folder import keep_together

pytestmark = pytest.mark.logs("score")
SMALL = {"num_generations": 2, "prompts_per_round": 1, "max_completion_length": 4}
RUN, LAST = Path("runs/first"), Path("checkpoints/round_00002-step_000002.ckpt")


class Falls(RolloutCallback):
    """The first round is the best one."""

    def on_round_end(self, trainer, pl_module, round):
        round.metrics["score"] = -float(round.number)


@pytest.fixture
def train(fit, monkeypatch, tmp_path):
    """Train in a folder, as the command line does."""
    monkeypatch.chdir(tmp_path)

    def train(folder: Path, epochs: int, checkpoint: Path | None = None, top: int = 1) -> Any:
        best = ModelCheckpoint(
            monitor="score", mode="max", save_top_k=top, filename="best-{epoch}", save_last=True
        )
        keep_together([best], folder)
        settings = {"max_epochs": epochs, "enable_checkpointing": True, "default_root_dir": folder}
        fit(
            callbacks=[Falls(), best, RoundCheckpoint(max_share=1.0)],
            trainer=settings,
            ckpt_path=checkpoint,
            **SMALL,
        )
        return best

    return train


def as_before() -> tuple[Path, Path]:
    return RUN, RUN / LAST


def absolute() -> tuple[Path, Path]:
    return RUN.absolute(), RUN.absolute() / LAST


def only_the_file_is_absolute() -> tuple[Path, Path]:
    return RUN, RUN.absolute() / LAST


def with_dots() -> tuple[Path, Path]:
    return Path("runs/../runs/first"), Path("./runs") / "first" / LAST


def through_a_link() -> tuple[Path, Path]:
    Path("link").symlink_to(RUN.absolute())
    return Path("link"), Path("link") / LAST


def from_elsewhere() -> tuple[Path, Path]:
    os.chdir("runs")
    return Path("first"), Path("first") / LAST


def moved() -> tuple[Path, Path]:
    RUN.rename("there")
    return Path("there"), Path("there") / LAST


def copied() -> tuple[Path, Path]:
    shutil.copytree(RUN, "copy")
    return Path("copy").absolute(), Path("copy") / LAST


def moved_and_goes_on_in_a_new_folder() -> tuple[Path, Path]:
    RUN.rename("there")
    return Path("new"), Path("there") / LAST


NAMINGS = (
    *(as_before, absolute, only_the_file_is_absolute, with_dots, through_a_link, from_elsewhere),
    *(moved, copied, moved_and_goes_on_in_a_new_folder),
)


@pytest.mark.parametrize("naming", NAMINGS)
def test_the_best_model_is_known_however_it_is_named(train, naming):
    assert train(RUN, 2).best_model_score == 0
    (folder, checkpoint), before = naming(), Path.cwd()
    best = train(folder, 4, checkpoint)
    found = Path(best.best_model_path)
    beside = "there" if folder.name == "new" else folder
    assert found.resolve() == Path(beside, "checkpoints/best-epoch=0.ckpt").resolve()
    assert best.best_model_score == 0 and found.is_file() and Path.cwd() == before
    assert [path.name for path in Path(beside, "checkpoints").glob("best-*")] == [found.name]
    assert not [*Path("new").rglob("best-*")]


def test_models_are_dropped_where_they_are_now(train):
    """The second best of a copied run: not its original, which stays."""
    train(RUN, 2, top=2)
    folder, _ = copied()
    best = train(folder, 3, folder / "checkpoints/best-epoch=1.ckpt", top=2)
    assert {Path(path).name for path in best.best_k_models} == {
        *("best-epoch=0.ckpt", "best-epoch=1.ckpt")
    }
    assert all(Path(path).is_relative_to(folder) for path in best.best_k_models)


def test_a_best_model_that_is_gone_is_still_the_one_to_beat(train):
    train(RUN, 2)
    (RUN / "checkpoints/best-epoch=0.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"`.*best-epoch=0\.ckpt`, is no longer there"):
        best = train(RUN, 3, RUN / LAST)
    assert best.best_model_score == 0 and not [*RUN.rglob("best-*")]
