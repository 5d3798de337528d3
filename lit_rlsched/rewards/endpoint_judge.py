"""Rewards from a judge model behind an endpoint."""

import asyncio
import os
import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from lit_rlsched.processes import PROXIES
from lit_rlsched.rewards.judge import Judge, NoAnswer, Unparsed, redact, secrets_in
from lit_rlsched.settings import UsageError


class JudgeReward(Judge):
    """Reward from a judge behind an endpoint for OpenAI's chat completions.

    A reward worker asks about up to 32 completions at once. An endpoint that is down, busy (429) or
    broken (5xx) is asked again after 0.5 s, 1 s, 2 s and so on, or when it says. All of this ends
    before `reward_timeout`, and the completion is then counted as one without an answer.

    Args:
        model: Name of the model at the endpoint.
        base_url: Address of the endpoint, such as `http://localhost:8000/v1`. A query is sent with
            each request.
        api_key_env: Environment variable that holds the key. The judge is then called in reward
            workers of its own, and only these see the key. None: the endpoint needs no key.
        max_retries: Number of times a failing endpoint is asked again.
        request_kwargs: More arguments of `chat.completions.create`. They override those of this
            class; one that is None removes the argument.
        **kwargs: Arguments of `Judge`.

    Raises:
        UsageError: an argument is out of range, or the key is not set.

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
            raise UsageError(
                f"{self._called('base_url', base_url)}: give an address such as "
                "'http://localhost:8000/v1'."
            )
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise UsageError(
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
        """Environment variables that only this judge's workers see."""
        return PROXIES if self.api_key_env is None else (self.api_key_env, *PROXIES)

    def warm_up(self) -> None:
        """Import OpenAI's client, which takes a second.

        Raises:
            UsageError: it is not installed.
        """
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise UsageError(
                "JudgeReward needs OpenAI's client: install `lit-rlsched[judge]`."
            ) from error

    async def answer(self, question: str) -> str:
        """Ask the endpoint."""
        import openai

        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            **self.request_kwargs,
        }
        request = {name: value for name, value in request.items() if value is not None}
        secrets = secrets_in(self._key(), self.base_url, self.request_kwargs)

        def no_answer(why: str) -> NoAnswer:
            return NoAnswer(redact(f"{self.base_url}: {why}", secrets))

        try:
            response = await self._connected().chat.completions.create(**request)
        except (openai.OpenAIError, ValueError) as error:  # ValueError: the body is not JSON
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            # not `from error`: a traceback with the cause would show the unredacted body
            raise no_answer(f"{type(error).__name__}: {error!s:.2000}{cause}") from None
        try:
            choice = response.choices[0]
            text, reason = choice.message.content, choice.finish_reason
        except (AttributeError, IndexError, TypeError):
            raise no_answer(f"no chat completion: {response!r:.200}") from None
        if reason == "length":
            cut = redact(str(text or ""), secrets)
            raise Unparsed(f"cut at max_tokens={self.max_tokens}: {cut:.200}")
        if not isinstance(text, str):
            raise no_answer(f"{reason}, without a text")
        return redact(text, secrets)

    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    def _connected(self) -> Any:
        """Return the client of this event loop."""
        import openai

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            address = urlsplit(self.base_url)
            self._client = openai.AsyncOpenAI(
                base_url=address._replace(query="").geturl(),  # it would put its path behind this
                default_query=dict(parse_qsl(address.query)),
                api_key=self._key() or "none",
                max_retries=self.max_retries,
            )
            self._loop = loop
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the client, as each process opens its own."""
        return self.__dict__ | {"_client": None, "_loop": None}
