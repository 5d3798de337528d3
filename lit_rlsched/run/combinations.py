"""Which settings go together: one table of what is refused, warned of or changed."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule

Found = Mapping[str, Any] | None
"""Values for the words of a row, or `None` if the row does not apply."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Two settings of which one rules out or changes the other.

    Names in braces in `first`, `second` and `words` stand for values that `found` returns.
    """

    first: str
    second: str
    words: str
    found: Callable[[Schedule, RunFacts], Found]
    does: Literal["refused", "warned", "changed"] = "refused"

    def said(self, values: Mapping[str, Any]) -> str:
        """The message."""
        return f"{self.first} with {self.second}: {self.words}".format_map(values)


def both(first: str, second: str, words: str) -> Combination:
    """A pair of callbacks that cannot work together."""

    def found(_: Schedule, facts: RunFacts) -> Found:
        return {} if {first, second} <= facts.callbacks else None

    return Combination(f"`{first}`", f"`{second}`", words, found)


def changed(first: str, second: str, words: str) -> Combination:
    """A pair of callbacks that work together, where one changes what the other does."""
    return replace(both(first, second, words), does="changed")


def when(applies: object, **values: Any) -> Found:
    """Return the values if the row applies."""
    return values if applies else None


def _compares(schedule: Schedule, facts: RunFacts, applies: bool, **values: Any) -> Found:
    """The first setting that compares log-probs, and what for."""
    needs = dict(schedule.compares_logprobs)
    if facts.trains and facts.learner.needs_engine_logprobs(off_policy=False):
        needs["`old_logprobs='engine'`"] = "tokens are trained against"
    who = next(iter(needs), None)
    return when(who and applies, compares=who, what=who and needs[who], **values)


def _truncated(schedule: Schedule, facts: RunFacts) -> Found:
    of = facts.settings.sampling
    named = f"top_p={of.top_p}, top_k={of.top_k}, min_p={of.min_p}"
    return _compares(schedule, facts, of.truncated, sampling=named)


def _corrects(facts: RunFacts) -> bool:
    """Whether `importance_sampling_mode` is what corrects stale tokens; else the ratio does."""
    old, rloo = facts.module.get("old_logprobs"), facts.module.get("loss_type") == "rloo"
    return old == "trainer" or (rloo and old is None)


def _uncorrected(schedule: Schedule, facts: RunFacts) -> Found:
    stale, mode = schedule.trains_on_stale, facts.module.get("importance_sampling_mode")
    applies = stale and mode is None and not schedule.mask_stale_tokens and _corrects(facts)
    told = bool(facts.module.get("old_logprobs"))
    setting, fix = "old_logprobs='trainer', " * told, ", or leave `old_logprobs` out" * told
    return when(applies, stale=stale, old=setting, fix=fix)


def _corrected_already(schedule: Schedule, facts: RunFacts) -> Found:
    stale, mode = schedule.trains_on_stale, facts.module.get("importance_sampling_mode")
    known = mode in (None, "sequence_mask") or facts.module.get("loss_type") == "rloo"
    return when(stale and not known and not _corrects(facts), stale=stale, mode=mode)


def _too_few_prompts(schedule: Schedule, facts: RunFacts) -> Found:
    most, size = schedule.max_num_gen_batches, facts.settings.prompts_per_round
    prompts = (facts.prompts or 0) - schedule.rule.most_deferred
    fit = prompts // size
    fix = f"Use {fit} or less, or a" if fit > 1 else "Leave it out, or use a"
    applies = facts.prompts is not None and most > max(1, fit)
    return when(applies, n=most, drawn=most * size, prompts=prompts, use=fix)


def _mixed_drafts(schedule: Schedule, _: RunFacts) -> Found:
    rule, mixed = schedule.rule, schedule.rule.max_staleness != 0
    other = f"max_staleness={rule.max_staleness}" if mixed else "InFlightUpdates"
    applies = rule.keeps_drafts and (mixed or schedule.in_flight is not None)
    return when(applies, rule=type(rule).__name__, other=other)


def _with_tools(schedule: Schedule, facts: RunFacts) -> Found:
    """The first setting that makes or keeps drafts, or changes weights within a turn."""
    names = ("DrainFilling", "AheadRollout", "InFlightUpdates")
    given = [f"`{name}`" for name in names if name in facts.callbacks]
    if schedule.rule.keeps_drafts or schedule.rule.verifies_from is not None:
        given.append("a rule that verifies drafts")
    return when(facts.settings.tools and given, who=given[0] if given else "")


ROUND_ENDS = "Both decide when a round ends. Remove one of them."
_NOT_YET = "They do not work together yet. Remove one of them."
_STEPS_DECIDE = (
    "How much is drawn before the weights change would depend on the number of decode steps, so "
    "other tokens would be drawn. Remove one of them."
)
_IN_TIME = (
    "Completions are the same, but not always those that are in time: text that repeats needs "
    "fewer steps. `speculation/trained_over_drawn_speed` shows it."
)
_BETWEEN_STEPS = "the engine waits for the trainer between two decode steps, so little overlaps."

COMBINATIONS: Sequence[Combination] = [
    Combination(
        "Tools",
        "{who}",
        "not yet: drafts have no turns, and weights do not change within one. Leave {who} out.",
        _with_tools,
    ),
    both("InFlightUpdates", "SortedBatching", ROUND_ENDS),
    both("InFlightUpdates", "TailBatching", ROUND_ENDS),
    both("SortedBatching", "TailBatching", ROUND_ENDS),
    both("AheadRollout", "SortedBatching", _NOT_YET),
    both("AheadRollout", "TailBatching", _NOT_YET),
    both("InFlightUpdates", "Speculation", _STEPS_DECIDE),
    both("AheadRollout", "Speculation", _STEPS_DECIDE),
    both("DrainFilling", "Speculation", _STEPS_DECIDE),
    both(
        "InFlightUpdates",
        "StreamedTraining",
        "A round is drawn before the update that it would be part of begins. Remove one of them.",
    ),
    both(
        "AheadRollout",
        "DrainFilling",
        "With `AheadRollout` free slots begin the next round already, or the round after it is "
        "drawn as a whole. Remove one of them.",
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
        "`AheadRollout(correction='importance')`",
        "`StreamedTraining`",
        "A round is drawn before the update that it would be part of begins. Use "
        "`correction='verify'`, or remove one of them.",
        lambda s, f: when(s.ahead == "importance" and "StreamedTraining" in f.callbacks),
    ),
    Combination(
        "{beside}",
        "`engine={engine}`",
        "it needs an engine that decodes while the trainer computes, and this one does so only "
        "when it is called. Use `engine=ProcessEngine({engine}(...))`.",
        lambda s, f: when(
            s.beside_update and not f.settings.engine.decodes_by_itself,
            beside=s.beside_update and s.beside_update[0],
            engine=f.settings.engine.name,
        ),
    ),
    Combination(
        "{compares}",
        "`engine={engine}`",
        "{what} the log-probs they were drawn with, and this engine gives none. Use `VLLMEngine` "
        "or `TransformersEngine`, or leave {compares} out.",
        lambda s, f: _compares(s, f, not f.settings.engine.logprobs, engine=f.settings.engine.name),
    ),
    Combination(
        "{compares}",
        "`{sampling}`",
        "{what} log-probs of the whole distribution, and the engine's are of a truncated one. Use "
        "`top_p=1, top_k=0, min_p=0`, or leave {compares} out.",
        _truncated,
    ),
    Combination(
        "`SortedBatching`",
        "`steps_per_round={n}`",
        "each of its rounds is one update. Use `steps_per_round=1` and "
        "`SortedBatching(update_prompts={prompts})`.",
        lambda s, f: when(
            isinstance(s.rule, SortedRound) and f.settings.steps_per_round > 1,
            n=f.settings.steps_per_round,
            prompts=max(1, s.rule.update_prompts // f.settings.steps_per_round),
        ),
    ),
    Combination(
        "`SortedBatching(max_staleness={most})`",
        "`num_iterations={n}`",
        "a round takes that many optimizer steps, so no completion could be resumed. Use {n} or "
        "more, or `mode='on_policy'`.",
        lambda s, f: when(
            isinstance(s.rule, SortedRound)
            and 0 < (s.rule.max_staleness or 0) < f.settings.num_iterations,
            most=s.rule.max_staleness,
            n=f.settings.num_iterations,
        ),
    ),
    Combination(
        "`StreamedTraining`",
        "an update that is not a sum of parts",
        "{why}.",
        lambda s, f: when(s.streaming and f.streaming_obstacle(), why=f.streaming_obstacle()),
    ),
    Combination(
        "`DownSampling(keep={keep})`",
        "`num_generations={n}`",
        "there are fewer. Use {n} or less, or more `num_generations`.",
        lambda s, f: when(
            s.selection and s.selection.keep > f.settings.num_generations,
            keep=s.selection and s.selection.keep,
            n=f.settings.num_generations,
        ),
    ),
    Combination(
        "`DownSampling(early_stop=True, keep={n})`",
        "`num_generations={n}`",
        "every completion is needed. Keep fewer, or leave `early_stop` out.",
        lambda s, f: when(
            s.selection
            and s.selection.reward_range
            and s.selection.keep == f.settings.num_generations,
            n=f.settings.num_generations,
        ),
    ),
    Combination(
        "`DynamicSampling`",
        "`advantage='reinforce++'`",
        "rewards are compared over the whole update there, so prompts whose rewards are all equal "
        "are useful too. Leave one of the two out.",
        lambda s, f: when(s.max_num_gen_batches > 1 and f.trains and not f.learner.needs_group),
    ),
    Combination(
        "`DynamicSampling(max_num_gen_batches={n})`",
        "`train_data` of {prompts} prompts",
        "a round may draw {drawn}. {use} lower `prompts_per_round`.",
        _too_few_prompts,
    ),
    Combination(
        "`num_generations={n}`",
        "advantages that compare completions of a prompt",
        "use 2 or more (a baseline needs a second completion), or "
        "`GRPOModule(advantage='reinforce++')`, which needs none.",
        lambda _, f: when(
            f.trains and f.learner.needs_group and f.settings.num_generations < 2,
            n=f.settings.num_generations,
        ),
    ),
    Combination(
        "`Speculation`",
        "`engine={engine}`",
        "this engine does not verify draft tokens. Remove the callback, or use `VLLMEngine` or "
        "`TransformersEngine`.",
        lambda s, f: when(
            s.drafting and not f.settings.engine.speculates, engine=f.settings.engine.name
        ),
    ),
    Combination(
        "`Speculation(tokens={tokens})`",
        "`max_completion_length={limit}`",
        "no draft can be that long. Use at most {less}.",
        lambda s, f: when(
            s.drafting and s.drafting.tokens >= f.settings.sampling.max_completion_length,
            tokens=s.drafting and s.drafting.tokens,
            limit=f.settings.sampling.max_completion_length,
            less=f.settings.sampling.max_completion_length - 1,
        ),
    ),
    Combination(
        "`Speculation`",
        "`min_p={min_p}`",
        "vLLM draws no draft tokens with it. Use `top_p`, or remove the callback.",
        lambda s, f: when(
            s.drafting and f.settings.sampling.min_p > 0, min_p=f.settings.sampling.min_p
        ),
    ),
    Combination(
        "`InFlightUpdates(cache='keep')`",
        "`engine={engine}`",
        "this engine cannot go on with what older weights have cached, or would give it to other "
        "requests. Use `cache='recompute'`.",
        lambda s, f: when(
            s.in_flight and s.in_flight.cache == "keep" and not f.settings.engine.keeps_cache,
            engine=f.settings.engine.name,
        ),
    ),
    Combination(
        "`LengthPrediction(probe_tokens={probe})`",
        "`max_completion_length={limit}`",
        "that leaves nothing to predict. Use less, or 0 to predict from the prompt alone.",
        lambda s, f: when(
            (s.probe_tokens or 0) >= f.settings.sampling.max_completion_length,
            probe=s.probe_tokens,
            limit=f.settings.sampling.max_completion_length,
        ),
    ),
    Combination(
        "`ParallelismPlanner`",
        "`devices={n}`",
        "it splits the engine over the node's devices, and the Trainer trains on {n} of them. "
        "Remove the callback, or use `devices=1`.",
        lambda _, f: when("ParallelismPlanner" in f.callbacks and f.ranks > 1, n=f.ranks),
    ),
    Combination(
        "Verified drafts",
        "`{strategy}`",
        "they are verified with weights of earlier policy versions, which this strategy has only "
        "in parts. Use `strategy='ddp'`, or leave `TailBatching(reuse_drafts=..., "
        "max_deferrals=...)`, `SortedBatching(mode='verified')`, "
        "`AheadRollout(correction='verify')`, `InFlightUpdates(too_old='verify')` and "
        "`DrainFilling` out.",
        lambda s, f: when(f.sharded and s.verifies_drafts, strategy=f.sharded),
    ),
    Combination(
        "Drafts of `{rule}` (`keeps_drafts`)",
        "`{other}`",
        "a draft would have tokens of several policy versions, and the weights of one are kept. "
        "Use `max_staleness=0` without `InFlightUpdates`, or `keeps_drafts=False`.",
        _mixed_drafts,
    ),
    Combination(
        "`DrainFilling`",
        "`MicroGroupSampling(memory_budget={budget!r})`",
        "in rounds that end early, completions would wait for memory that drafts take, so the "
        "drafts would decide what is trained on. Use `slots` in place of `memory_budget`.",
        lambda s, _: when(
            s.fills_drain and s.rule.ends_early and s.slots.memory_budget is not None,
            budget=s.slots.memory_budget,
        ),
    ),
    Combination(
        "{stale}",
        "`{old}importance_sampling_mode=None`",
        "tokens of earlier policies are trained on as if the newest had drawn them. Set "
        "`importance_sampling_mode`{fix}.",
        _uncorrected,
        "warned",
    ),
    Combination(
        "{stale}",
        "`importance_sampling_mode={mode!r}`",
        "the mode has no effect, because the clipped ratio is already relative to the policy that "
        "drew each token. Set `old_logprobs='trainer'` to use it.",
        _corrected_already,
        "warned",
    ),
    changed(
        "AheadRollout",
        "StreamedTraining",
        "With `correction='verify'` gradients are streamed anyway, and `StreamedTraining` only "
        "sets `start`.",
    ),
    changed(
        "DownSampling",
        "SortedBatching",
        "Completions are selected from whole groups, so rounds train on whole groups with every "
        "`advantage`.",
    ),
    changed(
        "DrainFilling",
        "DynamicSampling",
        "A prompt that replaces another takes the slots of drafts, which go on when slots are free "
        "again.",
    ),
    changed(
        "DrainFilling",
        "SortedBatching",
        "Drafts are begun of prompts that the pool holds beyond those of a round "
        "(`oversubscribe`) and, in the last round of a pool, of the next pool. They are verified "
        "in every mode.",
    ),
    changed(
        "DrainFilling",
        "TailBatching",
        "Drafts are begun of fresh prompts and, where the next round is likely to be long, of "
        "losers that have no draft. Prompts with a draft are ahead in the next race.",
    ),
    changed(
        "LengthPrediction",
        "MicroGroupSampling",
        "The predictions order the completions that wait for a slot: `longest_first` unless "
        "`order` says otherwise, `shortest_first` where rounds end early.",
    ),
    changed("DynamicSampling", "StreamedTraining", _BETWEEN_STEPS),
    changed(
        "LengthPrediction",
        "StreamedTraining",
        f"If completions wait for slots, {_BETWEEN_STEPS}",
    ),
    changed("DynamicSampling", "Speculation", _IN_TIME),
    changed("SortedBatching", "Speculation", _IN_TIME),
    changed("TailBatching", "Speculation", _IN_TIME),
    changed(
        "AdaptiveTimeouts",
        "TailBatching",
        "A race includes the reward: a call that hangs delays its prompt no longer than the "
        "adaptive time-out.",
    ),
]
"""All combinations that are refused, warned of, or in which one setting changes the other."""


def check(schedule: Schedule, facts: RunFacts) -> None:
    """Refuse settings that do not go together, and a rule that needs more prompts."""
    if facts.prompts is not None:
        schedule.rule.check_enough(facts.prompts)
    for row, values in _found(schedule, facts, "refused"):
        raise UsageError(row.said(values))


def warn(schedule: Schedule, facts: RunFacts) -> None:
    """Warn of settings of which one has no effect, or does not do what it seems to."""
    for row, values in _found(schedule, facts, "warned"):
        rank_zero_warn(row.said(values))


def _found(
    schedule: Schedule, facts: RunFacts, does: str
) -> Iterable[tuple[Combination, Mapping[str, Any]]]:
    for row in COMBINATIONS:
        if row.does == does and (values := row.found(schedule, facts)) is not None:
            yield row, values


def combinations_as_markdown() -> str:
    """The table in `docs/explanation/architecture.md`."""
    lines = ["| setting | with | |", "|---|---|---|"]
    does = {"refused": "**refused**: ", "warned": "**warned of**: ", "changed": ""}
    for row in COMBINATIONS:
        first, second, words = map(_shown, (row.first, row.second, row.words))
        lines.append(f"| {first} | {second} | {does[row.does]}{words} |")
    return "\n".join(lines)


_SHOWN = {
    "beside": "`AheadRollout`, `InFlightUpdates` or `StreamedTraining`",
    "compares": "drafts or stale tokens",
    "stale": "stale tokens",
    "what": "they are compared with",
    "why": "the message says why",
    "engine": "NAME",
    "rule": "a rule of your own",
    "other": "stale tokens",
    "strategy": "FSDP2Strategy",
    "sampling": "top_p, top_k or min_p",
    "who": "`AheadRollout`, `DrainFilling`, `InFlightUpdates` or a rule that verifies drafts",
    "use": "Use less, or a",
    **dict.fromkeys(("fix", "old"), ""),
}
"""What the documentation shows in place of values; `N` for all others."""


def _shown(text: str) -> str:
    text = re.sub(r"\{(\w+)(?:!r)?\}", lambda m: _SHOWN.get(m[1], "N"), text)
    return text[:1].upper() + text[1:]
