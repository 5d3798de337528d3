"""Which settings go together: one table of what is refused."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule

Found = Mapping[str, Any] | None
"""Values for the words of a row, or `None` if the row does not apply."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Two settings of which one rules out the other.

    In `first`, `second` and `words`, names in braces stand for values that `found` returns, for the
    schedule `s` and for the facts `f`.
    """

    first: str
    second: str
    words: str
    found: Callable[[Schedule, RunFacts], Found]


def both(first: str, second: str, words: str) -> Combination:
    """A pair of callbacks that cannot work together."""
    pair = {first, second}
    return Combination(f"`{first}`", f"`{second}`", words, lambda _, f: when(pair <= f.callbacks))


def when(applies: object, **values: Any) -> Found:
    """Return the values if the row applies."""
    return values if applies else None


def _compares(schedule: Schedule, facts: RunFacts, applies: bool) -> Found:
    """The first setting that compares log-probs, and what for."""
    needs, of = dict(schedule.compares_logprobs), facts.settings.sampling
    if facts.trains and facts.learner.needs_engine_logprobs(off_policy=False):
        needs["`old_logprobs='engine'`"] = "tokens are trained against"
    who = next(iter(needs), "")
    return when(
        who and applies,
        compares=who,
        what=needs.get(who),
        sampling=f"top_p={of.top_p}, top_k={of.top_k}, min_p={of.min_p}",
    )


def _too_few_prompts(schedule: Schedule, facts: RunFacts) -> Found:
    most, size = schedule.max_num_gen_batches, facts.settings.prompts_per_round
    prompts = (facts.prompts or 0) - schedule.rule.most_deferred
    fit = prompts // size
    fix = f"Use {fit} or less, or a" if fit > 1 else "Leave it out, or use a"
    applies = facts.prompts is not None and most > max(1, fit)
    return when(applies, drawn=most * size, prompts=prompts, use=fix)


RULES = ("AsyncRollout", "RolloutWindow", "SortedBatching", "TailBatching")
"""Callbacks that decide when a round ends."""


def _two_rules(_: Schedule, facts: RunFacts) -> Found:
    """Two of them; a user's own callback may be derived from one."""
    found = [f"`{name}`" for name in RULES if name in facts.callbacks]
    return {"one": found[0], "other": found[-1]} if len(found) > 1 else None


def _verifier(schedule: Schedule, facts: RunFacts) -> str:
    """What verifies tokens: a callback, or the rule of a user's own one."""
    found = [name for name in RULES if name in facts.callbacks]
    return f"`{[*found, type(schedule.rule).__name__][0]}`"


def _decided_by_rewards(schedule: Schedule, _: RunFacts) -> Found:
    """What lets rewards decide which prompts are in time, where prompts may overtake others."""
    who = "`DynamicSampling`" if schedule.replacement else ""
    if schedule.stops_early:
        who = "`DownSampling(early_stop=True)`"
    return when(schedule.rule.reorders and who, rewards=who)


def _needs_groups(schedule: Schedule, facts: RunFacts) -> Found:
    """What looks for groups whose rewards are all equal, where such groups teach, too."""
    skips = schedule.chooser is not None and schedule.chooser.rule == "skip_solved"
    found = {
        "`DynamicSampling`": schedule.replacement,
        "`PromptBudget`": schedule.pilot,
        "`PromptChoice(rule='skip_solved')`": skips,
    }
    first = next((name for name, used in found.items() if used), None)
    return when(facts.trains and not facts.learner.needs_group and first, needs=first)


ROUND_ENDS = "Both decide when a round ends. Remove one of them."

COMBINATIONS: Sequence[Combination] = [
    Combination("{one}", "{other}", ROUND_ENDS, _two_rules),
    Combination(
        "{rewards}",
        "a window in which prompts overtake others",
        "what completions say would decide which prompts are in time. Use "
        "`RolloutWindow(overtake=0)`, or leave {rewards} out.",
        _decided_by_rewards,
    ),
    both(
        "AsyncRollout",
        "StreamedTraining",
        "A round is drawn before the update that it would be part of begins. Remove one of them, "
        "or use `RolloutWindow`.",
    ),
    both(
        "DynamicSampling",
        "SortedBatching",
        "`SortedBatching` draws no new prompts until its pool is used up, so a prompt could not be "
        "replaced. Remove one of them; `DownSampling(drop_uninformative=True)` leaves such prompts "
        "out of the update.",
    ),
    both(
        "MicroGroupSampling",
        "ParallelismPlanner",
        "`MicroGroupSampling` decodes no more completions than the key-value cache can hold, so "
        "nothing is preempted and `ParallelismPlanner` would only ever halve. Remove one of them.",
    ),
    Combination(
        "{s.beside_update[0]}",
        "`engine={f.settings.engine.name}`",
        "it needs an engine that decodes while the trainer computes, and this one does so only "
        "when it is called. Use `engine=ProcessEngine({f.settings.engine.name}(...))`.",
        lambda s, f: when(s.beside_update and not f.settings.engine.decodes_by_itself),
    ),
    Combination(
        "{compares}",
        "`engine={f.settings.engine.name}`",
        "{what} the log-probs they were drawn with, and this engine gives none. Use `VLLMEngine` "
        "or `TransformersEngine`, or leave {compares} out.",
        lambda s, f: _compares(s, f, not f.settings.engine.logprobs),
    ),
    Combination(
        "{compares}",
        "`{sampling}`",
        "{what} log-probs of the whole distribution, and the engine's are of a truncated one. Use "
        "`top_p=1, top_k=0, min_p=0`, or leave {compares} out.",
        lambda s, f: _compares(s, f, f.settings.sampling.truncated),
    ),
    Combination(
        "`SortedBatching`",
        "`steps_per_round={f.settings.steps_per_round}`",
        "each of its rounds is one update. Use `steps_per_round=1` and "
        "`SortedBatching(update_prompts={prompts})`.",
        lambda s, f: when(
            isinstance(s.rule, SortedRound) and f.settings.steps_per_round > 1,
            prompts=max(1, s.rule.update_prompts // f.settings.steps_per_round),
        ),
    ),
    Combination(
        "`SortedBatching(max_staleness={s.rule.max_staleness})`",
        "`num_iterations={f.settings.num_iterations}`",
        "a round takes that many optimizer steps, so no completion could be resumed. Use "
        "{f.settings.num_iterations} or more, or `mode='on_policy'`.",
        lambda s, f: when(
            isinstance(s.rule, SortedRound)
            and 0 < (s.rule.max_staleness or 0) < f.settings.num_iterations
        ),
    ),
    Combination(
        "`StreamedTraining`",
        "an update that is not a sum of parts",
        "{why}.",
        lambda s, f: when(
            s.streaming is not None and f.streaming_obstacle(), why=f.streaming_obstacle()
        ),
    ),
    Combination(
        "`DownSampling(keep={s.selection.keep})`",
        "`num_generations={f.settings.num_generations}`",
        "there are fewer. Use {f.settings.num_generations} or less, or more `num_generations`.",
        lambda s, f: when(s.selection and s.selection.keep > f.settings.num_generations),
    ),
    Combination(
        "`DownSampling(early_stop=True, keep={s.selection.keep})`",
        "`num_generations={f.settings.num_generations}`",
        "every completion is needed. Keep fewer, or leave `early_stop` out.",
        lambda s, f: when(
            s.stops_early and s.selection and s.selection.keep == f.settings.num_generations
        ),
    ),
    Combination(
        "{needs}",
        "`advantage='{f.module[advantage]}'`",
        "rewards are compared over the whole update there, so prompts whose rewards are all equal "
        "are useful too. Leave one of the two out, or use `PromptChoice('thompson')` instead.",
        _needs_groups,
    ),
    Combination(
        "`PromptBudget(pilot={s.pilot})`",
        "`num_generations={f.settings.num_generations}`",
        "nothing is left to draw later. Use a smaller `pilot`, or more `num_generations`.",
        lambda s, f: when(s.pilot and s.pilot >= f.settings.num_generations),
    ),
    Combination(
        "`PromptBudget`",
        "{rule}",
        "both would decide which completions are in time. Leave one of the two out.",
        lambda s, f: when(
            s.pilot and (s.rule.ends_early or s.stops_early),
            rule=_verifier(s, f) if s.rule.ends_early else "`DownSampling(early_stop=True)`",
        ),
    ),
    Combination(
        "`DynamicSampling(max_num_gen_batches={s.max_num_gen_batches})`",
        "`train_data` of {prompts} prompts",
        "a round may draw {drawn}. {use} lower `prompts_per_round`.",
        _too_few_prompts,
    ),
    Combination(
        "`num_generations={f.settings.num_generations}`",
        "advantages that compare completions of a prompt",
        "use 2 or more (a baseline needs a second completion), or "
        "`GRPOModule(advantage='tracker')` or `'reinforce++'`, which need none.",
        lambda _, f: when(f.trains and f.learner.needs_group and f.settings.num_generations < 2),
    ),
    Combination(
        "`LengthPrediction(probe_tokens={s.probe_tokens})`",
        "`max_completion_length={f.settings.sampling.max_completion_length}`",
        "that leaves nothing to predict. Use less, or 0 to predict from the prompt alone.",
        lambda s, f: when((s.probe_tokens or 0) >= f.settings.sampling.max_completion_length),
    ),
    Combination(
        "`ParallelismPlanner`",
        "`devices={f.ranks}`",
        "it splits the engine over the node's devices, and the Trainer trains on {f.ranks} of "
        "them. Remove the callback, or use `devices=1`.",
        lambda _, f: when("ParallelismPlanner" in f.callbacks and f.ranks > 1),
    ),
    Combination(
        "{who}",
        "`{f.sharded}`",
        "tokens are verified with weights of earlier policy versions, which this strategy has only "
        "in parts. Use `strategy='ddp'`, `AsyncRollout(too_old='wait')`, or leave {who} out.",
        lambda s, f: when(f.sharded and s.rule.verifies_from is not None, who=_verifier(s, f)),
    ),
]
"""All combinations that are refused."""


def check(schedule: Schedule, facts: RunFacts) -> None:
    """Refuse settings that do not go together, and a rule that needs more prompts."""
    if facts.prompts is not None:
        schedule.rule.check_enough(facts.prompts)
    for row in COMBINATIONS:
        if (values := row.found(schedule, facts)) is not None:
            words = f"{row.first} with {row.second}: {row.words}"
            raise UsageError(words.format(s=schedule, f=facts, **values))


def warn(schedule: Schedule, facts: RunFacts) -> None:
    """Warn of tokens of earlier policies that nothing corrects."""
    stale, old = schedule.trains_on_stale, facts.module.get("old_logprobs")
    by_ratio = old == "engine" or (old is None and facts.module.get("loss_type") != "rloo")
    mode = facts.module.get("importance_sampling_mode")
    if stale and mode is None and not schedule.mask_stale_tokens and not by_ratio:
        told = "old_logprobs='trainer', " if old else ""
        fix = ", or leave `old_logprobs` out" if old else ""
        rank_zero_warn(
            f"{stale} with `{told}importance_sampling_mode=None`: tokens of earlier policies are "
            "trained on as if the newest had drawn them. Set `importance_sampling_mode`"
            f"{fix}."
        )


def combinations_as_markdown() -> str:
    """The table in `docs/reference/combinations.md`."""
    lines = ["| setting | with | is refused |", "|---|---|---|"]
    for row in COMBINATIONS:
        cells = [
            re.sub(r"\{([^}]+)\}", lambda name: _SHOWN.get(name[1], "N"), text)
            for text in (row.first, row.second, row.words)
        ]
        lines.append("".join(f"| {cell[:1].upper()}{cell[1:]} " for cell in cells) + "|")
    return "\n".join(lines)


_SHOWN = {
    "s.beside_update[0]": "`AsyncRollout` or `StreamedTraining`",
    "compares": "verified or stale tokens",
    "what": "they are compared with",
    "why": "the message says why",
    "f.settings.engine.name": "NAME",
    "f.sharded": "FSDP2Strategy",
    "sampling": "top_p, top_k or min_p",
    "who": "a rule that verifies tokens",
    "rewards": "`DynamicSampling` or `DownSampling(early_stop=True)`",
    "needs": "`DynamicSampling`, `PromptBudget` or `PromptChoice(rule='skip_solved')`",
    "rule": "A rule that ends rounds early, or `DownSampling(early_stop=True)`",
    "f.module[advantage]": "reinforce++' or 'tracker",
    "one": "`AsyncRollout`, `RolloutWindow`, `SortedBatching`",
    "other": "`TailBatching` or another of these",
    "use": "Use less, or a",
}
"""What the documentation shows in place of values; `N` for all others."""
