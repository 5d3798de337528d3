"""The data module: holds prompts, engine and rewards, and gives the Trainer optimizer steps."""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from lightning import LightningDataModule
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rlsched.callbacks.rollout_progress_bar import replace_default_bar
from lit_rlsched.data.rows import Rows
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.environments.protocol import Environments, ToolSettings
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.run import checks
from lit_rlsched.run.interrupts import is_requeued, requeue
from lit_rlsched.run.loaders import Evaluation, MicroBatches, Rounds
from lit_rlsched.run.policy_module import PolicyModule
from lit_rlsched.run.run_config import logged_settings, run_ids
from lit_rlsched.run.startup import make_engine
from lit_rlsched.run.trainer import log_now
from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.settings import KnownArguments, arguments_checked
from lit_rlsched.training.schedule import EvaluationSettings, RunSettings
from lit_rlsched.types import Sampling


class RolloutDataModule(LightningDataModule, KnownArguments):
    """Provides the optimizer steps of one round per Lightning epoch.

    A round has `prompts_per_round * num_generations` completions and is trained on in
    `steps_per_round * num_iterations` optimizer steps. Each step is split into micro-batches of at
    most `micro_batch_tokens` positions, so their number depends on the lengths.

    Args:
        train_data: Prompts to train on: a JSONL, JSON or Parquet file, a data set's folder or hub
            name, a task such as `Countdown`, or rows; also a `datasets.IterableDataset`, which is
            read to its end. A row has a `prompt` (string or chat messages), optionally
            a `uid`, and any columns that the reward functions take.
        reward_funcs: Reward functions with TRL's signature, or one.
        val_data: Held-out prompts for validation, in the same forms.
        test_data: Prompts for `test`; by default `val_data`.
        predict_data: Prompts for `predict`, which answers them as validation does and computes
            rewards if the rows have the columns for it.
        reward_weights: One weight per reward function; by default 1 each.
        reward_timeout: Maximum number of seconds that a reward function may take per completion.
        reward_workers: Number of processes that run reward functions.
        reward_memory_limit: Maximum memory for the reward calls of each worker, such as `4GiB`; by
            default half of the machine's memory, shared by all workers.
        reward_env_vars: Names of environment variables that reward functions and tools may read,
            besides the few that Python needs.
        tools: Functions that completions may call, with types and Google-style docstrings, or
            their import paths. As in TRL, sync or async.
        environment_factory: A class whose objects hold the state of one completion: `reset` gets
            the columns of the row and may return a text for the end of the prompt, other public
            methods are tools, and `get_reward`, if there is one, gives a reward. Or its import
            path, a function that makes such objects, the address of an OpenEnv server, or a dict of
            several: then the column `environment` names that of a row. Rows need no `prompt` then,
            and equal rows are kept: with `train_data=[{}] * 64` each pass has 64 tasks that `reset`
            makes.
        max_tool_calling_iterations: Turns with calls that a completion may have; by default as many
            as fit into `max_completion_length`, which counts replies too.
        environment_workers: Number of processes that run tools; each runs many at once.
        tool_timeout: Maximum number of seconds for the calls of a turn. A completion whose tool
            takes longer is dropped.
        max_sessions: Maximum number of objects of environments that are in use at once.
        tool_steps: Let a completion go on this many decode steps after its call, however long its
            tools take: the engine waits for those that are later. Rounds that end early then train
            on the same completions in each run. By default it goes on as soon as it can.
        tokenizer: Folder or hub name; by default the policy's tokenizer.
        chat_template_kwargs: Additional arguments for the chat template, such as
            `{"enable_thinking": False}`. A last message of the assistant is continued; with
            `{"add_generation_prompt": True}` a new one begins after it.
        skip_special_tokens: Whether the text of completions is without the tokenizer's special
            tokens, for rewards, judges, tables and files alike. Use False for tags such as
            `<answer>` that the tokenizer holds as special tokens: then only the token that ended
            the completion is left out.
        engine: Engine that decodes completions; by default `VLLMEngine()`.
        num_engines: Number of such engines, which decode a round together, each in its own process:
            engine `i` on GPU `i`, or on CPU with an equal share of the cores; with `RayEngine`, on
            any node of a cluster. One engine draws all completions of a prompt. Rounds that train
            on all completions draw the same ones with any number.
        prompts_per_round: Number of prompts per round.
        num_generations: Number of completions per prompt.
        steps_per_round: Number of optimizer steps that share the completions of a round.
        num_iterations: Number of times that a round is trained on.
        micro_batch_tokens: Maximum number of positions, padding included, of a forward and backward
            pass.
        max_completion_length: Maximum number of tokens per completion.
        temperature: Sampling temperature in training.
        top_p: Sample from the smallest set of tokens that has this probability.
        top_k: Sample from this many most likely tokens; 0 for all.
        min_p: Exclude tokens less likely than this fraction of the most likely token's probability.
        mask_truncated_completions: Exclude completions cut at the length limit from the loss.
        val_num_generations: Number of completions sampled per held-out prompt, for mean@k and
            pass@k.
        val_temperature: Sampling temperature of these completions; by default `temperature`.
        val_greedy: Whether to also decode each held-out prompt greedily.
        val_accuracy_threshold: Minimum score from the first reward function for a held-out
            completion to count as correct in `val/accuracy`, `mean@k`, `pass@k` and
            `greedy_accuracy`.
        shuffle: Whether each pass over the data has a new random order of prompts.
        seed: Seed of the order and of every completion; by default the one of `seed_everything`.
        verify_sync: Check after each weight sync that the engine's log-probs equal the trainer's.

    Raises:
        ValueError: an argument is out of range, or two arguments contradict each other.

    Example::

        data = RolloutDataModule("gsm8k.jsonl", [accuracy], prompts_per_round=64, num_generations=8)
        Trainer(max_epochs=100).fit(GRPOModule("Qwen/Qwen3-0.6B"), datamodule=data)
    """

    def __init__(
        self,
        train_data: Rows,
        reward_funcs: list[Callable] | Callable | None = None,  # type: ignore[type-arg]  # for jsonargparse
        *,
        val_data: Rows | None = None,
        test_data: Rows | None = None,
        predict_data: Rows | None = None,
        reward_weights: list[float] | None = None,
        reward_timeout: float = 30.0,
        reward_workers: int = 1,
        reward_memory_limit: str | int | None = None,
        reward_env_vars: list[str] | None = None,
        tools: list[Any] | None = None,
        environment_factory: Any = None,
        max_tool_calling_iterations: int | None = None,
        environment_workers: int = 1,
        tool_timeout: float = 60.0,
        max_sessions: int | None = None,
        tool_steps: int | None = None,
        tokenizer: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        skip_special_tokens: bool = True,
        engine: RolloutEngine | None = None,
        num_engines: int = 1,
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
        given = locals()
        with arguments_checked("RolloutDataModule", [RolloutDataModule], given):
            checks.check_settings(given)
        data_sets = ["train_data", "val_data", "test_data", "predict_data"]
        objects = ["reward_funcs", "tools", "environment_factory", "engine"]
        self.save_hyperparameters(ignore=[*data_sets, *objects])
        called = None
        if tools or environment_factory is not None:
            called = ToolSettings(
                Environments(tools, environment_factory),
                max_tool_calling_iterations,
                environment_workers,
                tool_timeout,
                max_sessions,
                tool_steps,
            )
        own = called.environments.rewards if called else []
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if reward_weights is not None:
            reward_weights = [*reward_weights, *[1.0] * len(own)]
        rewards = RewardScheduler(
            [*(function for function in functions if function is not None), *own],
            reward_weights=reward_weights,
            workers=reward_workers,
            timeout=reward_timeout,
            memory_limit=reward_memory_limit,
            env_vars=reward_env_vars or (),
            environments=environment_factory is not None,
        )
        sampling = Sampling(max_completion_length, temperature, top_p, top_k, min_p)
        made = {"engine", "seed", "tools"}
        same = {field.name for field in fields(RunSettings)}.intersection(given) - made
        self.run = TrainingRun(
            RunSettings(
                {
                    "train": train_data,
                    "val": val_data,
                    "test": val_data if test_data is None else test_data,
                    "predict": predict_data,
                },
                rewards,
                make_engine(engine, num_engines),
                sampling,
                EvaluationSettings(
                    replace(sampling, temperature=val_temperature or temperature),
                    val_num_generations,
                    val_greedy,
                    val_accuracy_threshold,
                ),
                seed=int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed,
                tools=called,
                **{name: given[name] for name in same},
            )
        )
        """The run's settings, schedule, session, rounds, and its position in them."""

    # Lightning's hooks.

    def prepare_data(self) -> None:
        """Replace Lightning's default bar."""
        if self.trainer is not None:
            replace_default_bar(self.trainer)

    def setup(self, stage: str) -> None:
        """Read the data sets that `stage` needs.

        Raises:
            UsageError: the Trainer's strategy is not supported, or the data set of
                `stage` is missing.
        """
        assert self.trainer is not None
        stage = TrainerFn(stage).value  # messages would show the enum's name
        self.run.join(self.trainer, trains=stage == "fit")
        if stage == "fit":
            self.run.begin()
            self.run.read("train", stage)
            if self.run.settings.data["val"] is not None:
                self.run.read("val", stage)
        else:
            self.run.read("val" if stage == "validate" else stage, stage)
        if isinstance(self.trainer.lightning_module, PolicyModule):
            _call_configure_model(self.trainer)  # callbacks may look at the weights in `setup`

    @property
    def hparams_initial(self) -> AttributeDict:
        """Settings of the whole run, which Lightning gives to every logger; see `run_config`."""
        run = self.run
        return logged_settings(super().hparams_initial, self.trainer, run.settings, run.rows)

    def train_dataloader(self) -> Rounds | MicroBatches:
        """Loader of optimizer steps, or of micro-batches for automatic optimization."""
        self.run.start()  # so that errors come before the first epoch
        automatic = self.run.trainer.lightning_module.automatic_optimization
        return MicroBatches(self.run) if automatic else Rounds(self.run)

    def val_dataloader(self) -> Evaluation | list[Any]:
        """Validation prompts with their completions."""
        return [] if self.run.settings.data["val"] is None else Evaluation(self.run, "val")

    def test_dataloader(self) -> Evaluation | list[Any]:
        """Test prompts with their completions."""
        return [] if self.run.settings.data["test"] is None else Evaluation(self.run, "test")

    def predict_dataloader(self) -> Evaluation:
        """Prompts of `predict_data` with their completions."""
        return Evaluation(self.run, "predict")

    def teardown(self, stage: str) -> None:
        """Close engine and reward workers, and discard the schedule."""
        if stage == "fit" and self.run.round_is_over:
            log_now(self.run.trainer, self.run.end_round())
        self.run.finish()

    def on_exception(self, exception: BaseException) -> None:
        """Tear down, which Lightning does not, and requeue a job that SLURM's signal stopped."""
        if isinstance(exception, SIGTERMException) and is_requeued(self.run.trainer):
            requeue(self.run.trainer)
        self.run.team.failed(exception)
        self.teardown("")

    # State of the run.

    def state_dict(self) -> dict[str, Any]:
        """Everything of the run except the weights, as primitives and tensors."""
        return {**self.run.state_dict(), "wandb_ids": run_ids(self.trainer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a checkpoint against this run and keep it until the prompts are tokenised.

        Validation, test and prediction use the checkpoint's weights only.

        Raises:
            ValueError: a setting that decides what is drawn has another value, or the format of the
                state is unknown.
        """
        assert self.trainer is not None
        if self.trainer.state.fn == "fit":
            self.run.load_state_dict(state)
