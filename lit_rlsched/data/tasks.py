"""Tasks: prompts from generators, and hub data sets that need more than a name."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

from lit_rlsched.settings import RemembersInit, UsageError
from lit_rlsched.types import stable_hash

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 5
"""One problem in five is held out."""

_Problem = tuple[tuple[Any, ...], str, dict[str, Any]]
"""What decides its split, its question, and its entry of `reasoning_gym`."""

COUNTDOWN_MIX = {2: 0.2, 3: 0.5, 4: 0.3}


class PromptTask(RemembersInit, ABC):
    """Makes rows: a `prompt`, optionally a `uid`, and columns for the reward functions."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Make the rows; every call returns the same."""


class Countdown(PromptTask):
    """Reach a target from a few small numbers by + and -: `reasoning_gym`'s countdown, made small.

    The prompt is the generator's question up to its first blank line, as one user message. A
    problem (its numbers in any order, and the target) is in one split only, by a hash, and no
    prompt occurs twice. There are only 459 prompts with 2 numbers, 7,470 with 3 and 108,690 with 4,
    held-out ones included: if one size runs out, the larger ones get the rest of its share (4,000
    training prompts have 353 with 2 numbers, 2,279 with 3 and 1,368 with 4).

    Args:
        split: Which problems: `train` or `heldout`.
        size: Number of prompts.
        seed: Seed of the generator.
        numbers: Share of the prompts for each quantity of numbers.
        max_value: Numbers are 1 to this.
        max_target: Targets are 1 to this.

    Example:
        >>> Countdown(size=1).rows()[0]["task"]
        'countdown'
    """

    def __init__(
        self,
        split: Split = "train",
        size: int = 4000,
        seed: int = 0,
        numbers: dict[int, float] = COUNTDOWN_MIX,
        max_value: int = 9,
        max_target: int = 20,
    ) -> None:
        if not numbers or min(numbers) < 2:
            raise UsageError(
                f"`numbers={numbers}` must give sizes of 2 or more a share above 0, "
                f"e.g. {COUNTDOWN_MIX}."
            )
        self.split, self.size, self.seed = split, size, seed
        self.numbers = dict(sorted(numbers.items()))
        self.max_value, self.max_target = max_value, max_target

    def rows(self) -> list[dict[str, Any]]:
        """Make the rows: `prompt`, `uid`, `task`, `question`, `answer`, `metadata`, `size`."""
        rows: list[dict[str, Any]] = []
        shares = dict(self.numbers)
        part = 1 / HELD_OUT_SHARE if self.split == "heldout" else 1 - 1 / HELD_OUT_SHARE
        for size, share in self.numbers.items():
            quota = round((self.size - len(rows)) * share / sum(shares.values()))
            # four times the tries that are usually enough
            problems = self._problems(size, tries=round(4 * (quota + 5) / part))
            drawn = _distinct("countdown", self.split, quota, problems)
            rows += [row | {"size": size} for row in drawn]
            del shares[size]
        if len(rows) < self.size:
            raise UsageError(
                f"`Countdown(split={self.split!r}, size={self.size})`: found only {len(rows)} "
                f"different prompts. Use a smaller `size`, or a larger `max_value` or `max_target`."
            )
        return sorted(rows, key=lambda row: stable_hash(self.seed, row["uid"]))

    def _problems(self, size: int, tries: int) -> Iterator[_Problem]:
        from reasoning_gym import create_dataset

        seed = stable_hash("countdown", self.seed, size) % 2**32
        ranges = {"min_numbers": size, "max_numbers": size, "min_value": 1, "min_target": 1}
        ranges |= {"max_value": self.max_value, "max_target": self.max_target}
        generator = create_dataset(
            "countdown", seed=seed, size=tries, operators=("+", "-"), **ranges
        )
        for index in range(tries):
            try:
                entry = generator[index]
            except ValueError:  # the generator gives up on a draw that keeps missing the targets
                continue
            about = entry["metadata"]
            about["difficulty"] = {name: list(ends) for name, ends in about["difficulty"].items()}
            question = entry["question"].split("\n\n")[0]
            yield (sorted(about["numbers"]), about["target"]), question, entry


class ReasoningGym(PromptTask):
    """Any `reasoning_gym` data set, scored by `lit_rlsched.rewards.functions.reasoning_gym_reward`.

    A question is in one split only, by a hash of its text, and occurs once.

    Args:
        name: Name of the data set, e.g. `chain_sum`.
        split: Which questions: `train` or `heldout`.
        size: Number of prompts.
        seed: Seed of the generator.
        config: Settings of the data set, e.g. `{"min_terms": 2}`.
        instructions: Text before the question, e.g. how to mark the answer.
    """

    def __init__(
        self,
        name: str,
        split: Split = "train",
        size: int = 1000,
        seed: int = 0,
        config: dict[str, Any] | None = None,
        instructions: str = "",
    ) -> None:
        if clash := {"size", "seed"} & (config or {}).keys():
            raise UsageError(
                f"`config` sets {sorted(clash)}. Set `size` and `seed` of `ReasoningGym` instead."
            )
        self.name, self.split, self.size, self.seed = name, split, size, seed
        self.config, self.instructions = config or {}, instructions

    def rows(self) -> list[dict[str, Any]]:
        """Make the rows: `prompt`, `uid`, `task`, `question`, `answer`, `metadata`."""
        from reasoning_gym import create_dataset

        tries = 4 * HELD_OUT_SHARE * self.size
        generator = create_dataset(self.name, size=tries, seed=self.seed, **self.config)
        entries = map(generator.__getitem__, range(len(generator)))
        problems = (((entry["question"],), entry["question"], entry) for entry in entries)
        rows = _distinct(self.name, self.split, self.size, problems, self.instructions)
        if len(rows) < self.size:
            raise UsageError(
                f"`ReasoningGym({self.name!r}, split={self.split!r}, size={self.size})`: found "
                f"only {len(rows)} different questions. Use a smaller `size`, or a wider `config`."
            )
        return rows


class HubDataset(PromptTask):
    """A data set on the Hugging Face hub.

    Args:
        name: Name of the data set, e.g. `openai/gsm8k`.
        config: Configuration, if the data set has several, e.g. `main`.
        split: Split; slices such as `train[:1000]` work.
        prompt_column: Column to use as `prompt`.
        instructions: Text before each prompt, e.g. how to mark the answer. The prompts, which must
            be strings, become user messages.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        prompt_column: str = "prompt",
        instructions: str = "",
    ) -> None:
        self.name, self.config, self.split = name, config, split
        self.prompt_column, self.instructions = prompt_column, instructions

    def dataset(self) -> Any:
        """Open the data set; the first call downloads it."""
        import datasets

        data = datasets.load_dataset(self.name, self.config, split=self.split)
        if self.prompt_column not in data.column_names:
            raise UsageError(
                f"`{self.name}` has no column `{self.prompt_column}`; its columns are "
                f"{sorted(data.column_names)}. Set `prompt_column` of `HubDataset`."
            )
        if self.prompt_column != "prompt":
            data = data.rename_column(self.prompt_column, "prompt")
        if not self.instructions:
            return data
        kind = getattr(data.features["prompt"], "dtype", "list")
        if kind not in ("string", "large_string"):
            raise UsageError(
                f"`HubDataset(instructions=...)`: the column `{self.prompt_column}` of "
                f"`{self.name}` holds chat messages, not strings. Leave `instructions` out."
            )
        return data.map(_instructed, batched=True, fn_kwargs={"instructions": self.instructions})

    def rows(self) -> list[dict[str, Any]]:
        """Read the rows; the first call downloads them."""
        return [*self.dataset()]


def _instructed(batch: Any, instructions: str) -> dict[str, Any]:
    return {"prompt": [_user_message(prompt, instructions) for prompt in batch["prompt"]]}


def _distinct(
    task: str, split: Split, number: int, problems: Iterator[_Problem], instructions: str = ""
) -> list[dict[str, Any]]:
    """Make rows of the first problems of a split that have different questions."""
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < number and (found := next(problems, None)) is not None:
        problem, question, entry = found
        held_out = stable_hash("split", task, *problem) % HELD_OUT_SHARE == 0
        if held_out == (split == "heldout") and question not in rows:
            rows[question] = {
                "prompt": _user_message(question, instructions),
                "uid": f"{task}-{stable_hash(question):016x}",
                "task": task,
                "question": question,
                "answer": entry["answer"],
                "metadata": entry["metadata"],
            }
    return list(rows.values())


def _user_message(question: str, instructions: str) -> list[dict[str, str]]:
    text = f"{instructions}\n\n{question}" if instructions else question
    return [{"role": "user", "content": text}]
