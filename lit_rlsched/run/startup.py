"""From the data module's settings to a started engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace

import numpy as np
from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched.data.messages import ControlTokens
from lit_rlsched.data.prompts import PromptSets, tokenize
from lit_rlsched.data.rows import RowTable
from lit_rlsched.data.source import DomainSource
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.devices import warn_of_unseen_gpu
from lit_rlsched.engines.process_engine import ProcessEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.environments.chat import ToolChat
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.environments.tool_cache import CachingScheduler
from lit_rlsched.ranks import Team
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.rollout.turns import Turns
from lit_rlsched.run.advice import Advice
from lit_rlsched.run.combinations import check
from lit_rlsched.run.fsdp2 import is_sharded
from lit_rlsched.run.interrupts import check_interrupt
from lit_rlsched.run.same_ranks import check_same_prompts
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.settings import UsageError
from lit_rlsched.text import kv_bytes_per_token
from lit_rlsched.training.learner import half_learner
from lit_rlsched.training.logprobs import SHARDED_FORWARD
from lit_rlsched.training.lora import base_model, check_adapters
from lit_rlsched.training.policy import (
    adapter_spec,
    context_length,
    eos_token_ids,
    find_policy,
    load_tokenizer,
    num_embeddings,
    special_tokens,
)
from lit_rlsched.training.precision import PASSES, check_float32
from lit_rlsched.training.schedule import RunFacts, Schedule
from lit_rlsched.training.weight_sync import PolicyReader, WeightSync


class Startup:
    """Prompts, policy and engine settings of a run whose policy is loaded and schedule is set."""

    def __init__(
        self,
        facts: RunFacts,
        schedule: Schedule,
        rows: Mapping[str, RowTable],
        trainer: Trainer,
        team: Team,
        scored: bool = True,
    ) -> None:
        self.facts, settings = facts, facts.settings
        """The same facts, with the number of training prompts."""
        self._settings, self._schedule, self._trainer = settings, schedule, trainer
        self._team, self._scored = team, scored
        limit = settings.sampling.max_completion_length
        check_adapters(self.policy)
        self._tokenizer = load_tokenizer(settings.tokenizer or str(self.policy.name_or_path))
        self._eos_token_ids = eos_token_ids(self.policy, self._tokenizer)
        context, embeddings = context_length(self.policy), num_embeddings(self.policy)
        template, environments = settings.chat_template_kwargs, None
        own_template = (template or {}).get("chat_template")
        self._control_tokens = ControlTokens(self._tokenizer, own_template)
        if settings.tools is not None:
            environments = settings.tools.environments
            self._chat = ToolChat(self._tokenizer, template, self._eos_token_ids)
        self.prompts: PromptSets = tokenize(
            rows,
            self._tokenizer,
            context=context,
            max_completion_length=limit,
            chat_template_kwargs=template,
            embeddings=embeddings,
            environments=environments,
        )
        self._check_micro_batch_tokens()
        module = trainer.lightning_module
        sharded = is_sharded(trainer) and module.device_mesh is not None
        if sharded and not hasattr(self.policy, SHARDED_FORWARD):
            raise UsageError(
                f"`{type(module).__name__}` does not shard its policy as rollouts need it. Call "
                "`lit_rlsched.run.fsdp2.shard(policy, self.device_mesh['data_parallel'])` in its "
                "`configure_model`, or use `strategy='ddp'`."
            )
        check_same_prompts(team, self.prompts.read)
        self._check_rows()
        self._slots = schedule.slots.share(len(settings.engine.engines))
        if train := self.prompts.train:
            self.facts = replace(facts, prompts=len(train))
            check(schedule, self.facts)
            schedule.rule.check_domains(train)
        self._order = schedule.slots.resolved_order(
            schedule.lengths is not None, schedule.rule.ends_early
        )

    def _check_rows(self) -> None:
        """Pass the rows that will be scored to the reward functions' checks."""
        rewards, sets = self._settings.rewards, self.prompts.read
        if not (self._scored and self._trainer.predicting):
            sets.pop("predict", None)
        rewards.check_rows(
            (f"{number} of {stage}_data (the first is 0), uid {prompt.uid}", prompt.columns)
            for stage, prompts in sets.items()
            for number, prompt in zip(prompts.numbers, prompts, strict=True)
        )

    def _check_micro_batch_tokens(self) -> None:
        longest, limit = self.prompts.longest, self._settings.sampling.max_completion_length
        if longest + limit > self._settings.micro_batch_tokens:
            raise UsageError(
                f"`micro_batch_tokens={self._settings.micro_batch_tokens}` cannot hold the longest "
                f"prompt ({longest} tokens) with `max_completion_length={limit}`. Use "
                f"{longest + limit} or more."
            )

    @property
    def policy(self) -> nn.Module:
        """The model that is trained."""
        return find_policy(self._trainer.lightning_module)

    @property
    def source(self) -> DomainSource:
        """A new source of the training prompts, at its beginning."""
        settings, rule = self._settings, self._schedule.rule
        domain_of = rule.domain_of if rule.has_domains else None
        multiple = settings.prompts_per_round if settings.whole_rounds and not domain_of else 1
        return DomainSource(
            self.prompts.train, settings.seed, settings.shuffle, domain_of, multiple
        )

    @cached_property
    def spec(self) -> EngineSpec:
        """Settings that the engine is started with."""
        settings, engine = self._settings, self._settings.engine
        spec = EngineSpec(
            model=str(base_model(self.policy).name_or_path),
            slots=0,
            max_model_len=self.prompts.longest + settings.sampling.max_completion_length,
            eos_token_ids=self._eos_token_ids,
            dtype=PASSES[str(self._trainer.precision)],
            device=self._trainer.lightning_module.device,
            policy=self.policy,
            seed=settings.seed,
            kv_cache_bytes=self._schedule.slots.memory_budget,
            adapters=adapter_spec(self.policy) if engine.enable_lora else None,
            first_gpu=self._trainer.num_devices if engine.weight_transfer else 0,
        )
        return replace(spec, slots=self.slots(spec))

    def slots(self, spec: EngineSpec, num_generations: int | None = None) -> int:
        """Maximum number of requests that all engines hold at once."""
        settings, engine = self._settings, self._settings.engine
        engines = len(engine.engines)
        held_out = max(map(len, self.prompts.held_out.values()), default=0)
        answers = settings.evaluation.num_generations + settings.evaluation.greedy
        generations, rule = num_generations or settings.num_generations, self._schedule.rule
        chosen = self._slots.slots is not None or self._slots.memory_budget is not None
        most = rule.most_prompts() if chosen else rule.slot_prompts()
        prompts, held_out = (-(-n // engines) for n in (most, held_out))
        each = self._slots.engine_slots(
            engine.kv_cache(spec, self.cache_bytes_per_token(spec)),
            max(prompts * rule.launched(generations), held_out * answers),
            self.prompts.shortest,
            engine.engines[0].most_slots(spec),
        )
        return engines * each

    def cache_bytes_per_token(self, spec: EngineSpec) -> int:
        """Bytes per token of the engine's key-value cache, over all layers."""
        dtype = self._settings.engine.cache_dtype(spec)
        return kv_bytes_per_token(base_model(self.policy).config, dtype)

    def admission(self, spec: EngineSpec) -> Admission:
        """Create the admission of each engine, which were started with `spec`."""
        return self._slots.admission(
            self._settings.engine.kv_cache(spec, self.cache_bytes_per_token(spec)),
            spec.slots // len(self._settings.engine.engines),
            self._settings.sampling.max_completion_length,
            self._order,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Convert the tokens of a completion to the text that rewards, judges and tables see.

        With `skip_special_tokens=False` the token that ended it is left out, as vLLM does.
        """
        ids = np.asarray(token_ids)  # a list would be checked
        skip = self._settings.skip_special_tokens
        if not skip and len(ids) and ids[-1] in self._eos_token_ids:
            ids = ids[:-1]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip))

    @cached_property
    def policy_reader(self) -> PolicyReader:
        """Reads the policy for weight syncs, on all ranks."""
        context = self._trainer.precision_plugin.forward_context
        lora = self._settings.engine.enable_lora
        return PolicyReader(self.policy, context, self._team, lora)

    def start(self, advice: Advice) -> RolloutSession:
        """Start reward workers and engine; `advice` knows the warnings given so far."""
        settings, trainer, schedule = self._settings, self._trainer, self._schedule
        check_float32(self.policy, type(trainer.lightning_module).__name__)
        self._warn(advice)
        settings.rewards.start()
        progress = partial(
            trainer_state,
            trainer,
            steps_per_round=settings.steps_per_epoch,
            prompts_per_round=settings.prompts_per_round,
            prompts=len(self.prompts.train),
        )
        scorer = Scorer(settings.rewards, self.decode, schedule.timeouts, progress, self._scored)
        turns, sampling = self._turns(scorer), settings.sampling
        probe_tokens = schedule.resolved_probe_tokens(sampling.max_completion_length)
        checks = settings.verify_sync and settings.engine.logprobs
        probe = self.prompts.first(2) if checks else ()
        sync = WeightSync(
            settings.engine,
            self.spec,
            self.policy_reader,
            probe=probe,
            temperature=sampling.temperature,
        )
        session = RolloutSession(
            settings.engine,
            self.spec,
            scorer,
            sync,
            lambda: self.admission(self.spec),
            seed=settings.seed,
        )
        session.lengths, session.turns = schedule.lengths, turns
        session.probe_tokens, session.control_tokens = probe_tokens, self._control_tokens
        session.check_interrupt = lambda: check_interrupt(trainer)
        return session

    def _turns(self, scorer: Scorer) -> Turns | None:
        """Start the workers of tools and environments, if there are some."""
        given = self._settings.tools
        if given is None:
            return None
        caches = given.environments.caches
        scheduler = (CachingScheduler if caches else EnvironmentScheduler)(
            given.environments,
            self._settings.rewards if self._scored else None,
            workers=given.workers,
            timeout=given.timeout,
            max_sessions=given.max_sessions,
            env_vars=self._settings.rewards.env_vars,
        )
        scheduler.start()
        return Turns(
            given,
            self._chat,
            scheduler,
            self._settings.seed,
            scorer.arguments,
            scorer.timeout,
            self._control_tokens,
        )

    def _warn(self, advice: Advice) -> None:
        """Warn of settings that are probably a mistake."""
        settings = self._settings
        if settings.sampling.truncated:
            rank_zero_warn(
                "With `top_p`, `top_k` or `min_p` the engine's log-probs are of the truncated "
                "distribution, but the trainer's are of the whole one: they are not compared, and "
                "importance sampling is off."
            )
        warn_of_unseen_gpu(self.spec.device.type)
        ours, theirs = self.spec.dtype, settings.engine.cache_dtype(self.spec)
        if ours != theirs and settings.engine.logprobs:
            rank_zero_warn(
                f"`{settings.engine.name}` decodes in {theirs}, and "
                f"`precision={self._trainer.precision}` computes in {ours}: the log-probs of a "
                "token differ by what the coarser one rounds (`docs/explanation/precision.md`)."
            )
        trains, rule = bool(self.prompts.train), self._schedule.rule
        told = advice.at_start(
            self.spec.eos_token_ids,
            self._schedule.slots.slots if trains else None,
            rule.most_prompts() * rule.launched(settings.num_generations),
            self.policy if trains else None,
        )
        if trains and (half := half_learner(self._trainer.lightning_module)):
            told.append(half)
        if lost := self._lost_tokens():
            told.append(
                f"The special tokens {', '.join(map(repr, lost))} of the tokenizer are left out of "
                "the text that reward functions, judges and tables see, so that a reward that "
                "looks for them never finds them. Set `skip_special_tokens=False`."
            )
        for text in told:
            rank_zero_warn(text)

    def _lost_tokens(self) -> list[str]:
        """Special tokens that rewards are likely to look for but do not see."""
        if not self._settings.skip_special_tokens:
            return []
        found = special_tokens(self._tokenizer)
        tokens = [text for token, text in found.items() if token not in self._eos_token_ids]
        return self._settings.rewards.tokens_looked_for(tokens)


def make_engine(engine: RolloutEngine | None, num_engines: int) -> RolloutEngine:
    """Return the run's engine: the given one or `VLLMEngine()`, or several of them as one."""
    if engine is None:
        from lit_rlsched.engines.vllm import VLLMEngine

        engine = VLLMEngine()
    if num_engines == 1:
        return engine
    from lit_rlsched.engines.pool import EnginePool

    return EnginePool.of(engine, num_engines)


def in_own_process(engine: RolloutEngine) -> RolloutEngine:
    """Return an engine that does not run in the trainer's process, where vLLM would join ranks."""
    if len(engine.engines) > 1 or isinstance(engine, ProcessEngine):
        return engine
    return ProcessEngine(engine)


def trainer_state(
    trainer: Trainer,
    step: int,
    steps_per_round: int,
    prompts_per_round: int,
    prompts: int,
) -> SimpleNamespace:
    """TRL's `trainer_state` for reward functions, as a plain object that can be pickled."""
    ends = [trainer.max_steps, (trainer.max_epochs or -1) * steps_per_round]
    max_steps = min((end for end in ends if end > 0), default=-1)
    epoch = step / steps_per_round * prompts_per_round / max(1, prompts)
    return SimpleNamespace(global_step=step, max_steps=max_steps, epoch=epoch)
