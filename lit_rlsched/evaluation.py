"""Held-out prompts: how they are answered, and what the answers say about a policy."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean

from lit_rlsched.data.repetition import repeat
from lit_rlsched.training.round import reward_matrix
from lit_rlsched.types import Completion, Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """How each held-out prompt is answered."""

    sampling: Sampling
    num_generations: int
    """Completions drawn of each prompt; 0: none."""
    greedy: bool
    """Whether one more is decoded greedily."""
    threshold: float = 1.0
    """Score of the first reward function from which on a completion counts as correct."""

    def groups(self, prompt: Prompt, stage: str) -> tuple[Group | None, Group | None]:
        """The greedy and the sampled completions to draw."""
        greedy = sampled = None
        if self.greedy:
            argmax = Sampling(self.sampling.max_completion_length, temperature=0.0)
            greedy = repeat(prompt, 1, f"{stage}-greedy/{prompt.uid}", argmax)
        if self.num_generations:
            key = f"{stage}/{prompt.uid}"
            sampled = repeat(prompt, self.num_generations, key, self.sampling)
        return greedy, sampled


class Evaluated:
    """One held-out prompt with its greedy completion, its sampled ones, or both.

    An ordinary class: Lightning walks into dataclasses to move their tensors.
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
        """All of them."""
        return [c for g in (self.greedy, self.sampled) if g is not None for c in g.completions]

    def metrics(self) -> dict[str, float]:
        """`accuracy` is `mean@k` where completions were sampled, else `greedy_accuracy`.

        A completion is correct where the first reward function gives it the threshold
        (`val_accuracy_threshold`) or more; one without a score is wrong. `pass@k` is 1 where any of
        the k sampled completions is correct.
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
        figures["completions/mean_length"] = fmean(len(c.token_ids) for c in shown)
        figures["completions/clipped_ratio"] = fmean(c.finish_reason == "length" for c in shown)
        return figures

    def _correct(self, completion: Completion) -> bool:
        score = first_score(completion)
        return score is not None and score >= self.threshold


def first_score(completion: Completion) -> float | None:
    """What the first reward function gave."""
    return None if completion.scores is None else completion.scores[0]


def never_correct(evaluated: Sequence[Evaluated], reward_func: str, threshold: float) -> str | None:
    """What to say where a reward of fractions leaves the accuracy at 0; `None`: nothing.

    Args:
        evaluated: All held-out prompts.
        reward_func: The first one's name.
        threshold: From which on a completion counts as correct.
    """
    scores = [s for e in evaluated for c in e.completions if (s := first_score(c)) is not None]
    if not scores or not 0 < max(scores) < threshold:
        return None
    return (
        f"None of {len(scores)} held-out completions counts as correct, so that the accuracy is 0: "
        f"`{reward_func}` gave {max(scores):.3g} at most, and `val_accuracy_threshold={threshold}` "
        "is what a correct one gets. If it gives no more, lower the threshold, or put a reward "
        "function that says what is correct first."
    )


def evaluate(
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    stage: str,
    rollout: Callable[[list[Group]], Generator[Group, None, None]],
    reward_weights: Sequence[float],
    look: Callable[[Sequence[Evaluated]], None] = lambda evaluated: None,
) -> Iterator[Evaluated]:
    """Answer held-out prompts and yield them in their order.

    The order is the data's and not that of completion: a limit on the number of validation batches
    must not choose the prompts that are answered fastest. `look` sees all of them, once they are.
    """
    answered = []
    wanted = [settings.groups(prompt, stage) for prompt in prompts]
    with closing(rollout([g for pair in wanted for g in pair if g is not None])) as running:
        for number, (greedy, sampled) in enumerate(wanted, start=1):
            while any(g is not None and not g.complete for g in (greedy, sampled)):
                next(running)
            answered.append(Evaluated(greedy, sampled, reward_weights, settings.threshold))
            if number == len(wanted):  # here: Lightning never asks beyond the last item
                running.close()
                look(answered)
            yield answered[-1]
