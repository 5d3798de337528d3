"""What a run is told once, with what to do about it: it goes on, and learns little or nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlsched.precision import trains_in_half
from lit_rlsched.training.round import Round, reward_matrix

EQUAL_ROUNDS = 5
"""Rounds in a row without a reward that differs from its siblings', before that is said."""
RESTORED = {
    "learning_rate": ("initial_lr", "lr"),
    "betas": ("betas",),
    "weight_decay": ("weight_decay",),
}
"""Setting -> what AdamW calls it in the state that a checkpoint brings back."""


class Advice:
    """Keeps what was said, so that each is said once in a run, also where it is resumed."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._equal_rounds = 0

    def at_start(
        self,
        eos_token_ids: Sequence[int],
        slots: int | None,
        most: int,
        trained: nn.Module | None = None,
    ) -> list[str]:
        """Before the engine is started.

        Args:
            eos_token_ids: What ends a completion.
            slots: Completions that may decode at once, as it was set.
            most: Completions that a round launches at most.
            trained: The policy, if it is to be trained.
        """
        return self._once(
            no_eos=no_eos(eos_token_ids),
            idle_slots=idle_slots(slots, most),
            trains_in_half=None if trained is None else trains_in_half(trained),
        )

    def of_evaluation(self, never_correct: str | None) -> list[str]:
        """After held-out prompts were answered; `never_correct` says that nothing can count."""
        return self._once(never_correct=never_correct)

    def of_round(
        self, round: Round, weights: Sequence[float], limit: int, in_groups: bool
    ) -> list[str]:
        """After a round was drawn and scored.

        Args:
            round: The round.
            weights: Of the reward functions.
            limit: `max_completion_length`.
            in_groups: Whether a completion is compared with its siblings, or with all others.
        """
        rewards = reward_matrix(round.groups, weights)
        rewards = rewards if in_groups else rewards.view(1, -1)
        self._equal_rounds = self._equal_rounds + 1 if all_equal(rewards) else 0
        reasons = [c.finish_reason for c in round.completions]
        return self._once(
            all_cut=all_cut(reasons, limit),
            equal_rewards=equal_rewards(rewards, self._equal_rounds),
        )

    def _once(self, **found: str | None) -> list[str]:
        new = {name: text for name, text in found.items() if text and name not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def state_dict(self) -> dict[str, Any]:
        """What was said, and how long rewards have been equal."""
        return {"said": sorted(self._said), "equal_rounds": self._equal_rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what this start has said stays said."""
        self._said |= set(state.get("said", ()))
        self._equal_rounds = state.get("equal_rounds", 0)


def no_eos(eos_token_ids: Sequence[int]) -> str | None:
    """Nothing ends a completion but its length."""
    if eos_token_ids:
        return None
    return (
        "Neither the tokenizer nor the model's generation config names an EOS token: every "
        "completion will be cut at `max_completion_length`. Set `eos_token` of the tokenizer, or "
        "`eos_token_id` in generation_config.json."
    )


def idle_slots(slots: int | None, most: int) -> str | None:
    """Some slots never get a completion."""
    if slots is None or slots <= most:
        return None
    return (
        f"`MicroGroupSampling(slots={slots})`: a round draws {most} completions, so that "
        f"{slots - most} slots never get one. Use `slots={most}` or fewer, or a larger "
        "`prompts_per_round` or `num_generations`."
    )


def all_cut(finish_reasons: Sequence[str | None], limit: int) -> str | None:
    """No completion of a round came to its end by itself."""
    if not finish_reasons or set(finish_reasons) != {"length"}:
        return None
    return (
        f"All {len(finish_reasons)} completions of a round were cut at `max_completion_length="
        f"{limit}`, none ended with EOS: most rewards see no answer. Raise it; or, if completions "
        "run on behind their answer, check that prompts go through the chat template the model "
        "was trained with, and that its EOS token is the tokenizer's."
    )


def all_equal(rewards: Tensor) -> bool:
    """Whether no reward differs in any row of `[P, G]`; NaN: no reward."""
    low = torch.where(rewards.isnan(), torch.inf, rewards).amin(1)
    high = torch.where(rewards.isnan(), -torch.inf, rewards).amax(1)
    return bool(((high - low).nan_to_num(0.0) <= 1e-8).all())


def equal_rewards(rewards: Tensor, rounds: int) -> str | None:
    """No reward has differed from its siblings' for so many rounds."""
    if rounds < EQUAL_ROUNDS:
        return None
    seen = rewards[~rewards.isnan()].tolist()
    return (
        f"In {rounds} rounds in a row completions that are compared had the same reward (now from "
        f"{min(seen, default=0):g} to {max(seen, default=0):g}): their advantages are zero, and "
        "nothing is learned from them. Look at the completions table: does the reward function "
        "find the answers? Otherwise use easier or harder prompts, more `num_generations`, a "
        "higher `temperature`, or `DynamicSampling`."
    )


def restored_settings(settings: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> str | None:
    """The optimizer's settings come back with its state, and win over other ones.

    Args:
        settings: Of the module.
        checkpoint: With `optimizer_states`, as Lightning writes them.
    """
    changed = []
    for name, keys in RESTORED.items():
        theirs = {_plain(value) for group in _groups(checkpoint) for value in _first(group, keys)}
        if theirs and theirs != {_plain(settings[name])}:
            shown = ", ".join(map(str, sorted(theirs)))
            changed.append(f"`{name}={settings[name]}` (the checkpoint's: {shown})")
    if not changed:
        return None
    return (
        f"{' and '.join(changed)} will have no effect: the optimizer goes on with the state of the "
        "checkpoint. Resume with the checkpoint's values; to train on with others, start a new run "
        "from its weights, or set them on the optimizer in a callback's `on_train_start`."
    )


def _groups(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [g for state in checkpoint.get("optimizer_states", ()) for g in state["param_groups"]]


def _first(group: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    return [group[key] for key in keys if key in group][:1]


def _plain(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)
