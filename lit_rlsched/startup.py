"""From a data module's settings to a started engine: what is refused before, and what is said."""

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched.checks import check_gen_batches, check_lengths, check_probe
from lit_rlsched.data.prompt_sets import PromptSets, tokenize
from lit_rlsched.data.source import DomainSource
from lit_rlsched.engines.base import EngineSpec, kv_bytes_per_token
from lit_rlsched.gpu_setup import warn_of_unseen_gpu
from lit_rlsched.hooks import fire
from lit_rlsched.interrupts import heed
from lit_rlsched.policy import (
    base_model,
    context_length,
    eos_token_ids,
    find_policy,
    load_tokenizer,
)
from lit_rlsched.precision import check_float32
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.trainer_state import trainer_state
from lit_rlsched.training.weight_sync import WeightSync
from lit_rlsched.types import Prompt

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule

_ENGINE_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}


class Startup:
    """What a run is started with, once the module has its policy and the schedule is set.

    Args:
        data: Settings, data sets, engine and rewards of the run.

    Raises:
        ValueError: settings, prompts and model do not fit each other.
    """

    def __init__(self, data: "RolloutDataModule") -> None:
        self._data = data
        limit = data.sampling.max_completion_length
        self._tokenizer = load_tokenizer(
            data.tokenizer_name or str(base_model(self.policy).name_or_path)
        )
        self.prompts: PromptSets = tokenize(
            data.rows,
            self._tokenizer,
            context=context_length(self.policy),
            max_completion_length=limit,
            chat_template_kwargs=data.chat_template_kwargs,
        )
        check_lengths(self.prompts.longest, limit, data.micro_batch_tokens)
        data.rewards.check_rows((prompt.uid, prompt.columns) for prompt in self._scored)
        schedule = data.schedule
        if train := self.prompts.train:
            schedule.rule.check_enough(len(train))
            schedule.rule.check_domains(train)
            check_gen_batches(
                len(train) - schedule.rule.most_deferred,
                data.prompts_per_round,
                schedule.max_num_gen_batches,
            )
        check_probe(schedule.resolved_probe_tokens(limit), limit)
        self._order = schedule.slots.resolved_order(
            schedule.lengths is not None, schedule.rule.ends_early
        )

    @property
    def _trainer(self) -> Trainer:
        assert self._data.trainer is not None
        return self._data.trainer

    @property
    def _scored(self) -> list[Prompt]:
        """Prompts whose columns reward functions will be given."""
        left_out = set() if self._data.has_rewards and self._trainer.predicting else {"predict"}
        return self.prompts.besides(left_out)

    @property
    def policy(self) -> nn.Module:
        """The model that is trained."""
        return find_policy(self._trainer.lightning_module)

    @property
    def source(self) -> DomainSource:
        """The training prompts, from the first on."""
        data = self._data
        return DomainSource(
            self.prompts.train, data.seed, data.shuffle, data.schedule.rule.domain_of
        )

    @cached_property
    def spec(self) -> EngineSpec:
        """What the engine is started with."""
        data = self._data
        precision = str(self._trainer.precision).partition("-")[0]
        spec = EngineSpec(
            model=str(base_model(self.policy).name_or_path),
            slots=0,
            max_model_len=self.prompts.longest + data.sampling.max_completion_length,
            eos_token_ids=eos_token_ids(self.policy, self._tokenizer),
            dtype=_ENGINE_DTYPES.get(precision, torch.float32),
            device=self._trainer.lightning_module.device,
            policy=self.policy,
            seed=data.seed,
            kv_cache_bytes=data.schedule.slots.memory_budget,
        )
        return replace(spec, slots=self.slots(spec))

    def slots(self, spec: EngineSpec, num_generations: int | None = None) -> int:
        """Most requests that the engine holds at once.

        Args:
            spec: Without its `slots`.
            num_generations: Of a prompt in a round; by default the configured ones.
        """
        engine = self._data.engine
        return self._data.schedule.slots.engine_slots(
            engine.kv_cache(spec, self.cache_bytes_per_token(spec)),
            self._most_completions(num_generations or self._data.num_generations),
            self.prompts.shortest,
            engine.most_slots(spec),
        )

    def _most_completions(self, num_generations: int) -> int:
        """Completions that a round or a validation may decode, whichever are more."""
        data = self._data
        held_out = max(map(len, self.prompts.held_out.values()), default=0)
        answers = data.evaluation.num_generations + data.evaluation.greedy
        rule = data.schedule.rule
        return max(rule.most_prompts() * rule.launched(num_generations), held_out * answers)

    def cache_bytes_per_token(self, spec: EngineSpec) -> int:
        """Of the engine's key-value cache, in all layers."""
        dtype = self._data.engine.cache_dtype(spec)
        return kv_bytes_per_token(base_model(self.policy).config, dtype)

    def admission(self, spec: EngineSpec) -> Admission:
        """What stands in front of an engine that was started with `spec`."""
        return self._data.schedule.slots.admission(
            self._data.engine.kv_cache(spec, self.cache_bytes_per_token(spec)),
            spec.slots,
            self._data.sampling.max_completion_length,
            self._order,
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion."""
        ids = np.asarray(token_ids)  # of a list, transformers looks at every element
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def start(self) -> RolloutSession:
        """Start rewards and engine."""
        data, trainer, schedule = self._data, self._trainer, self._data.schedule
        check_float32(self.policy, type(trainer.lightning_module).__name__)
        self._warn()
        if schedule.lengths is not None:
            schedule.lengths.bind(self.decode)
        data.rewards.start()
        return RolloutSession(
            data.engine,
            self.spec,
            lambda: self.admission(self.spec),
            Scorer(
                data.rewards, self.decode, schedule.timeouts, self._trainer_state, data.has_rewards
            ),
            WeightSync(
                data.engine,
                self.spec,
                self.policy,
                probe=self.prompts.all[:2] if data.verify_sync else (),
                temperature=data.sampling.temperature,
                forward_context=trainer.precision_plugin.forward_context,
            ),
            seed=data.seed,
            lengths=schedule.lengths,
            probe_tokens=schedule.resolved_probe_tokens(data.sampling.max_completion_length),
            on_completion=lambda completion: self._fire("on_completion_end", completion),
            on_group=lambda group: self._fire("on_group_end", group),
            heed=lambda: heed(trainer),
        )

    def _warn(self) -> None:
        """Say what may not be meant."""
        data = self._data
        if data.sampling.truncated:
            rank_zero_warn(
                "With `top_p`, `top_k` or `min_p` the engine's log-probs are of the truncated "
                "distribution and the trainer's are not: they are not compared, and importance "
                "sampling is off."
            )
        warn_of_unseen_gpu(self.spec.device.type)
        trains, rule = bool(self.prompts.train), data.schedule.rule
        told = data.run.advice.at_start(
            self.spec.eos_token_ids,
            data.schedule.slots.slots if trains else None,
            rule.most_prompts() * rule.launched(data.num_generations),
            self.policy if trains else None,
        )
        for text in told:
            rank_zero_warn(text)

    def _trainer_state(self) -> Any:
        data, prompts = self._data, len(self.prompts.train)
        return trainer_state(self._trainer, data.steps_per_epoch, data.prompts_per_round, prompts)

    def _fire(self, hook: str, *args: Any) -> None:
        if self._trainer.training:
            fire(self._trainer, hook, *args)
