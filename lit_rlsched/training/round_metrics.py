"""Metrics of a round, under TRL's names where TRL has one."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from lit_rlsched.rollout.result import RoundResult, attempt, length_bias, wait_bias
from lit_rlsched.scheduling.planning import lower_bound
from lit_rlsched.training.advantages import standard_deviation
from lit_rlsched.training.round import Round, reward_matrix
from lit_rlsched.training.selection import selection_metrics
from lit_rlsched.training.update import Update
from lit_rlsched.types import ENVIRONMENT, Completion

STALENESS_BINS = 8
"""Ages from 0 on that have a metric of their own."""


def measure(
    round: Round, result: RoundResult, names: Sequence[str], update: Update
) -> dict[str, float]:
    """Compute all metrics of a round that was just drawn and of its optimizer steps.

    `names` are the reward functions' names.
    """
    all_steps = [update.step(round, i) for i in range(update.settings.steps_per_epoch)]
    steps = all_steps[: update.settings.steps_per_round]  # later iterations train on the same
    trained = [sample for step in steps for sample in step.samples]
    rewards = reward_matrix(round.groups, update.weights)
    if not update.learner.needs_group:
        rewards = rewards.view(1, -1)
    padding = [step.padding() for step in steps]
    positions = sum(p.positions for p in padding)
    before = [part for step in steps for part in step.accumulated]
    kept = [c for c in round.completions if not c.dropped]
    waits = wait_bias([attempt(sample.completion) for sample in trained], result.ran)
    return {
        "rollout/round": float(round.ordinal),
        "batch/micro_batches": float(sum(map(len, [*steps, *before]))),
        "batch/positions": float(positions),
        "batch/pad_frac": sum(p.padding for p in padding) / max(1, positions),
        "batch/completions": float(len(trained)),
        "batch/empty_steps": float(sum(not step.samples for step in all_steps)),
        **completion_metrics(round.completions),
        **logged_metrics(round.completions),
        **reward_metrics(round.completions, names, rewards),
        **rollout_metrics(round, result),
        "rollout/trained_over_drawn_length": length_bias(
            [sample.completion.drawn for sample in trained], result.ran
        ),
        **({} if waits is None else {"tools/trained_over_drawn_wait": waits}),
        **(staleness_metrics(kept, round.version) if update.off_policy else {}),
        **(selection_metrics(round, result) if update.schedule.selection else {}),
        **(result.drafts.metrics() if result.drafts.tokens else {}),
        **update.schedule.rule.metrics(result.planned),
    }


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Lengths and the share of truncated completions: `completions/*`."""
    lengths = [c.drawn for c in completions]
    ended = [c.drawn for c in completions if c.finish_reason == "stop"] or [0]
    metrics: dict[str, float] = {}
    for kind, values in (("length", lengths), ("terminated_length", ended)):
        metrics[f"completions/mean_{kind}"] = fmean(values)
        metrics[f"completions/min_{kind}"] = min(values)
        metrics[f"completions/max_{kind}"] = max(values)
    metrics["completions/clipped_ratio"] = fmean(c.finish_reason == "length" for c in completions)
    return metrics


def logged_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Mean of each metric that reward functions passed to `log_metric`."""
    values: dict[str, list[float]] = {}
    for completion in completions:
        for name, given in completion.logged.items():
            values.setdefault(name, []).extend(given)
    return {name: fmean(given) for name, given in values.items() if given}


def reward_metrics(
    completions: Sequence[Completion], names: Sequence[str], rewards: Tensor
) -> dict[str, float]:
    """Means and standard deviations of rewards `[P, G]` and of each function's scores."""
    figures = {}
    for i, name in enumerate(names):
        scores = [c.scores[i] for c in completions if c.scores and c.scores[i] is not None]
        column = torch.tensor(scores or [float("nan")], dtype=torch.float64)
        figures[f"rewards/{name}/mean"] = float(column.mean())
        figures[f"rewards/{name}/std"] = float(standard_deviation(column.view(1, -1)))
    figures["reward"] = float(rewards.nanmean())
    figures["reward_std"] = float(standard_deviation(rewards.view(1, -1)))
    figures["frac_reward_zero_std"] = float((standard_deviation(rewards) < 1e-8).double().mean())
    figures["rewards/unscorable"] = float(len(completions) - (~rewards.isnan()).sum())
    return figures


def rollout_metrics(round: Round, result: RoundResult) -> dict[str, float]:
    """Metrics of the rollout: counters that are deterministic, seconds, and what was discarded.

    `steps_over_lower_bound` compares with the minimum number of decode steps over all orders of the
    same lengths on as many slots. With a memory budget, the largest number of slots in use counts.
    """
    trace = result.trace
    lengths, least = trace.drawn, 0
    if lengths and trace.pauses:  # paused completions can be distributed evenly
        least = max(-(-sum(lengths.values()) // trace.slots), *lengths.values())
    elif lengths:
        least = int(lower_bound(list(lengths.values()), trace.slots))
    earlier = sum(a.tokens for a in result.stale) + result.drafts.tokens
    drawn = trace.tokens + result.drafts.drawn + earlier
    discarded = result.discarded_tokens
    attempts = [1 + max(c.attempts for c in g.completions) for g in round.groups]
    return {
        "rollout/slots": trace.slots,
        "rollout/decode_steps": trace.decode_steps,
        "rollout/slot_steps": trace.slot_steps,
        "rollout/idle_slot_steps": trace.slot_steps - trace.busy_slot_steps,
        "rollout/steps_over_lower_bound": trace.decode_steps / max(1, least),
        "rollout/tokens": trace.tokens,
        "rollout/prefill_tokens": trace.total("prefill_tokens"),
        "rollout/cached_tokens": trace.total("cached_tokens"),
        "rollout/pauses": trace.pauses,
        "rollout/preemptions": trace.total("preemptions"),
        "rollout/peak_running": trace.peak_running,
        "rollout/peak_kv_tokens": max(trace.steps["kv_tokens"], default=0),
        "rollout/bubble_ratio": trace.bubble_ratio,
        "rollout/seconds": trace.seconds,
        "rollout/tokens_per_second": trace.tokens / trace.seconds if trace.seconds else 0.0,
        # stale tokens and drafts were drawn in earlier rounds
        "rollout/useful_token_share": 1 - discarded / max(1, drawn, discarded),
        "rollout/discarded_tokens": discarded,
        "rollout/restarts": len(result.stale) + len(result.unfinished),
        "rollout/attempts/mean": fmean(attempts),
        "rollout/attempts/max": max(attempts),
    }


def staleness_metrics(completions: Sequence[Completion], version: int) -> dict[str, float]:
    """Age of the tokens trained on, in policy versions.

    `staleness/k` is the share of tokens drawn `k` versions before `version`; the last one holds
    all older ones.
    """
    counts: Counter[int] = Counter()
    for completion in completions:
        for drawn_under, tokens in completion.segments:
            if drawn_under != ENVIRONMENT:
                counts[version - drawn_under] += tokens
    total = max(1, counts.total())
    older = sum(n for k, n in counts.items() if k >= STALENESS_BINS)
    return {
        **{f"staleness/{k}": counts[k] / total for k in range(STALENESS_BINS)},
        f"staleness/{STALENESS_BINS}+": older / total,
        "staleness/mean": sum(k * n for k, n in counts.items()) / total,
        "staleness/max": max(counts, default=0),
    }
