"""Schedules by name, for recordings and for runs that are stopped, and the rewards they need."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from lightning import LightningModule
from transformers import AutoModelForCausalLM

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched import callbacks as c

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else reward workers import torch
SETTINGS = {
    "prompts_per_round": 4,
    "num_generations": 4,
    "max_completion_length": 24,
    "micro_batch_tokens": 256,
}
"""Of a data module; a schedule may have others."""


@dataclass(frozen=True)
class Schedule:
    """How one run differs from the plain one."""

    callbacks: Callable[[], list] = list
    data: dict[str, Any] = field(default_factory=dict)
    module: Callable[[str], LightningModule] = lambda model: GRPOModule(model, learning_rate=1e-3)
    trainer: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ("completion 1 2", "epoch_end 2", "round_end 3")
    """Where the second run is stopped: an event, the number of the round, how often."""
    own_process: bool = False
    held_out: bool = False
    """Validate, and call `test` and `predict` afterwards."""
    rounds: int = 5


class Plain(LightningModule):
    """REINFORCE by automatic optimization, by a user who knows nothing of rollouts."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logp = self.lm(batch.input_ids).logits[:, :-1].log_softmax(-1)
        logp = logp.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        columns = torch.arange(batch.completion_mask.shape[1])
        at = batch.prompt_lengths[:, None] - 1 + columns
        logp = logp.gather(1, at.clamp(max=logp.shape[1] - 1)) * batch.completion_mask
        return -(logp * batch.advantages[:, None]).sum() / batch.step_tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


FEW = {"prompts_per_round": 2, "num_generations": 3}
"""For pools of several rounds."""
SELECTING = {"reward_funcs": "coin", "num_generations": 6}
"""Rewards of 0 and 1, so that groups stop early and prompts are replaced."""
TAILS: dict[str, Any] = {"data": FEW | {"max_completion_length": 100}, "rounds": 8}
"""Few completions are cut, so few end in the same step."""
BESIDE: dict[str, Any] = TAILS | {"own_process": True}
STREAMED: dict[str, Any] = BESIDE | {"stops": ("completion 2 3",)}

SCHEDULES: dict[str, Schedule] = {
    "plain": Schedule(),
    "micro_groups": Schedule(lambda: [c.MicroGroupSampling(slots=5)]),
    "micro_groups_in_rounds": Schedule(lambda: [c.MicroGroupSampling(slots=5, refill="rounds")]),
    "micro_groups_longest_first": Schedule(
        lambda: [c.MicroGroupSampling(slots=5), c.LengthPrediction(probe_tokens=4)]
    ),
    "micro_groups_planned": Schedule(
        lambda: [c.MicroGroupSampling(slots=5, order="planned"), c.LengthPrediction(probe_tokens=0)]
    ),
    "sorted_on_policy": Schedule(lambda: [c.SortedBatching(3), c.MicroGroupSampling(slots=7)], FEW),
    "sorted_partial": Schedule(
        lambda: [c.SortedBatching(3, mode="partial"), c.MicroGroupSampling(slots=7)], FEW
    ),
    "tail": Schedule(lambda: [c.TailBatching()], FEW),
    "tail_completions": Schedule(
        lambda: [c.TailBatching(completion_ratio=1.25), c.MicroGroupSampling(slots=7)], FEW
    ),
    "tail_domains": Schedule(
        lambda: [c.TailBatching(1.5, per_domain={"even": 0.5, "odd": 0.5})], FEW
    ),
    "down_sampling": Schedule(
        lambda: [c.DownSampling(2, early_stop=True), c.MicroGroupSampling(slots=7)], SELECTING
    ),
    "dynamic_sampling": Schedule(lambda: [c.DynamicSampling()], SELECTING),
    "prompt_choice": Schedule(lambda: [c.PromptChoice("thompson", explore=0.3)], SELECTING),
    "prompt_budget": Schedule(
        lambda: [c.PromptBudget(2), c.MicroGroupSampling(slots=7), c.StreamedTraining(start=0)],
        SELECTING,
    ),
    "prompt_budget_window": Schedule(
        lambda: [c.RolloutWindow(8), c.PromptBudget(3), c.PromptChoice()], SELECTING
    ),
    "streamed": Schedule(
        lambda: [c.StreamedTraining(start=0)], own_process=True, stops=("completion 2 5",)
    ),
    "window": Schedule(
        lambda: [c.RolloutWindow(prompts_in_flight=4), c.MicroGroupSampling(slots=6)], **TAILS
    ),
    "window_streamed": Schedule(
        lambda: [c.RolloutWindow(prompts_in_flight=4), c.StreamedTraining(start=0)], **STREAMED
    ),
    "window_unbounded": Schedule(
        lambda: [
            c.RolloutWindow(prompts_in_flight=4, overtake=1000),
            c.MicroGroupSampling(slots=12),
        ],
        **TAILS,
    ),
    "async_one_off": Schedule(lambda: [c.AsyncRollout(1, 2, "wait")], **BESIDE),
    "async_waiting": Schedule(
        lambda: [c.AsyncRollout(2, too_old="wait"), c.MicroGroupSampling(slots=9)], **BESIDE
    ),
    "window_default": Schedule(
        lambda: [c.RolloutWindow(), c.StreamedTraining(start=0)], **STREAMED
    ),
    "window_overtaking": Schedule(
        lambda: [c.RolloutWindow(8, overtake=2), c.MicroGroupSampling(slots=7)], **TAILS
    ),
    "async": Schedule(lambda: [c.AsyncRollout()], **BESIDE),
    # Compositions.
    "tail_down_sampling_micro_groups_predicted": Schedule(
        lambda: [
            c.TailBatching(1.5),
            c.DownSampling(2, early_stop=True),
            c.MicroGroupSampling(slots=7),
            c.LengthPrediction(probe_tokens=4),
        ],
        SELECTING | {"prompts_per_round": 2},
    ),
    "sorted_partial_memory_predicted": Schedule(
        lambda: [
            c.SortedBatching(3, mode="partial", max_staleness=1),
            c.MicroGroupSampling(memory_budget=160 * 512),
            c.LengthPrediction(probe_tokens=4),
        ],
        FEW,
    ),
    "tail_completions_dynamic": Schedule(
        lambda: [c.TailBatching(completion_ratio=1.25), c.DynamicSampling()],
        SELECTING | {"prompts_per_round": 2},
    ),
    "tail_streamed": Schedule(
        lambda: [c.TailBatching(1.5), c.StreamedTraining(start=0)], **STREAMED
    ),
    # Modules and settings.
    "several_steps": Schedule(
        lambda: [c.MicroGroupSampling(slots=5)],
        {"steps_per_round": 2, "num_iterations": 2},
        stops=("completion 1 2", "step 2 3", "epoch_end 2", "round_end 3", "step 4 1"),
    ),
    "limited_steps": Schedule(
        data={"steps_per_round": 2, "mask_truncated_completions": True},
        trainer={"limit_train_batches": 1},
    ),
    "reference": Schedule(
        lambda: [c.SortedBatching(3), c.MicroGroupSampling(slots=7)],
        FEW,
        lambda model: GRPOModule(model, learning_rate=1e-3, beta=0.1),
    ),
    "rloo": Schedule(module=lambda model: RLOOModule(model, learning_rate=1e-3)),
    "reinforce++": Schedule(
        lambda: [c.SortedBatching(3, mode="partial"), c.MicroGroupSampling(slots=5)],
        {"prompts_per_round": 4, "num_generations": 1, "temperature": 0.9},
        lambda model: GRPOModule(model, learning_rate=1e-3, advantage="reinforce++"),
    ),
    "tracker": Schedule(
        lambda: [c.AsyncRollout(2, too_old="wait"), c.PromptChoice("thompson")],
        {"prompts_per_round": 4, "num_generations": 1},
        lambda model: GRPOModule(model, learning_rate=1e-3, advantage="tracker"),
        own_process=True,
    ),
    "lora": Schedule(
        lambda: [c.TailBatching(1.5)],
        FEW,
        lambda model: GRPOModule(model, learning_rate=1e-2, lora_rank=4, beta=0.1),
    ),
    "automatic_optimization": Schedule(
        data={"steps_per_round": 2},
        module=Plain,
        stops=("completion 1 2", "step 2 2", "epoch_end 2", "round_end 3"),
    ),
    "validation": Schedule(
        lambda: [c.SortedBatching(3, mode="partial"), c.MicroGroupSampling(slots=7)],
        FEW | {"val_num_generations": 2, "val_greedy": True, "val_accuracy_threshold": 0.3},
        trainer={"num_sanity_val_steps": -1, "check_val_every_n_epoch": 2},
        stops=("completion 1 2", "validation 3 2", "epoch_end 3"),
        held_out=True,
    ),
}

LONG = FEW | {"max_completion_length": 40}
TWO_STEPS = {"steps_per_round": 2}
RESUMED: dict[str, Schedule] = {
    **{
        name: Schedule(
            lambda: [c.MicroGroupSampling(slots=6)],
            TWO_STEPS | {"val_greedy": name == "full"},  # greedily, few completions end early
            trainer={"max_steps": 10},
        )
        for name in ("full", "automatic optimization")
    },
    "on_policy": Schedule(SCHEDULES["sorted_on_policy"].callbacks, LONG),
    "partial": Schedule(SCHEDULES["sorted_partial"].callbacks, LONG),
    "tail": Schedule(SCHEDULES["tail_completions"].callbacks, LONG),
    "window": Schedule(lambda: [c.RolloutWindow(), c.MicroGroupSampling(slots=7)], LONG),
    "window overtaking": Schedule(
        lambda: [c.RolloutWindow(4, overtake=1), c.MicroGroupSampling(slots=7)], LONG | TWO_STEPS
    ),
    "selected": Schedule(
        lambda: [
            c.DownSampling(2, early_stop=True),
            c.DynamicSampling(),
            c.MicroGroupSampling(slots=7),
        ],
        SELECTING | TWO_STEPS | {"max_completion_length": 40},
    ),
    "prompt_choice": SCHEDULES["prompt_choice"],
    "prompt_budget": SCHEDULES["prompt_budget"],
    "prompt_budget_window": SCHEDULES["prompt_budget_window"],
    "tracker": SCHEDULES["tracker"],
    "streamed": Schedule(
        lambda: [c.TailBatching(), c.StreamedTraining(start=0)], LONG, own_process=True
    ),
    "window streamed": Schedule(
        lambda: [c.RolloutWindow(), c.StreamedTraining(start=0)],
        LONG | {"num_iterations": 2, "micro_batch_tokens": 64},
        own_process=True,
    ),
    "async": Schedule(lambda: [c.AsyncRollout()], LONG | TWO_STEPS, own_process=True),
    "async waiting": Schedule(
        lambda: [c.AsyncRollout(2, too_old="wait")], LONG | TWO_STEPS, own_process=True
    ),
}
"""Of eight optimizer steps, where the Trainer is not given another number."""


def digits(prompts, completions, completion_ids, log_extra, log_metric, **kwargs):
    """The share of digits."""
    shares = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
    log_extra("vowels", [sum(c in "aeiou" for c in text) for text in completions])
    log_metric("share", sum(shares) / len(shares))
    return shares


def coin(prompts, completions, **kwargs):
    """0 or 1, and never a 1 for every other prompt."""
    shares = digits(prompts, completions, **kwargs)
    return [float(s > 0.12 and p[0] in "024") for s, p in zip(shares, prompts, strict=True)]


ROWS = [
    {"prompt": f"{a}+{b}={'?' * (b % 3)}", "domain": "odd" if b % 2 else "even"}
    for a in range(6)
    for b in range(8)
]
