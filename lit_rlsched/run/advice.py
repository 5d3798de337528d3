"""Warnings about runs that will learn little or nothing, with what to change."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import nn

from lit_rlsched.run.record import RunRecord
from lit_rlsched.text import percent
from lit_rlsched.training.precision import trains_in_half
from lit_rlsched.training.round import NONFINITE, Round

EQUAL_ROUNDS = 5
"""Number of rounds in a row in which all compared rewards are equal before a warning."""
MOSTLY_EQUAL_ROUNDS = 20
"""Number of rounds over which the share of prompts with equal rewards is averaged."""
MOSTLY_EQUAL = 0.8
"""Average share of prompts with equal rewards from which a run is warned."""
_WHAT_TO_DO = (
    "Use easier or harder prompts, more `num_generations`, a higher `temperature`, or "
    "`DynamicSampling`; docs/howto/reward_stays_zero.md goes through the causes."
)
_OPTIMIZER_KEYS = {
    "learning_rate": ("initial_lr", "lr"),  # a scheduler changes `lr` and keeps `initial_lr`
    "betas": ("betas",),
    "weight_decay": ("weight_decay",),
}
"""Settings of the module and their keys in AdamW's parameter groups, the preferred one first."""


class Advice:
    """Warnings of a run, each given once even if the run is resumed."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def at_start(
        self,
        eos_token_ids: Sequence[int],
        slots: int | None,
        most: int,
        trained: nn.Module | None = None,
    ) -> list[str]:
        """Return warnings before the engine starts."""
        found: dict[str, str | None] = {}
        if not eos_token_ids:
            found["no_eos"] = (
                "Neither the tokenizer nor the model's generation config names an EOS token: every "
                "completion will be cut at `max_completion_length`. Set `eos_token` of the "
                "tokenizer, or `eos_token_id` in generation_config.json."
            )
        if slots is not None and slots > most:
            found["idle_slots"] = (
                f"`MicroGroupSampling(slots={slots})`: a round draws {most} completions, so "
                f"{slots - most} slots stay empty. Use `slots={most}` or fewer, or raise "
                "`prompts_per_round` or `num_generations`."
            )
        if trained is not None:
            found["trains_in_half"] = trains_in_half(trained)
        return self.once(**found)

    def of_round(self, round: Round, record: RunRecord, limit: int, in_groups: bool) -> list[str]:
        """Return warnings after a round was drawn and scored."""
        found: dict[str, str | None] = {}
        reasons = [c.finish_reason for c in round.completions]
        if {*reasons} == {"length"}:
            found["all_cut"] = (
                f"All {len(reasons)} completions of a round were cut at `max_completion_length="
                f"{limit}`, and none ended with EOS: most reward functions find no answer in them. "
                "Raise the limit. If the completions continue after their answer, check that "
                "prompts use the chat template that the model was trained with, and that the "
                "tokenizer has the model's EOS token."
            )
        shares = [row["frac_reward_zero_std"] for row in record.rounds[-MOSTLY_EQUAL_ROUNDS:]]
        newest = shares[-EQUAL_ROUNDS:]
        if len(newest) == EQUAL_ROUNDS and min(newest) >= 1:
            found["equal_rewards"] = (
                f"In {EQUAL_ROUNDS} rounds in a row, completions that are compared had the same "
                f"reward (in the last one {record.rounds[-1]['reward']:g} on average): their "
                "advantages are zero, so nothing is learned from them. Look at the completions "
                f"table: does the reward function find the answers? {_WHAT_TO_DO}"
            )
        full = in_groups and len(shares) == MOSTLY_EQUAL_ROUNDS
        if full and (mean := fmean(shares)) >= MOSTLY_EQUAL:
            found["mostly_equal"] = (
                f"In the last {len(shares)} rounds, all completions of {percent(mean)} of the "
                "prompts had the same reward, so the update learned nothing from them "
                f"(`frac_reward_zero_std`). {_WHAT_TO_DO}"
            )
        return self.once(**found)

    def of_rewards(self, huge: Mapping[str, float]) -> list[str]:
        """Return warnings about rewards that are too large, one of each reward function."""
        return self.once(
            **{
                f"huge {name}": f"Reward function `{name}` gave {reward:.3g}, from which no finite "
                f"advantage can be computed. This completion and others like it are left out of "
                f"the update and counted in `dropped/{NONFINITE}`. Bound what the function returns."
                for name, reward in huge.items()
            }
        )

    def once(self, **found: str | None) -> list[str]:
        """Return the warnings that were not given so far."""
        new = {name: text for name, text in found.items() if text and name not in self._given}
        self._given |= new.keys()
        return list(new.values())

    def state_dict(self) -> dict[str, Any]:
        """Return which warnings were given."""
        return {"said": sorted(self._given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the state of the resumed run to the warnings that were given since this start."""
        self._given |= set(state.get("said", ()))


def restored_settings(
    settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> str | None:
    """Warn if settings of the optimizer differ from those that a checkpoint restores."""
    changed = []
    for name, keys in _OPTIMIZER_KEYS.items():
        saved = [next((group[key] for key in keys if key in group), None) for group in groups]
        theirs = {_comparable(value) for value in saved if value is not None}
        if name == "weight_decay":
            theirs = {*sorted(theirs)[-1:]}  # biases and norms do not decay
        if theirs and _comparable(settings[name]) not in theirs:
            shown = ", ".join(map(str, sorted(theirs)))
            changed.append(f"`{name}={settings[name]}` (the checkpoint has {shown})")
    if not changed:
        return None
    return (
        f"{' and '.join(changed)} will have no effect: the optimizer resumes with the settings of "
        "the checkpoint. To use other values, start a new run from its weights, or set them on the "
        "optimizer in a callback's `on_train_start`."
    )


def _comparable(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)
