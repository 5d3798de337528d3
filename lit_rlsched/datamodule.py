"""The data module: owns prompts, pool, engine and rewards, and turns them into optimizer steps."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched import checks
from lit_rlsched.checkpoints import check_nothing_is_resumed
from lit_rlsched.data.source import Rows, load_rows
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.evaluation import EvaluationSettings
from lit_rlsched.fit_settings import FitSettings
from lit_rlsched.loaders import Evaluation, MicroBatches, Rounds
from lit_rlsched.logs import log_now
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.rollout.buffer import RolloutBuffer
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.schedule import Schedule
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.startup import Startup
from lit_rlsched.training.round import Round
from lit_rlsched.training_run import TrainingRun
from lit_rlsched.types import Sampling


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
        reward_funcs: list[Callable],  # type: ignore[type-arg]  # as jsonargparse reads it
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
        checks.check_settings(locals())
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
        checks.check_sampling(self.sampling)
        checks.check_val_temperature(val_temperature)
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
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.verify_sync = verify_sync

        self.schedule = Schedule(FullRound(prompts_per_round))
        """What callbacks have set for this run."""
        self.run = TrainingRun(self)
        """Where the run is."""
        self.rows: dict[str, list[dict[str, Any]]] = {}
        """Of the data sets that were read, by stage: `train`, `val`, `test`, `predict`."""
        self.has_rewards = True
        """Whether reward functions are asked; not in `predict`, where rows lack their columns."""
        self._startup: Startup | None = None
        self._session: RolloutSession | None = None

    # Lightning's hooks.

    def setup(self, stage: str) -> None:
        """Read the data sets that `stage` needs.

        Raises:
            MisconfigurationException: the Trainer runs more than one process.
        """
        assert self.trainer is not None
        checks.check_one_process(self.trainer.world_size)
        if stage == "fit":
            self.run.settings = FitSettings(self.trainer, self.steps_per_epoch)
            checks.check_siblings(self.num_generations, self.run.learner.needs_group)
            if self.run.learner.needs_engine_logprobs(off_policy=False):
                checks.check_logprobs("`old_logprobs='engine'`", self.engine, self.sampling)
        stage = TrainerFn(stage).value  # Lightning gives one, whose text in a message is not it
        for name in checks.data_sets_of(stage):
            data = getattr(self, f"{name}_data")
            if data is None:
                checks.check_data_set(name, stage)
                continue
            if name not in self.rows:
                self.rows[name] = load_rows(data)
            self._check_columns(name)

    def _check_columns(self, name: str) -> None:
        try:
            self.rewards.check_columns(self.rows[name], f"{name}_data")
        except ValueError as error:
            if name != "predict":
                raise
            self.has_rewards = False
            rank_zero_warn(f"No rewards are computed: {error}")

    def train_dataloader(self) -> Rounds | MicroBatches:
        """Rounds for manual optimization, micro-batches one by one for automatic optimization."""
        self.started()  # now: errors belong before the first epoch
        assert self.trainer is not None
        if self.trainer.lightning_module.automatic_optimization:
            return MicroBatches(self)
        return Rounds(self)

    def val_dataloader(self) -> Evaluation | list[Any]:
        """Held-out prompts with their completions."""
        return Evaluation(self, "val") if self.val_data is not None else []

    def test_dataloader(self) -> Evaluation | list[Any]:
        """Test prompts with their completions."""
        return Evaluation(self, "test") if self.test_data is not None else []

    def predict_dataloader(self) -> Evaluation:
        """Prompts without known answers, with their completions."""
        return Evaluation(self, "predict")

    def teardown(self, stage: str) -> None:
        """Close engine and workers; forget what callbacks have set."""
        if stage == "fit" and self.run.round_is_over:
            assert self.trainer is not None
            log_now(self.trainer, self.run.end_round())
        if self.run.settings is not None:
            self.run.settings.undo()
        self.close()
        self.has_rewards = True
        self.schedule = Schedule(FullRound(self.prompts_per_round))

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
        if self.run.settings is not None:
            self.run.settings.begin()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a round."""
        return self.steps_per_round * self.num_iterations

    @property
    def pool(self) -> RolloutBuffer:
        """Prompts drawn and not yet trained on."""
        return self.run.rounds.runner.planner.pool

    @property
    def current(self) -> Round | None:
        """The round that is being trained on."""
        return self.run.current

    @property
    def counters(self) -> Counter[str]:
        """Totals since the run began: `num_tokens`, `num_completions`, `dropped/*`."""
        return self.run.counters

    @property
    def num_rounds(self) -> int:
        """Rounds that are over."""
        return self.run.num_rounds

    @property
    def rounds_over(self) -> int:
        """Rounds that are trained on as a whole."""
        return self.run.rounds_over

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Everything of the run that the weights do not hold: primitives and tensors only."""
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the checkpoint is of this configuration; restored once the prompts are known.

        Validation and test take the weights of a checkpoint and nothing of its run.

        Raises:
            ValueError: a setting differs that decides what was drawn, or the state has a format
                that is not known.
        """
        assert self.trainer is not None
        if self.trainer.state.fn == "fit":
            self.run.load_state_dict(state)

    # Start-up.

    @property
    def session(self) -> RolloutSession | None:
        """Engine, rewards and controller, once they are started."""
        return self._session

    @property
    def startup(self) -> Startup:
        """What it was started with, prompts and policy; there is one once it was started."""
        assert self._startup is not None, "not started"
        return self._startup

    def is_tokenized(self, stage: str) -> bool:
        """Whether the prompts of a held-out data set are known."""
        return self._startup is not None and stage in self._startup.prompts.held_out

    def started(self) -> RolloutSession:
        """The session, started when first needed: the module has loaded the policy by then.

        Raises:
            ValueError: settings, prompts and model do not fit each other.
        """
        if self._session is None:
            assert self.trainer is not None
            resumed = self.run.resumed
            if resumed is not None:
                self.run.advice.load_state_dict(resumed.get("advice", {}))
            elif self.trainer.state.fn == "fit":
                check_nothing_is_resumed(self.trainer.ckpt_path, type(self).__qualname__)
            self._startup = Startup(self)
            if self._startup.prompts.train:
                self.run.rounds.runner.planner.connect(self._startup.source)
            self._session = self._startup.start()
        return self._session
