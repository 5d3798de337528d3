"""The data module: owns prompts, pool, engine and rewards, and turns them into optimizer steps."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched import __version__
from lit_rlsched.advice import Advice
from lit_rlsched.checkpoints import FORMAT, check_format, check_nothing_is_resumed
from lit_rlsched.checks import (
    check_gen_batches,
    check_lengths,
    check_logprobs,
    check_one_process,
    check_probe,
    check_resumed,
    check_resumed_groups,
    check_resumed_pool,
    check_sampling,
    check_settings,
    check_siblings,
    check_val_temperature,
)
from lit_rlsched.data.prompt_sets import PromptSets, tokenize
from lit_rlsched.data.source import DomainSource, Rows, load_rows
from lit_rlsched.engines.base import EngineSpec, RolloutEngine, kv_bytes_per_token
from lit_rlsched.evaluation import Evaluated, EvaluationSettings, evaluate, never_correct
from lit_rlsched.fit_settings import FitSettings
from lit_rlsched.gpu_setup import warn_of_unseen_gpu
from lit_rlsched.hooks import fire
from lit_rlsched.interrupts import heed
from lit_rlsched.loaders import Evaluation, MicroBatches, Rounds
from lit_rlsched.logs import log_now
from lit_rlsched.policy import (
    base_model,
    context_length,
    eos_token_ids,
    find_policy,
    load_tokenizer,
)
from lit_rlsched.precision import check_float32
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.rollout.buffer import RolloutBuffer
from lit_rlsched.rollout.drawing import RoundDrawer
from lit_rlsched.rollout.planner import RoundPlanner
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.rollout.slots import SlotSettings
from lit_rlsched.scheduling.adaptive_timeouts import AdaptiveTimeout
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.queues import Order
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.trainer_state import trainer_state
from lit_rlsched.training.gradient_stream import Streaming
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.training.selection import Selection
from lit_rlsched.training.update import Update
from lit_rlsched.types import Prompt, Sampling

_ENGINE_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}
_SAME_ON_RESUME = (
    "seed",
    "prompts_per_round",
    "num_generations",
    "steps_per_round",
    "num_iterations",
)


class RolloutDataModule(LightningDataModule):
    """Draws a round of completions for each Lightning epoch and hands it over step by step.

    One epoch is one round of `prompts_per_round * num_generations` completions, trained on in
    `steps_per_round * num_iterations` optimizer steps. An optimizer step is cut into micro-batches
    of at most `micro_batch_tokens` positions; how many, follows from the lengths.

    Args:
        train_data: Prompts to train on: a JSONL, JSON or Parquet file, a data set's folder or hub
            name, a task such as `Countdown`, or rows. A row has a `prompt` (string or chat
            messages), optionally a `uid`, and whatever columns the reward functions take.
        reward_funcs: Reward functions with TRL's signature.
        val_data: Held-out prompts for validation, in the same forms.
        test_data: Prompts for `test`; by default `val_data`.
        predict_data: Prompts for `predict`, which answers them as validation does; rewards are
            computed where the rows have the columns for it.
        reward_weights: One per reward function; by default 1 each.
        reward_timeout: Seconds a function may take for one completion.
        reward_workers: Processes that run reward functions.
        reward_memory_limit: Memory that calls of reward functions may take in each of them, such as
            `4GiB`; by default half of the machine's, shared by all.
        reward_env_vars: Names of environment variables that reward functions are given, besides the
            few that Python needs.
        tokenizer: Folder or hub name; by default the policy's.
        chat_template_kwargs: More arguments for the chat template.
        engine: What decodes; by default vLLM.
        prompts_per_round: Prompts of a round.
        num_generations: Completions of a prompt.
        steps_per_round: Optimizer steps a round is dealt out to.
        num_iterations: Times a round is trained on.
        micro_batch_tokens: Most positions, padding included, of a forward and backward pass.
        max_completion_length: Most tokens of a completion.
        temperature: Sampling temperature of training.
        top_p: Smallest set of tokens with this probability is drawn from.
        top_k: Most likely tokens that are drawn from; 0 for all.
        min_p: Tokens less likely than this share of the likeliest are not drawn.
        mask_truncated_completions: Leave completions cut at the limit out of the loss.
        val_num_generations: Completions drawn of each held-out prompt, for mean@k and pass@k.
        val_temperature: Their temperature; by default that of training.
        val_greedy: Whether each held-out prompt is also answered greedily.
        val_accuracy_threshold: Score of the first reward function from which on a held-out
            completion counts as correct in `val/accuracy`, `mean@k`, `pass@k` and
            `greedy_accuracy`.
        shuffle: Whether prompts come in a new random order in each pass over the data.
        seed: Of the order and of every completion; by default that of `seed_everything`.
        verify_sync: Check after each weight sync that the engine's log-probs are the trainer's.

    Raises:
        ValueError: an argument is out of range, or two do not fit each other.

    Example::

        data = RolloutDataModule("gsm8k.jsonl", [accuracy], prompts_per_round=64, num_generations=8)
        Trainer(max_epochs=100).fit(GRPOModule("Qwen/Qwen3-0.6B"), datamodule=data)
    """

    def __init__(
        self,
        train_data: Rows,
        reward_funcs: list[Callable],
        *,
        val_data: Rows | None = None,
        test_data: Rows | None = None,
        predict_data: Rows | None = None,
        reward_weights: list[float] | None = None,
        reward_timeout: float = 30.0,
        reward_workers: int = 1,
        reward_memory_limit: str | None = None,
        reward_env_vars: list[str] | None = None,
        tokenizer: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        engine: RolloutEngine | None = None,
        prompts_per_round: int = 32,
        num_generations: int = 8,
        steps_per_round: int = 1,
        num_iterations: int = 1,
        micro_batch_tokens: int = 16384,
        max_completion_length: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        mask_truncated_completions: bool = False,
        val_num_generations: int = 0,
        val_temperature: float | None = None,
        val_greedy: bool = True,
        val_accuracy_threshold: float = 1.0,
        shuffle: bool = True,
        seed: int | None = None,
        verify_sync: bool = True,
    ) -> None:
        super().__init__()
        check_settings(locals())
        self.save_hyperparameters(
            ignore=[
                *("train_data", "val_data", "test_data", "predict_data"),
                *("reward_funcs", "engine"),
            ]
        )
        self.train_data, self.val_data = train_data, val_data
        self.test_data = val_data if test_data is None else test_data
        self.predict_data = predict_data
        self.rewards = RewardScheduler(
            reward_funcs,
            reward_weights=reward_weights,
            workers=reward_workers,
            timeout=reward_timeout,
            memory_limit=reward_memory_limit,
            env_vars=reward_env_vars or (),
        )
        self.tokenizer_name = tokenizer
        self.chat_template_kwargs = chat_template_kwargs
        if engine is None:
            from lit_rlsched.engines.vllm import VLLMEngine

            engine = VLLMEngine()
        self.engine = engine
        self.prompts_per_round = prompts_per_round
        self.num_generations = num_generations
        self.steps_per_round = steps_per_round
        self.num_iterations = num_iterations
        self.micro_batch_tokens = micro_batch_tokens
        self.sampling = Sampling(max_completion_length, temperature, top_p, top_k, min_p)
        check_sampling(self.sampling)
        check_val_temperature(val_temperature)
        self.mask_truncated_completions = mask_truncated_completions
        self.evaluation = EvaluationSettings(
            replace(
                self.sampling,
                temperature=temperature if val_temperature is None else val_temperature,
            ),
            val_num_generations,
            val_greedy,
            val_accuracy_threshold,
        )
        self.shuffle = shuffle
        self._told_of_threshold = False
        self._scores = True
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.verify_sync = verify_sync

        self.slot_settings = SlotSettings()
        """How many completions decode at once, in which order; set by `MicroGroupSampling`."""
        self.lengths: CalibratedPredictor | None = None
        """Predicts how long completions become; set by `LengthPrediction`."""
        self.probe_tokens: int | None = None
        """Tokens after which it is asked; set by `LengthPrediction`."""
        self.round_rule: RoundRule = FullRound(prompts_per_round)
        """When a round ends; set by `SortedBatching`."""
        self.mask_stale_tokens = False
        """Leave tokens of earlier policy versions out of the loss; set by `SortedBatching`."""
        self.selection: Selection | None = None
        """Which completions are trained on; set by `DownSampling`."""
        self.streaming: Streaming | None = None
        """When gradients are computed during the rollout; set by `StreamedTraining`."""
        self.timeouts: AdaptiveTimeout | None = None
        """How long reward functions may take; set by `AdaptiveTimeouts`."""
        self.max_num_gen_batches = 1
        """Rounds' worth of prompts that a round may draw, where a prompt whose completions are all
        worth the same is replaced by another; set by `DynamicSampling`."""

        self.advice = Advice()
        """What the run was told."""
        self.pool = RolloutBuffer()
        self._drawer = RoundDrawer(RoundPlanner(self.pool, self.sampling, num_generations))
        self.current: Round | None = None
        """The round that is being trained on."""
        self.num_rounds = 0
        """Rounds that are over."""
        self.counters: Counter[str] = Counter()
        """Totals since the run began: `num_tokens`, `num_completions`, `dropped/*`."""
        self._round_start = 0
        self._empty_steps = 0
        self._resumed: dict[str, Any] | None = None
        self._fit: FitSettings | None = None
        self._run: Trainer | None = None
        """Whose policy versions the round and the pool have."""
        self._session: RolloutSession | None = None
        self._prompts = PromptSets([], {})
        self._tokenizer: Any = None
        self._rows: dict[str, list[dict[str, Any]]] = {}

    # Lightning's hooks.

    def setup(self, stage: str) -> None:
        """Read the data sets that `stage` needs.

        Raises:
            MisconfigurationException: the Trainer runs more than one process.
        """
        assert self.trainer is not None
        check_one_process(self.trainer.world_size)
        if stage == "fit":
            self._fit = FitSettings(self.trainer, self.steps_per_epoch)
            check_siblings(self.num_generations, self.learner.needs_group)
            if self.learner.needs_engine_logprobs(off_policy=False):
                check_logprobs("`old_logprobs='engine'`", self.engine, self.sampling)
        stage = TrainerFn(stage).value  # Lightning gives one, whose text in a message is not it
        wanted = {
            "fit": ("train", "val"),
            "validate": ("val",),
            "test": ("test",),
            "predict": ("predict",),
        }
        for name in wanted.get(stage, ()):
            data = getattr(self, f"{name}_data")
            if data is not None and name not in self._rows:
                self._rows[name] = load_rows(data)
                self._check_columns(name)
            elif data is None and (stage, name) != ("fit", "val"):
                raise MisconfigurationException(
                    f"There is nothing to {stage} on. Give `RolloutDataModule({name}_data=...)`."
                )

    def _check_columns(self, name: str) -> None:
        try:
            self.rewards.check_columns(self._rows[name], f"{name}_data")
        except ValueError as error:
            if name != "predict":
                raise
            self._scores = False
            rank_zero_warn(f"No rewards are computed: {error}")

    def train_dataloader(self) -> Rounds | MicroBatches:
        """Rounds for manual optimization, micro-batches one by one for automatic optimization."""
        self._ensure_session()  # now: errors belong before the first epoch
        assert self.trainer is not None
        if self.trainer.lightning_module.automatic_optimization:
            return MicroBatches(self)
        return Rounds(self)

    def val_dataloader(self) -> Evaluation | list:
        """Held-out prompts with their completions."""
        return Evaluation(self, "val") if self.val_data is not None else []

    def test_dataloader(self) -> Evaluation | list:
        """Test prompts with their completions."""
        return Evaluation(self, "test") if self.test_data is not None else []

    def predict_dataloader(self) -> Evaluation:
        """Prompts without known answers, with their completions."""
        return Evaluation(self, "predict")

    def teardown(self, stage: str) -> None:
        """Close engine and workers; forget what callbacks have set."""
        if stage == "fit" and self._round_is_over:
            assert self.trainer is not None
            log_now(self.trainer, self._end_round())
        if self._fit is not None:
            self._fit.undo()
        self.close()
        self._scores = True
        self.slot_settings, self.lengths, self.probe_tokens = SlotSettings(), None, None
        self.round_rule, self.mask_stale_tokens = FullRound(self.prompts_per_round), False
        self.selection, self.max_num_gen_batches, self.timeouts = None, 1, None
        self.streaming = None

    def on_exception(self, exception: BaseException) -> None:
        """The same: Lightning does not tear down after one."""
        self.teardown("")

    def close(self) -> None:
        """Close engine and workers; safe to call twice."""
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close()
        finally:
            self.rewards.close()  # they may be running where the engine did not start

    # Rounds.

    def on_fit_start(self) -> None:
        """Optimizers are configured; `MicroBatchAccumulation` passes it on."""
        if self._fit is not None:
            self._fit.begin()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a round."""
        return self.steps_per_round * self.num_iterations

    def optimizer_steps(self) -> Iterator[OptimizerStep]:
        """The steps of the next round, or what is left of the one a checkpoint was made in."""
        self._ensure_session()  # tokenises the prompts that a checkpoint names
        assert self.trainer is not None
        if self._resumed is not None:
            self._restore(self._resumed)
            self._resumed = None
        elif self._run is not None and self._run is not self.trainer:
            self._leave_run(self._run)
        self._run = self.trainer
        if self._round_is_over:
            self._end_round()
        round = self.current or self._roll_out()
        for index in range(self._cursor, self._steps_of_epoch):
            step = self._update.step(round, index)
            if not len(step) and self.trainer.lightning_module.automatic_optimization:
                self._empty_steps += 1  # Lightning will not see it, so will not count it
            yield step

    @property
    def rounds_over(self) -> int:
        """Rounds that are trained on as a whole."""
        if self._resumed is not None:
            return int(self._resumed["num_rounds"])
        return self.num_rounds + self._round_is_over

    @property
    def _cursor(self) -> int:
        """Steps of the current round that were taken: whatever was taken, a checkpoint has."""
        assert self.trainer is not None
        return self.trainer.global_step - self._round_start + self._empty_steps

    @property
    def _steps_of_epoch(self) -> int:
        """Optimizer steps that are taken of a round: `limit_train_batches` may cut them."""
        return self.steps_per_epoch if self._fit is None else self._fit.steps

    @property
    def _round_is_over(self) -> bool:
        return self.current is not None and self._cursor >= self._steps_of_epoch

    def _end_round(self) -> dict[str, float]:
        """Be done with the current round; totals of what the limit has left of it."""
        left = self._untrained(self._cursor, "limit_train_batches")
        self.counters += left
        self.num_rounds += 1
        self.current = None
        return {name: self.counters[name] for name in left}

    def _untrained(self, taken: int, why: str) -> Counter[str]:
        """Completions of the current round in steps after the first `taken`, dropped."""
        assert self.current is not None
        steps = range(taken, self.steps_per_round)
        dropped = sum(len(self._update.step(self.current, i).rows) for i in steps)
        return Counter({f"dropped/{why}": dropped} if dropped else {})

    def _leave_run(self, trainer: Trainer) -> None:
        """Begin anew with the prompts of another Trainer's pool: its policy versions mean nothing.

        What was left of its last round is dropped.
        """
        if self.current is not None:
            taken = trainer.global_step - self._round_start + self._empty_steps
            self.counters += self._untrained(taken, "new_trainer")
            self.num_rounds += 1
        self.current, self._round_start, self._empty_steps = None, 0, 0
        self.advice = Advice()
        self.counters["num_discarded_tokens"] += self._drawer.leave_run()

    def _roll_out(self) -> Round:
        """Draw a round, and tell what it took."""
        trainer, session = self.trainer, self._ensure_session()
        assert trainer is not None
        plan = self._drawer.plan(self.num_rounds, trainer.global_step, self.round_rule)
        fire(trainer, "on_round_start", plan.groups)
        round, counts = self._drawer.draw(
            plan, session, self._update, self.streaming, self.max_num_gen_batches
        )
        self.current, self._round_start, self._empty_steps = round, round.version, 0
        self.counters += counts
        round.metrics |= dict.fromkeys(self.rewards.counters(), 0) | self.counters
        limit = self.sampling.max_completion_length
        told = self.advice.of_round(round, self.rewards.weights, limit, self.learner.needs_group)
        for text in told:
            rank_zero_warn(text)
        fire(trainer, "on_round_end", round)
        log_now(trainer, round.metrics)
        return round

    @property
    def _update(self) -> Update:
        """As callbacks have set it by now."""
        assert self.trainer is not None
        return Update(
            self.learner,
            self.round_rule,
            self.selection,
            self.rewards.weights,
            seed=self.seed,
            runs=self._drawer.runs,
            steps_per_round=self.steps_per_round,
            num_iterations=self.num_iterations,
            micro_batch_tokens=self.micro_batch_tokens,
            mask_truncated=self.mask_truncated_completions,
            mask_stale=self.mask_stale_tokens,
            forward_context=self.trainer.precision_plugin.forward_context,
        )

    @property
    def learner(self) -> Learner:
        """The module, or what stands in for one that knows nothing of rollouts."""
        assert self.trainer is not None
        module = self.trainer.lightning_module
        return module if isinstance(module, Learner) else PlainLearner()

    # Held-out prompts.

    def held_out(self, stage: str) -> list[Prompt]:
        """The prompts of `val` or `test`."""
        if stage not in self._prompts.held_out:  # else Lightning may ask after the end, too
            self._ensure_session()  # tokenises them
        return self._prompts.held_out[stage]

    def evaluate(self, stage: str) -> Iterator[Evaluated]:
        """Answer each held-out prompt; the seeds are the same at every evaluation."""
        assert self.trainer is not None
        session, version = self._ensure_session(), self.trainer.global_step
        return evaluate(
            self.held_out(stage),
            self.evaluation,
            stage,
            lambda groups: session.rollout(groups, version, salt=stage),
            self.rewards.weights,
            self._look_at_accuracy,
        )

    def _look_at_accuracy(self, evaluated: Sequence[Evaluated]) -> None:
        if self.trainer is not None and self.trainer.predicting:
            return
        said = never_correct(evaluated, self.rewards.names[0], self.evaluation.threshold)
        if said is not None and not self._told_of_threshold:
            self._told_of_threshold = True
            rank_zero_warn(said)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Everything of the run that the weights do not hold: primitives and tensors only."""
        if self._resumed is not None:  # nothing has happened since it was loaded
            return self._resumed
        over, counters, saved = self._round_is_over, self.counters, None
        if over:
            counters = counters + self._untrained(self._cursor, "limit_train_batches")
        elif self.current is not None:
            at = {"start": self._round_start, "empty_steps": self._empty_steps}
            saved = self.current.state_dict() | at
        return {
            "format": FORMAT,
            "version": __version__,
            "settings": {name: getattr(self, name) for name in _SAME_ON_RESUME},
            "reward_funcs": list(self.rewards.names),
            **self._drawer.state_dict(),
            "num_rounds": self.num_rounds + over,
            "counters": dict(counters),
            "advice": self.advice.state_dict(),
            "round": saved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the checkpoint is of this configuration; restored once the prompts are known.

        Validation and test take the weights of a checkpoint and nothing of its run.

        Raises:
            ValueError: a setting differs that decides what was drawn, or the state has a format
                that is not known.
        """
        assert self.trainer is not None
        if self.trainer.state.fn != "fit":
            return
        check_format(state)
        check_resumed(state["settings"], vars(self))
        drawn = [state["pool"], *([state["round"]["groups"]] if state["round"] else [])]
        limit = self.sampling.max_completion_length
        check_resumed_groups(drawn, state.get("reward_funcs"), self.rewards.names, limit)
        self._resumed = state

    def _restore(self, state: dict[str, Any]) -> None:
        prompts = {prompt.uid: prompt for prompt in self._prompts.train}
        self._drawer.load_state_dict(state, prompts.__getitem__)
        decode = self._ensure_session().scorer.decode
        for completion in self.pool.completions:
            if not self.round_rule.keeps_drafts:
                completion.draft = None  # made with `reuse="drafts"`, gone on with without
            if completion.finished:
                completion.text = decode(completion.token_ids)
        if self.learner.needs_group or self.selection:
            check_resumed_pool(self.pool, self.num_generations)
        self.num_rounds = state["num_rounds"]
        self.counters = Counter(state["counters"])
        self.advice.load_state_dict(state.get("advice", {}))
        self.current, self._round_start, self._empty_steps = None, 0, 0
        if (saved := state["round"]) is not None:
            self.current = Round.from_state(saved, prompts.__getitem__)
            self._round_start, self._empty_steps = saved["start"], saved["empty_steps"]

    # Start-up.

    @property
    def session(self) -> RolloutSession | None:
        """Engine, rewards and controller, once they are started."""
        return self._session

    def _ensure_session(self) -> RolloutSession:
        """Built when first needed: the module has loaded the policy by then."""
        if self._session is None:
            self._session = self._start()
        return self._session

    def engine_spec(self) -> EngineSpec:
        """What the engine will be started with; refuses what cannot work before it is.

        Raises:
            ValueError: settings, prompts and model do not fit each other.
        """
        assert self.trainer is not None
        policy, limit = self._policy, self.sampling.max_completion_length
        model = str(base_model(policy).name_or_path)
        self._tokenizer = load_tokenizer(self.tokenizer_name or model)
        self._prompts = prompts = tokenize(
            self._rows,
            self._tokenizer,
            context=context_length(policy),
            max_completion_length=limit,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        check_lengths(prompts.longest, limit, self.micro_batch_tokens)
        self.rewards.check_rows((prompt.uid, prompt.columns) for prompt in prompts.all)
        if prompts.train:
            self.round_rule.check_enough(len(prompts.train))
            self.round_rule.check_domains(prompts.train)
            check_gen_batches(
                len(prompts.train) - self.round_rule.most_deferred,
                self.prompts_per_round,
                self.max_num_gen_batches,
            )
            domain_of = self.round_rule.domain_of
            self._drawer.planner.connect(
                DomainSource(prompts.train, self.seed, self.shuffle, domain_of)
            )
        check_probe(self._probe_tokens, limit)
        self._resolved_order()  # refuses one that needs predictions
        precision = str(self.trainer.precision).partition("-")[0]
        spec = EngineSpec(
            model=model,
            slots=0,
            max_model_len=prompts.longest + limit,
            eos_token_ids=eos_token_ids(policy, self._tokenizer),
            dtype=_ENGINE_DTYPES.get(precision, torch.float32),
            device=self.trainer.lightning_module.device,
            policy=policy,
            seed=self.seed,
            kv_cache_bytes=self.slot_settings.memory_budget,
        )
        most, bytes_ = self.most_completions(), self.cache_bytes_per_token(spec)
        slots = self.slot_settings.engine_slots(self.engine, spec, bytes_, most, prompts.shortest)
        return replace(spec, slots=slots)

    def cache_bytes_per_token(self, spec: EngineSpec) -> int:
        """Of the engine's key-value cache, in all layers."""
        return kv_bytes_per_token(base_model(self._policy).config, self.engine.cache_dtype(spec))

    def admission(self, spec: EngineSpec) -> Admission:
        """What stands in front of an engine that was started with `spec`."""
        return self.slot_settings.admission(
            self.engine,
            spec,
            self.cache_bytes_per_token(spec),
            self.sampling.max_completion_length,
            self._resolved_order(),
        )

    def _resolved_order(self) -> Order:
        early = self.round_rule.ends_early
        return self.slot_settings.resolved_order(self.lengths is not None, early)

    @property
    def _policy(self) -> nn.Module:
        assert self.trainer is not None
        return find_policy(self.trainer.lightning_module)

    @property
    def _probe_tokens(self) -> int:
        limit = self.sampling.max_completion_length
        return min(16, limit // 16) if self.probe_tokens is None else self.probe_tokens

    def _start(self) -> RolloutSession:
        assert self.trainer is not None
        if self.trainer.state.fn == "fit" and self._resumed is None:
            check_nothing_is_resumed(self.trainer.ckpt_path, type(self).__qualname__)
        spec = self.engine_spec()
        check_float32(self._policy, type(self.trainer.lightning_module).__name__)
        if self.sampling.truncated:
            rank_zero_warn(
                "With `top_p`, `top_k` or `min_p` the engine's log-probs are of the truncated "
                "distribution and the trainer's are not: they are not compared, and importance "
                "sampling is off."
            )

        def decode(token_ids: list[int]) -> str:
            ids = np.asarray(token_ids)  # of a list, transformers looks at every element
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))

        if self.lengths is not None:
            self.lengths.bind(decode)
        self.rewards.start()
        self._advise(spec)
        return RolloutSession(
            self.engine,
            spec,
            lambda: self.admission(spec),
            Scorer(self.rewards, decode, self.timeouts, self._trainer_state, self._scores),
            self._policy,
            seed=self.seed,
            probe=self._prompts.all[:2] if self.verify_sync else (),
            probe_temperature=self.sampling.temperature,
            forward_context=self.trainer.precision_plugin.forward_context,
            lengths=self.lengths,
            probe_tokens=self._probe_tokens,
            on_completion=lambda completion: self._fire("on_completion_end", completion),
            on_group=lambda group: self._fire("on_group_end", group),
            heed=self._heed,
        )

    def _trainer_state(self) -> Any:
        assert self.trainer is not None
        prompts = len(self._prompts.train)
        return trainer_state(self.trainer, self.steps_per_epoch, self.prompts_per_round, prompts)

    def _advise(self, spec: EngineSpec) -> None:
        if self._resumed is not None:
            self.advice.load_state_dict(self._resumed.get("advice", {}))
        warn_of_unseen_gpu(spec.device.type)
        slots = self.slot_settings.slots if self._prompts.train else None
        trained = self._policy if self._prompts.train else None
        most = self.round_rule.most_prompts() * self.round_rule.launched(self.num_generations)
        for text in self.advice.at_start(spec.eos_token_ids, slots, most, trained):
            rank_zero_warn(text)

    def _fire(self, hook: str, *args: Any) -> None:
        assert self.trainer is not None
        if self.trainer.training:
            fire(self.trainer, hook, *args)

    def _heed(self) -> None:
        assert self.trainer is not None
        heed(self.trainer)

    def most_completions(self, num_generations: int | None = None) -> int:
        """Completions that a round or a validation may decode, whichever are more.

        Args:
            num_generations: Of a prompt in a round; by default the configured ones.
        """
        held_out = max(map(len, self._prompts.held_out.values()), default=0)
        answers = self.evaluation.num_generations + self.evaluation.greedy
        launched = self.round_rule.launched(num_generations or self.num_generations)
        most = self.round_rule.most_prompts() * launched
        return max(most, held_out * answers)
