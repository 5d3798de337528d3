"""A judge model as a reward, decoded by an engine of its own inside the reward worker."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from lit_rlsched.engines.base import EngineSpec, RolloutEngine
from lit_rlsched.rewards.judge import Judge, NoAnswer
from lit_rlsched.rewards.judge_grade import Unparsed
from lit_rlsched.types import Request, Sampling


@dataclass(slots=True)
class _Asked:
    """A question that waits for its answer."""

    request: Request
    answer: "asyncio.Future[tuple[list[int], str]]"
    """Its tokens and why it ended."""
    token_ids: list[int]


class EngineJudgeReward(Judge):
    """Reward from a judge model that a second engine decodes, with no server to run.

    Each reward worker loads the model once, before time-outs count, and decodes the questions that
    are open together, greedily. A worker that is killed, because of a function beside this one that
    hung or crashed, takes its engine along, and its successor loads the model anew.

    Args:
        model: Folder or hub name of a chat model with its tokenizer.
        engine: An engine of its own; by default `VLLMEngine()`. On a GPU it takes its
            `gpu_memory_utilization` beside that of the policy's engine and the trainer's share.
        slots: Questions that are decoded at once; a worker has 32 open at most.
        max_model_len: Question plus answer, in tokens. A longer one gets no answer, and is counted.
        device: Such as `cuda:1` or `cpu`; by default the first GPU, where there is one.
        chat_template_kwargs: More arguments for the chat template, such as
            `{"enable_thinking": False}`.
        **kwargs: Those of `Judge`.

    Raises:
        ValueError: an argument is out of range.

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
            raise ValueError(f"{self._called('slots', slots)}: use 1 or more.")
        if max_model_len <= self.max_tokens:
            raise ValueError(
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
        self._tokenizer: Any = None
        self._asked = 0
        self._waiting: dict[str, _Asked] = {}
        self._running: dict[str, _Asked] = {}
        self._driver: asyncio.Task[None] | None = None

    @property
    def env_vars(self) -> tuple[str, ...]:
        """For a model that the hub gives to some only; its workers alone see it."""
        return ("HF_TOKEN",)

    def warm_up(self) -> None:
        """Load tokenizer and model.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        from transformers import AutoConfig, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        if self._tokenizer.chat_template is None:
            raise ValueError(
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
        except OSError:  # the checkpoint has none
            configured = getattr(config.get_text_config(), "eos_token_id", None)
        more = configured if isinstance(configured, list) else [configured]
        ids = dict.fromkeys([self._tokenizer.eos_token_id, *more])
        return tuple(token for token in ids if token is not None)

    def control_tokens(self) -> Collection[str]:
        """Those of the tokenizer, which would end the judge's turn."""
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
                f"max_model_len={self.max_model_len} holds no question of {len(prompt_ids)} tokens "
                f"and max_tokens={self.max_tokens}"
            )
        token_ids, reason = await self._decode(prompt_ids)
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        if reason == "length":
            raise Unparsed(f"cut at max_tokens={self.max_tokens}: {text:.200}")
        return text

    async def _decode(self, prompt_ids: list[int]) -> tuple[list[int], str]:
        self._asked += 1
        sampling = Sampling(self.max_tokens, temperature=0.0)
        request = Request(str(self._asked), prompt_ids, seed=0, sampling=sampling)
        asked = _Asked(request, asyncio.get_running_loop().create_future(), [])
        self._waiting[request.id] = asked
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await asked.answer
        finally:  # also where its time is up
            self._waiting.pop(request.id, None)
            if self._running.pop(request.id, None):
                self.engine.abort([request.id])

    async def _drive(self) -> None:
        """Step the engine until every question has its answer; between steps others ask."""
        try:
            while self._waiting or self._running:
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            for asked in (*self._waiting.values(), *self._running.values()):
                if not asked.answer.done():
                    asked.answer.set_exception(error)

    def _step(self) -> None:
        free = self.slots - len(self._running)
        for request_id in list(self._waiting)[:free]:
            asked = self._waiting.pop(request_id)
            self._running[request_id] = asked
            self.engine.submit([asked.request])
        for event in self.engine.step():
            asked = self._running[event.request_id]
            asked.token_ids += event.token_ids
            if event.finish_reason is not None:
                del self._running[event.request_id]
                if not asked.answer.done():
                    asked.answer.set_result((asked.token_ids, event.finish_reason))
