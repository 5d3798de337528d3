"""A judge model as a reward, behind an endpoint."""

import asyncio
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lit_rlsched._environment import PROXIES
from lit_rlsched.rewards.functions import Completion
from lit_rlsched.rewards.judge_grade import SCORE_PATTERN, Grade, Unparsed
from lit_rlsched.rewards.judge_question import RUBRIC, TEMPLATE, Question
from lit_rlsched.rewards.quoting import redact, secrets_in

logger = logging.getLogger(__name__)

SHARE_OF_TIMEOUT = 0.9
"""Of the time a call may take: the rest is for saying that nobody answered."""


class NoAnswer(Exception):
    """The judge gave no answer; the message says why."""


class Judge(ABC):
    """A reward function that asks a judge model; a subclass says how it answers.

    The last match of `score_pattern` in the answer is the grade, mapped from `score_range` to a
    reward from 0 to 1. A grade that the completion itself holds, written so that the pattern finds
    it, does not count: it may be a quotation. No answer, and an answer without a grade in that
    range or cut at `max_tokens`, are no reward: None, counted in `rewards/<name>/no_answers` and
    `rewards/<name>/unparsed`. What the judge wrote becomes a column `<name>_answer` of the
    completions table.

    Args:
        rubric: What a high grade and a low grade mean; replaces `{rubric}` in the template.
        template: What is asked. `{prompt}` and `{completion}` are replaced by their text,
            `{lowest}` and `{highest}` by `score_range`, `{mark}` by a hash of all texts, which none
            of them can hold (put it into what ends the completion), and any other `{column}` by
            the row's, such as a reference `{answer}`. Other braces are doubled. What ends a field
            in the template, and control tokens of chat templates, are spelled out where they stand
            in a text.
        score_pattern: Regular expression whose only group is the grade.
        score_range: Lowest and highest grade.
        max_tokens: Most tokens of the judge's answer.
        name: Of the reward function, in metrics.

    Raises:
        ValueError: an argument is out of range, or two do not fit each other.
    """

    def __init__(
        self,
        rubric: str = RUBRIC,
        template: str = TEMPLATE,
        score_pattern: str = SCORE_PATTERN,
        score_range: tuple[float, float] = (0, 10),
        max_tokens: int = 1024,
        name: str = "judge",
    ) -> None:
        owner = type(self).__name__
        self._grade = Grade(owner, score_pattern, score_range, max_tokens)
        self._question = Question(owner, template, rubric, score_range)
        if not name.isidentifier():
            raise ValueError(f"{self._called('name', name)}: use letters, digits and underscores.")
        self.__name__ = name
        self.max_tokens = max_tokens

    @property
    def required_columns(self) -> list[str]:
        """Columns that the template names."""
        return sorted(self._question.columns)

    @abstractmethod
    async def answer(self, question: str) -> str:
        """What the judge says; greedy, `max_tokens` at most.

        Raises:
            NoAnswer: it says nothing.
            Unparsed: it was cut.
        """

    async def __call__(
        self,
        prompts: Sequence[str | list[dict[str, str]]],
        completions: Sequence[Completion],
        *,
        log_failure: Callable[[str, str], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        reward_timeout: float = 60.0,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Judge completions, all at once.

        Args:
            prompts: As text or chat messages.
            completions: The same.
            log_failure: Called with the kind and the reason where there is no score.
            log_extra: Called with a column's name and its values.
            reward_timeout: Seconds the call may take.
            **columns: The rows' other columns.
        """
        log_failure = log_failure or self._warn
        answers = [""] * len(completions)

        async def judge(row: int) -> float | None:
            question = self.question(
                prompts[row],
                completions[row],
                {name: columns[name][row] for name in self._question.columns & set(columns)},
            )
            limit = reward_timeout * SHARE_OF_TIMEOUT
            try:
                async with asyncio.timeout(limit) as scope:
                    answer = await self.answer(question)
                answers[row] = answer[: self._grade.most_characters]
                return self.score(answer, completions[row])
            except TimeoutError:
                if not scope.expired():
                    raise
                log_failure("no_answer", f"none within {limit:g} s, retries included")
            except NoAnswer as reason:
                log_failure("no_answer", str(reason))
            except Unparsed as reason:
                log_failure("unparsed", str(reason))
            return None

        scores = list(await asyncio.gather(*map(judge, range(len(completions)))))
        if log_extra is not None:
            log_extra(f"{self.__name__}_answer", answers)
        return scores

    def question(self, prompt: Any, completion: Completion, columns: Mapping[str, Any]) -> str:
        """The template, filled in.

        Raises:
            ValueError: it names a column that the data has not.
        """
        return self._question.text(prompt, completion, columns, self.control_tokens())

    def control_tokens(self) -> Collection[str]:
        """Of the judge's tokenizer, where it is known."""
        return ()

    def score(self, answer: str, completion: Completion = "") -> float:
        """The reward that the answer says.

        Args:
            answer: The judge's.
            completion: What was judged: a grade that it holds is a quotation, not the judge's.

        Raises:
            Unparsed: it holds no grade in the range, or only quoted ones.
        """
        return self._grade.reward(answer, completion)

    def _called(self, field: str, value: object) -> str:
        return f"`{type(self).__name__}({field}={value!r})`"

    def _warn(self, kind: str, reason: str) -> None:
        logger.warning("`%s` gave no score for a completion: %s: %s", self.__name__, kind, reason)


class JudgeReward(Judge):
    """Reward from a judge behind any endpoint that speaks OpenAI's chat completions.

    Many completions are asked about at once, 32 in each reward worker at most. An endpoint that is
    down, busy (429) or broken (5xx) is asked again after 0.5 s, 1 s, 2 s and so on, or when it
    says; all of that ends before `reward_timeout`, so that the completion is counted as one without
    an answer.

    Args:
        model: Its name at the endpoint.
        base_url: Of the endpoint, such as `http://localhost:8000/v1`.
        api_key_env: Environment variable that holds the key; the judge is then called in workers of
            its own, which alone are given it. None: the endpoint asks for none.
        max_retries: Times an endpoint that fails is asked again.
        request_kwargs: More arguments of `chat.completions.create`, taken as they are; they win
            over ours, and one that is None leaves ours out.
        **kwargs: Those of `Judge`.

    Raises:
        ValueError: an argument is out of range, or the key is not set.

    Example::

        judge = JudgeReward("Qwen/Qwen3-8B", "http://localhost:8000/v1", rubric="Is it polite?")
        RolloutDataModule("chats.jsonl", [judge], reward_timeout=60)
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        api_key_env: str | None = None,
        max_retries: int = 5,
        request_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not re.match(r"https?://[^/]", base_url):
            raise ValueError(
                f"{self._called('base_url', base_url)}: give an address such as "
                "'http://localhost:8000/v1'."
            )
        if max_retries < 0:
            raise ValueError(f"{self._called('max_retries', max_retries)}: use 0 or more.")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(
                f"{self._called('api_key_env', api_key_env)}: this environment variable is not "
                "set. Set it to the endpoint's key, or leave `api_key_env` out if it needs none."
            )
        self.model = model
        self.base_url = base_url
        self.api_key_env = api_key_env
        self.max_retries = max_retries
        self.request_kwargs = request_kwargs or {}
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def env_vars(self) -> tuple[str, ...]:
        """Variables that its workers are given and those of other functions are not."""
        return PROXIES if self.api_key_env is None else (self.api_key_env, *PROXIES)

    def warm_up(self) -> None:
        """Import the client: it takes a second.

        Raises:
            ImportError: it is not installed.
        """
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "JudgeReward needs OpenAI's client: install `lit-rlsched[judge]`."
            ) from error

    async def answer(self, question: str) -> str:
        """Ask the endpoint, again and again if need be."""
        import openai

        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            **self.request_kwargs,
        }
        request = {name: value for name, value in request.items() if value is not None}
        try:
            response = await self._connected().chat.completions.create(**request)
        except (openai.OpenAIError, ValueError) as error:  # ValueError: the body is no JSON
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            # not `from error`: whoever prints the cause prints the body
            raise self._no_answer(f"{type(error).__name__}: {error!s:.2000}{cause}") from None
        try:
            choice = response.choices[0]
            text, reason = choice.message.content, choice.finish_reason
        except (AttributeError, IndexError, TypeError):
            raise self._no_answer(f"no chat completion: {response!r:.200}") from None
        if reason == "length":
            cut = redact(str(text or ""), self._secrets())
            raise Unparsed(f"cut at max_tokens={self.max_tokens}: {cut:.200}")
        if not isinstance(text, str):
            raise self._no_answer(f"{reason}, without a text")
        return redact(text, self._secrets())

    def _secrets(self) -> list[str]:
        return secrets_in(self._key(), self.base_url, self.request_kwargs)

    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    def _no_answer(self, why: str) -> NoAnswer:
        return NoAnswer(redact(f"{self.base_url}: {why}", self._secrets()))

    def _connected(self) -> Any:
        """The client of this event loop."""
        import openai

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._client = openai.AsyncOpenAI(
                base_url=self.base_url, api_key=self._key() or "none", max_retries=self.max_retries
            )
            self._loop = loop
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        """Without the client, which each process opens for itself."""
        return self.__dict__ | {"_client": None, "_loop": None}
