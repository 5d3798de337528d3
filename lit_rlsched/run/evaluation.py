"""Draw completions of held-out prompts and compute accuracies from their scores."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from statistics import fmean
from typing import Any

from lightning import LightningModule
from torchmetrics import MeanMetric

from lit_rlsched.run.trainer import is_partial_check, log_now
from lit_rlsched.settings import RunFailed
from lit_rlsched.training.round import no_rewards, reward_matrix
from lit_rlsched.training.schedule import EvaluationSettings
from lit_rlsched.types import Completion, Group, Prompt, Sample


class Evaluated:
    """The greedy and sampled completions of one held-out prompt.

    Not a dataclass, because Lightning walks through dataclasses to move their tensors.
    """

    def __init__(
        self,
        greedy: Group | None,
        sampled: Group | None,
        reward_weights: Sequence[float],
        threshold: float = 1.0,
    ) -> None:
        self.greedy = greedy
        self.sampled = sampled
        self.reward_weights = reward_weights
        self.threshold = threshold

    @property
    def completions(self) -> list[Completion]:
        """All completions, the greedy one first."""
        return [c for g in (self.greedy, self.sampled) if g is not None for c in g.completions]

    def metrics(self) -> dict[str, float]:
        """Compute metrics; `accuracy` is `mean@k` if completions were sampled, else greedy.

        A completion is correct if the first reward function gives it at least the threshold
        (`val_accuracy_threshold`). `pass@k` is 1 if any of the k sampled completions is correct.
        """
        figures: dict[str, float] = {}
        shown: list[Completion] = []
        if self.greedy is not None:
            shown = self.greedy.completions
            figures["greedy_accuracy"] = figures["accuracy"] = float(self._correct(shown[0]))
        if self.sampled is not None:
            shown = self.sampled.completions
            right = [self._correct(c) for c in shown]
            figures[f"mean@{len(shown)}"] = figures["accuracy"] = fmean(right)
            figures[f"pass@{len(shown)}"] = float(any(right))
        group = self.sampled or self.greedy
        assert group is not None, "one of the two was drawn"
        rewards = reward_matrix([group], self.reward_weights)
        figures["reward"] = float(rewards.nan_to_num(nan=0.0).mean())
        figures["completions/mean_length"] = fmean(c.drawn for c in shown)
        figures["completions/clipped_ratio"] = fmean(c.finish_reason == "length" for c in shown)
        return figures

    def _correct(self, completion: Completion) -> bool:
        score = first_score(completion)
        return score is not None and score >= self.threshold


def first_score(completion: Completion) -> float | None:
    """The score by the first reward function, or `None`."""
    return None if completion.scores is None else completion.scores[0]


def check_scored(evaluated: Sequence[Evaluated]) -> None:
    """Stop if none of the held-out completions has a score: the accuracy would be 0 by mistake."""
    completions = [c for e in evaluated for c in e.completions]
    if all(score is None for c in completions for score in c.scores or ()):
        raise RunFailed(no_rewards(completions, "of held-out prompts"))


def never_correct(evaluated: Sequence[Evaluated], reward_func: str, threshold: float) -> str | None:
    """Warn that all rewards are below `threshold`, which keeps the accuracy at 0; else `None`."""
    scores = [s for e in evaluated for c in e.completions if (s := first_score(c)) is not None]
    if not scores or not 0 < max(scores) < threshold:
        return None
    return (
        f"The accuracy is 0 because none of {len(scores)} held-out completions counts as correct: "
        f"`{reward_func}` gave {max(scores):.3g} at most, below `val_accuracy_threshold="
        f"{threshold}`. If it never gives more, lower the threshold, or put a reward function that "
        "scores correctness first."
    )


def evaluate(
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    stage: str,
    rollout: Callable[[list[Group]], Generator[Group, None, None]],
    reward_weights: Sequence[float],
    look: Callable[[Sequence[Evaluated]], None] = lambda evaluated: None,
) -> Iterator[Evaluated]:
    """Draw completions of held-out prompts and yield the prompts in the order of the data.

    In the order of completion, a limit on validation batches would select easy prompts. `look` is
    called with all prompts once they are complete.
    """
    answered = []
    wanted = [settings.groups(prompt, stage) for prompt in prompts]
    with closing(rollout([g for pair in wanted for g in pair if g is not None])) as running:
        for number, (greedy, sampled) in enumerate(wanted, start=1):
            while any(g is not None and not g.complete for g in (greedy, sampled)):
                next(running)
            answered.append(Evaluated(greedy, sampled, reward_weights, settings.threshold))
            if number == len(wanted):  # Lightning does not ask beyond the last item
                for _ in running:  # nothing is left to decode; the rollout ends
                    pass
                look(answered)
            yield answered[-1]


def prediction_rows(evaluated: Evaluated, reward_funcs: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each completion of a prompt, the greedy one first."""
    rows = []
    for group in (g for g in (evaluated.greedy, evaluated.sampled) if g is not None):
        for completion in group.completions:
            row = {
                "uid": group.prompt.uid,
                "prompt": Sample(group, completion).prompt,
                "completion": completion.shown,
                "temperature": group.sampling.temperature,
                "completion_length": completion.drawn,
                "finish_reason": completion.finish_reason,
                **dict(zip(reward_funcs, completion.scores or [], strict=False)),
            }
            columns = group.prompt.columns
            for name in sorted(columns, key=row.__contains__):  # those that get another name last
                value = columns[name]
                while name in row:  # a column may be called `input_NAME` too
                    name = f"input_{name}"
                row[name] = value
            rows.append(row)
    return rows


class EvaluationSteps(LightningModule):
    """Logs the average metrics of held-out prompts, under `val/` or `test/`.

    In your own LightningModule, put it before `LightningModule` among the base classes.
    """

    _evaluation: dict[str, MeanMetric]

    def on_validation_epoch_start(self) -> None:
        self._evaluation = {}

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, item: Evaluated, batch_idx: int) -> None:
        for name, value in item.metrics().items():
            metric = self._evaluation.setdefault(name, MeanMetric().to(self.device))
            metric.update(value)

    test_step = validation_step

    def predict_step(self, item: Evaluated, batch_idx: int) -> list[dict[str, Any]]:
        """Return a row for each completion of a prompt; see `prediction_rows`."""
        names = self.trainer.datamodule.run.settings.rewards.names  # type: ignore[attr-defined]
        return prediction_rows(item, names)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, stage: str) -> None:
        figures = {f"{stage}/{name}": m.compute() for name, m in self._evaluation.items()}
        trainer = self.trainer
        training = trainer.state.fn == "fit"
        if training and not is_partial_check(trainer):
            # Lightning would drop the baseline, and log later values at other steps.
            position = trainer.datamodule.run.position  # type: ignore[attr-defined]
            log_now(trainer, position | figures, step=trainer.global_step)
        if not trainer.sanity_checking:
            headline = f"{stage}/accuracy"
            rest = {k: v for k, v in figures.items() if k != headline}
            also: Any = {"batch_size": 1, "sync_dist": True, "logger": not training}
            self.log_dict(rest, **also)
            self.log(headline, figures[headline], prog_bar=True, **also)
