"""Rewards from a judge model that an engine in the reward worker decodes."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rewards.judge import Judge, NoAnswer, Unparsed
from lit_rlsched.settings import ENDS, UsageError, check_template_kwargs
from lit_rlsched.types import Request, Sampling


@dataclass(slots=True)
class _Question:
    request: Request
    answer: "asyncio.Future[tuple[list[int], str]]"
    """Token ids of the answer, and its finish reason."""
    token_ids: list[int] = field(default_factory=list)


class EngineJudgeReward(Judge):
    """Reward from a judge model that a second engine decodes, without a server.

    Each reward worker loads the model once, before time-outs count, and decodes all open questions
    together, greedily. If a worker is killed because a function beside the judge hangs or crashes,
    its engine is lost, and the worker that replaces it loads the model again.

    Args:
        model: Folder or hub name of a chat model with its tokenizer.
        engine: Engine that is not used elsewhere; by default `VLLMEngine()`. On a GPU its
            `gpu_memory_utilization` comes on top of that of the policy's engine and of the
            trainer's memory.
        slots: Maximum number of questions decoded at once. A worker has at most 32 open.
        max_model_len: Maximum length of question and answer together, in tokens. A longer question
            gets no answer, which is counted.
        device: Device such as `cuda:1` or `cpu`; by default the first GPU, if there is one.
        chat_template_kwargs: More arguments of the chat template, such as
            `{"enable_thinking": False}`.
        **kwargs: Arguments of `Judge`.

    Raises:
        UsageError: an argument is out of range.

    Example::

        judge = EngineJudgeReward("Qwen/Qwen3-4B", VLLMEngine(gpu_memory_utilization=0.2))
        RolloutDataModule("chats.jsonl", [judge], reward_timeout=120)
    """

    def __init__(
        self,
        model: str,
        engine: RolloutEngine | None = None,
        *,
        slots: int = 32,
        max_model_len: int = 4096,
        device: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if slots < 1:
            raise UsageError(f"{self._called('slots', slots)}: use 1 or more.")
        if max_model_len <= self.max_tokens:
            raise UsageError(
                f"{self._called('max_model_len', max_model_len)}: the answer alone may have "
                f"`max_tokens={self.max_tokens}`. Use more, or lower `max_tokens`."
            )
        if engine is None:
            from lit_rlsched.engines.vllm import VLLMEngine

            engine = VLLMEngine()
        self.model = model
        self.engine = engine
        self.slots = slots
        self.max_model_len = max_model_len
        self.device = device
        self.chat_template_kwargs = chat_template_kwargs or {}
        check_template_kwargs(self.chat_template_kwargs, besides=ENDS)
        self._tokenizer: Any = None
        self._asked = 0
        self._waiting: dict[str, _Question] = {}
        self._running: dict[str, _Question] = {}
        self._driver: asyncio.Task[None] | None = None

    @property
    def env_vars(self) -> tuple[str, ...]:
        """Environment variables that only this judge's workers see: the token for gated models."""
        return ("HF_TOKEN",)

    def warm_up(self) -> None:
        """Load the tokenizer and the model.

        Raises:
            UsageError: the tokenizer has no chat template.
        """
        from transformers import AutoConfig, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        if self._tokenizer.chat_template is None:
            raise UsageError(
                f"{self._called('model', self.model)}: its tokenizer has no chat template. Give an "
                "instruction-tuned model."
            )
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        config = AutoConfig.from_pretrained(self.model)
        self.engine.start(
            EngineSpec(
                model=self.model,
                slots=self.slots,
                max_model_len=self.max_model_len,
                eos_token_ids=self._eos_token_ids(config),
                dtype=torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16,
                device=device,
            )
        )

    def _eos_token_ids(self, config: Any) -> tuple[int, ...]:
        from transformers import GenerationConfig

        try:
            configured = GenerationConfig.from_pretrained(self.model).eos_token_id
        except OSError:  # the checkpoint has no generation config
            configured = getattr(config.get_text_config(), "eos_token_id", None)
        more = configured if isinstance(configured, list) else [configured]
        ids = dict.fromkeys([self._tokenizer.eos_token_id, *more])
        return tuple(token for token in ids if token is not None)

    def control_tokens(self) -> Collection[str]:
        """Return the tokenizer's special tokens, which would end the judge's turn."""
        if self._tokenizer is None:
            self.warm_up()
        added = self._tokenizer.added_tokens_decoder.values()
        return [token.content for token in added if token.special]

    async def answer(self, question: str) -> str:
        """Decode the answer, together with those to other questions."""
        if self._tokenizer is None:
            self.warm_up()
        prompt_ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )["input_ids"]
        if len(prompt_ids) + self.max_tokens > self.max_model_len:
            raise NoAnswer(
                f"max_model_len={self.max_model_len} is too little for a question of "
                f"{len(prompt_ids)} tokens and max_tokens={self.max_tokens}"
            )
        token_ids, reason = await self._decode(prompt_ids)
        # the words around a grade may be special tokens
        skip = not any(token in self._pattern.pattern for token in self.control_tokens())
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=skip))
        if reason == "length":
            raise Unparsed(f"cut at max_tokens={self.max_tokens}: {text:.200}")
        return text

    async def _decode(self, prompt_ids: list[int]) -> tuple[list[int], str]:
        self._asked += 1
        sampling = Sampling(self.max_tokens, temperature=0.0)
        request = Request(str(self._asked), prompt_ids, seed=0, sampling=sampling)
        question = _Question(request, asyncio.get_running_loop().create_future())
        self._waiting[request.id] = question
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await question.answer
        finally:  # the task may have been cancelled
            self._waiting.pop(request.id, None)
            if self._running.pop(request.id, None):
                self.engine.abort([request.id])

    async def _drive(self) -> None:
        """Step the engine until every question has its answer."""
        try:
            while self._waiting or self._running:
                self._step()
                await asyncio.sleep(0)  # other coroutines may ask
        except Exception as error:
            for question in (*self._waiting.values(), *self._running.values()):
                if not question.answer.done():
                    question.answer.set_exception(error)

    def _step(self) -> None:
        free = self.slots - len(self._running)
        for request_id in list(self._waiting)[:free]:
            question = self._waiting.pop(request_id)
            self._running[request_id] = question
            self.engine.submit([question.request])
        for event in self.engine.step():
            question = self._running[event.request_id]
            question.token_ids += event.token_ids
            if event.finish_reason is not None:
                del self._running[event.request_id]
                if not question.answer.done():
                    question.answer.set_result((question.token_ids, event.finish_reason))
