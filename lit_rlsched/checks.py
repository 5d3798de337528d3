"""Checks of the data module's arguments, before anything is built."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.scheduling.parallelism_planner import check_sizes
from lit_rlsched.settings import check_finite
from lit_rlsched.types import Group, Sampling

_LEAST = {
    "prompts_per_round": 1,
    "num_generations": 1,
    "steps_per_round": 1,
    "num_iterations": 1,
    "micro_batch_tokens": 1,
    "val_num_generations": 0,
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what cannot work.

    Raises:
        ValueError: names the argument, its value and what to use instead.
    """
    check_finite(settings, besides=["train_data", "val_data", "test_data", "predict_data"])
    for name, low in _LEAST.items():
        if settings[name] < low:
            raise ValueError(f"`{name}={settings[name]}`: use {low} or more.")
    prompts, steps = settings["prompts_per_round"], settings["steps_per_round"]
    if prompts % steps:
        divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
        raise ValueError(
            f"`steps_per_round={steps}` does not divide `prompts_per_round={prompts}`. Use one of "
            f"{divisors}, or change `prompts_per_round`."
        )
    given = [name for name in ("val_data", "predict_data") if settings[name] is not None]
    if given and not (settings["val_greedy"] or settings["val_num_generations"]):
        raise ValueError(
            "`val_greedy=False` with `val_num_generations=0` leaves nothing to validate "
            f"`{given[0]}` with. Set `val_num_generations` to 1 or more, or leave `val_greedy` on."
        )


def check_module_settings(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of a `PolicyModule` that are out of range or contradict each other.

    Args:
        settings: Its arguments.

    Raises:
        ValueError: names the argument, its value and what to use instead.
    """
    rloo = settings["loss_type"] == "rloo"
    old_logprobs = settings["old_logprobs"]
    if old_logprobs not in ("trainer", "engine", None):
        raise ValueError(f"`{old_logprobs=}` is unknown. Use 'trainer' or 'engine'.")
    if old_logprobs == "engine" and rloo:
        raise ValueError(
            "`old_logprobs='engine'` with `loss_type='rloo'`: the product of a sequence's "
            "ratios to what drew its tokens is unbounded. Use `old_logprobs='trainer'`, which "
            "`importance_sampling_mode` corrects, or another loss type."
        )
    for name in ("learning_rate", "beta", "lora_rank", "warmup_steps"):
        if settings[name] < 0:
            raise ValueError(f"`{name}={settings[name]}` must be 0 or more.")


def data_sets_of(stage: str) -> tuple[str, ...]:
    """Names of the data sets that a stage of the Trainer takes."""
    return ("train", "val") if stage == "fit" else (stage.replace("validate", "val"),)


def check_data_set(name: str, stage: str) -> None:
    """Refuse a stage without what it runs on; a fit may be without validation.

    Raises:
        MisconfigurationException: names the argument that is lacking.
    """
    if name == "val" and stage == "fit":
        return
    raise MisconfigurationException(
        f"There is nothing to {stage} on. Give `RolloutDataModule({name}_data=...)`."
    )


def check_one_process(world_size: int) -> None:
    """Refuse to train in several processes.

    Raises:
        MisconfigurationException: says what to use instead.
    """
    if world_size > 1:
        raise MisconfigurationException(
            f"`Trainer` runs {world_size} processes, but RolloutDataModule trains in one. Use "
            "`devices=1, num_nodes=1`."
        )


def check_resumed(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of other settings.

    Args:
        saved: The checkpoint's, those that decide what was drawn.
        settings: This run's.

    Raises:
        ValueError: names the setting and both values.
    """
    for name, theirs in saved.items():
        if settings[name] != theirs:
            raise ValueError(
                f"The checkpoint was made with `{name}={theirs}`, this run has "
                f"`{name}={settings[name]}`. Resume with the value of the checkpoint, or "
                "start a new run in another folder."
            )


def check_resumed_groups(
    packed: Iterable[Mapping[str, Any]],
    saved_funcs: Sequence[str] | None,
    reward_funcs: Sequence[str],
    max_completion_length: int,
) -> None:
    """Refuse to go on with completions that this run would score or cut in another way.

    Args:
        packed: The checkpoint's pool and round, as `buffer.pack` wrote them.
        saved_funcs: Names of the reward functions that scored them; None: not known.
        reward_funcs: This run's.
        max_completion_length: This run's.

    Raises:
        ValueError: names the setting, both values and what to use instead.
    """
    packed = list(packed)
    longest = max((group[4] for part in packed for group in part["groups"]), default=0)
    if longest > max_completion_length:
        raise ValueError(
            f"The checkpoint was made with `max_completion_length={longest}` in the middle of a "
            f"pool or a round, this run has `max_completion_length={max_completion_length}`: what "
            f"is drawn already may be longer. Resume with {longest} or more, or start a new run in "
            "another folder."
        )
    scores = [row for part in packed for row in part["scores"] if row is not None]
    same_number = all(len(row) == len(reward_funcs) for row in scores)
    same_names = saved_funcs is None or list(saved_funcs) == list(reward_funcs)
    if scores and not (same_number and same_names):
        theirs = f"{len(scores[0])} of them" if saved_funcs is None else list(saved_funcs)
        raise ValueError(
            f"The checkpoint was made with `reward_funcs={theirs}` in the middle of a pool or a "
            f"round, this run has `reward_funcs={list(reward_funcs)}`: what is scored already has "
            "no score by the others. Resume with the same functions in the same order, or start a "
            "new run in another folder."
        )


def check_resumed_pool(pool: Iterable[Group], num_generations: int) -> None:
    """Refuse a pool that lacks completions where each is needed with all its siblings.

    Raises:
        ValueError: says what to use instead.
    """
    if any(len(group.completions) < num_generations for group in pool):
        raise ValueError(
            "The checkpoint was made in the middle of a pool from which single completions "
            "were trained on, and this run needs a completion with all its siblings. "
            "Resume with `advantage='reinforce++'` and without `DownSampling`, or start a "
            "new run in another folder."
        )


def check_siblings(num_generations: int, needs_group: bool) -> None:
    """Refuse groups of one where a completion is compared with its siblings.

    Raises:
        ValueError: names the argument and what to use instead.
    """
    if needs_group and num_generations < 2:
        raise ValueError(
            f"`num_generations={num_generations}`: use 2 or more (a baseline needs a sibling), or "
            "`GRPOModule(advantage='reinforce++')`, which needs none."
        )


def check_logprobs(
    needed_by: str,
    engine: RolloutEngine,
    sampling: Sampling,
    what: str = "tokens are trained against",
) -> None:
    """Refuse an engine whose log-probs are not those of the policy.

    Args:
        needed_by: Who needs them.
        engine: Of the run.
        sampling: Of the run.
        what: Is done with them.

    Raises:
        ValueError: names who needs them, what takes them away, and what to use instead.
    """
    if not engine.logprobs:
        raise ValueError(
            f"{needed_by} with `{type(engine).__name__}`: {what} the log-probs they were drawn "
            "with, and this engine gives none. Use `VLLMEngine` or `TransformersEngine`, or leave "
            f"{needed_by} out."
        )
    if sampling.truncated:
        raise ValueError(
            f"{needed_by} with `top_p={sampling.top_p}, top_k={sampling.top_k}, "
            f"min_p={sampling.min_p}`: {what} log-probs of the whole distribution, and the "
            "engine's are of a truncated one. Use `top_p=1, top_k=0, min_p=0`, or leave "
            f"{needed_by} out."
        )


def check_val_temperature(val_temperature: float | None) -> None:
    """Refuse to sample greedily.

    Raises:
        ValueError: names the argument and what to use instead.
    """
    if val_temperature is not None and val_temperature <= 0:
        raise ValueError(
            f"`val_temperature={val_temperature}`: use more than 0. `val_greedy` answers greedily."
        )


def check_sampling(sampling: Sampling) -> None:
    """Refuse a distribution that training cannot draw from.

    Raises:
        ValueError: names the argument, its value and what to use instead.
    """
    if sampling.max_completion_length < 1:
        raise ValueError(
            f"`max_completion_length={sampling.max_completion_length}`: use 1 or more."
        )
    if sampling.temperature <= 0:
        raise ValueError(
            f"`temperature={sampling.temperature}`: use more than 0. Greedy completions of a "
            "prompt are all the same, and nothing is learned from them."
        )
    if not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or not 0 <= sampling.min_p <= 1:
        raise ValueError(
            f"`top_p={sampling.top_p}`, `top_k={sampling.top_k}`, `min_p={sampling.min_p}`: use "
            "0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1."
        )


def check_lengths(longest_prompt: int, max_completion_length: int, micro_batch_tokens: int) -> None:
    """Refuse a token budget that one sequence may exceed.

    Raises:
        ValueError: names the argument, its value and the least that works.
    """
    most = longest_prompt + max_completion_length
    if most > micro_batch_tokens:
        raise ValueError(
            f"`micro_batch_tokens={micro_batch_tokens}` cannot hold the longest prompt "
            f"({longest_prompt} tokens) with `max_completion_length={max_completion_length}`. Use "
            f"{most} or more."
        )


def check_gen_batches(prompts: int, prompts_per_round: int, max_num_gen_batches: int) -> None:
    """Refuse rounds that may draw more prompts than there are.

    Args:
        prompts: Of `train_data`, less those that may wait for a later round.
        prompts_per_round: See `RolloutDataModule`.
        max_num_gen_batches: See `DynamicSampling`.

    Raises:
        ValueError: names the argument, its value and the most that works.
    """
    fit = prompts // prompts_per_round
    if max_num_gen_batches > fit:
        fix = f"Use {fit} or less, or a" if fit > 1 else "Leave it out, or use a"
        raise ValueError(
            f"`DynamicSampling(max_num_gen_batches={max_num_gen_batches})` may draw "
            f"{max_num_gen_batches * prompts_per_round} prompts in a round, and `train_data` holds "
            f"{prompts}. {fix} lower `prompts_per_round`."
        )


def check_probe(probe_tokens: int, max_completion_length: int) -> None:
    """Refuse a probe that leaves nothing to predict.

    Raises:
        ValueError: names both arguments and what to use instead.
    """
    if probe_tokens >= max_completion_length:
        raise ValueError(
            f"`LengthPrediction(probe_tokens={probe_tokens})` leaves nothing to predict of "
            f"completions with `max_completion_length={max_completion_length}`. Use less, or 0 to "
            "predict from the prompt alone."
        )


def check_parallelism(engine: str, size: int, most: int, minimum: int, maximum: int) -> None:
    """Refuse sizes that a `ParallelismPlanner` cannot choose from.

    Args:
        engine: Name of its class.
        size: That it came with.
        most: Devices that it can split the model over.
        minimum: See `ParallelismPlanner`.
        maximum: See `ParallelismPlanner`.

    Raises:
        MisconfigurationException: says what to use instead.
    """
    if most == 1:
        raise MisconfigurationException(
            f"`ParallelismPlanner` has nothing to choose: `{engine}` can split this model over "
            "one device of this node at most. Remove the callback, or use `VLLMEngine` on a "
            "node with more GPUs (on CPU: cores)."
        )
    if maximum > most:
        raise MisconfigurationException(
            f"`ParallelismPlanner({maximum=})`: the node's devices and the model's attention "
            f"heads allow {most}. Use {most}, or leave it out."
        )
    if not minimum <= size <= maximum:
        raise MisconfigurationException(
            f"`{engine}(tensor_parallel_size={size})` is where `ParallelismPlanner` begins, and it "
            f"chooses from {minimum} to {maximum}. Change the one or the other."
        )
    try:
        check_sizes(size=size, maximum=maximum)
    except ValueError as error:
        raise MisconfigurationException(f"{error} It is what `{engine}` came with.") from None
