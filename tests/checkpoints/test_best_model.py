"""A resumed run knows its best model, however the checkpoint and its folder are named."""

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

    def train(folder: Path, epochs: int, checkpoint: Path | None = None) -> Any:
        best = ModelCheckpoint(
            monitor="score", mode="max", save_top_k=1, filename="best-{epoch}", save_last=True
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


@pytest.mark.mostly_slow("absolute", "through_a_link")
@pytest.mark.parametrize(
    "naming", [as_before, absolute, only_the_file_is_absolute, with_dots, through_a_link]
)
def test_the_best_model_is_known_however_it_is_named(train, naming):
    assert train(RUN, 2).best_model_score == 0
    folder, checkpoint = naming()
    best = train(folder, 4, checkpoint)
    found = Path(best.best_model_path)
    assert found.resolve() == (RUN / "checkpoints/best-epoch=0.ckpt").resolve()
    assert best.best_model_score == 0 and found.is_file()
    assert [path.name for path in Path(RUN, "checkpoints").glob("best-*")] == [found.name]
