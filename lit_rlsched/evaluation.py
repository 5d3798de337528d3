"""Draw completions of held-out prompts and compute accuracies from their scores."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean

from lit_rlsched.data.repetition import repeat
from lit_rlsched.refusals import RunFailed
from lit_rlsched.training.round import no_rewards, reward_matrix
from lit_rlsched.types import Completion, Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Which completions to draw of each held-out prompt."""

    sampling: Sampling
    num_generations: int
    """Sampled completions per prompt; may be 0."""
    greedy: bool
    """Whether to decode one more completion greedily."""
    threshold: float = 1.0
    """Minimum score by the first reward function of a correct completion."""

    def groups(self, prompt: Prompt, stage: str) -> tuple[Group | None, Group | None]:
        """Make the groups of the greedy and of the sampled completions."""
        greedy = sampled = None
        if self.greedy:
            argmax = Sampling(self.sampling.max_completion_length, temperature=0.0)
            greedy = repeat(prompt, 1, f"{stage}-greedy/{prompt.uid}", argmax)
        if self.num_generations:
            key = f"{stage}/{prompt.uid}"
            sampled = repeat(prompt, self.num_generations, key, self.sampling)
        return greedy, sampled


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
        figures["completions/mean_length"] = fmean(len(c.token_ids) for c in shown)
        figures["completions/clipped_ratio"] = fmean(c.finish_reason == "length" for c in shown)
        return figures

    def _correct(self, completion: Completion) -> bool:
        score = first_score(completion)
        return score is not None and score >= self.threshold


def first_score(completion: Completion) -> float | None:
    """The score by the first reward function, or `None`."""
    return None if completion.scores is None else completion.scores[0]


def check_scored(evaluated: Sequence[Evaluated]) -> None:
    """Stop if none of the held-out completions has a score: the accuracy would be 0 by mistake.

    Raises:
        RunFailed: With the number of failures, and the first of them.
    """
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
