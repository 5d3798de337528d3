"""Picture of what each slot of the engine did during a rollout."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lit_rlsched.callbacks.pictures.style import (
    BLACK,
    FINISHES,
    GREEN,
    GREY,
    figure_of,
    seconds,
    whole_numbers,
)
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.settings import UsageError
from lit_rlsched.text import counted, percent, three_digits
from lit_rlsched.training.round import Round

IDLE = "#FBE3B5"
"""Colour of slots without a completion: light, so that none of the others is mistaken for it."""


def slot_timeline(round: Round) -> Figure:
    """Plot what each slot decoded when, how many slots decoded, and when gradients were computed.

    Slots are sorted by when they fall idle. A black mark is where a completion begins with tokens
    of an earlier round.

    Raises:
        UsageError: the round has no trace.
    """
    trace = round.trace
    if trace is None:
        raise UsageError(f"Round {round.ordinal} has no trace: it comes from a checkpoint.")
    with figure_of(10.0, 6.4 if trace.work else 5.8) as figure:
        panels = [5, 2, 0.7] if trace.work else [5, 2]
        axes = figure.subplots(len(panels), sharex=True, height_ratios=panels)
        legend = _draw_slots(axes[0], round, trace)
        _draw_running(axes[1], trace)
        end = trace.seconds or 1
        if trace.work:
            legend.append(_draw_work(axes[2], trace))
            end = max(end, *(last for _, last in trace.work))
        for one in axes[:2]:  # after the last step, slots are not idle but done
            one.axvspan(trace.seconds, end, color="white", linewidth=0, zorder=0.5)
        axes[-1].set(xlim=(0, end), xlabel="seconds since the first decode step")
        figure.suptitle(
            f"Round {round.ordinal}: {counted(len(set(trace.spans['request'])), 'completion')} "
            f"decoded in {_slots(trace)} in {seconds(trace.seconds)}; "
            f"{percent(trace.bubble_ratio)} of the slot-time was idle",
            x=0.01,
            ha="left",
            size=13,
        )
        columns = 2 if len(legend) > 3 else 3
        figure.legend(handles=legend, loc="outside lower left", ncols=columns, fontsize=10.5)
    return figure


def _slots(trace: RolloutTrace) -> str:
    slots = counted(trace.slots, "slot")
    return f"{slots} of {trace.engines} engines" if trace.engines > 1 else slots


def _draw_slots(axes: Axes, round: Round, trace: RolloutTrace) -> list[Patch]:
    """Draw a bar for each time that a completion was in a slot; return the legend."""
    spans, samples = trace.spans, {sample.id: sample.completion for sample in round.samples}
    finishes = {name: completion.finish_reason for name, completion in samples.items()}
    kept = _kept_tokens(round, trace)
    rows = _rows(trace)
    bars: dict[str | None, list[Any]] = defaultdict(list)
    marks, begun = [], set()
    edge, line = 0.006 * trace.seconds, 1.0 if trace.slots <= 64 else 0.0  # between completions
    for row in sorted(zip(*(spans[n] for n in ("start", "end", "slot", "request")), strict=True)):
        start, end, slot, request = row
        top = rows[slot]
        bars[finishes.get(request)].append(_box(start, end, top))
        if request in kept and request not in begun:
            marks.append(_box(start, start + edge, top))
        begun.add(request)
    axes.set_facecolor(IDLE)
    axes.grid(False)
    counts: Counter[str | None] = Counter(finishes.get(request) for request in begun)
    limit = max(group.sampling.max_completion_length for group in round.groups)
    legend = []
    for reason, (label, colour) in FINISHES.items():
        if boxes := bars.get(reason):
            # with antialiasing, the background would shine through between thin bars
            axes.add_collection(
                PolyCollection(
                    boxes,
                    facecolors=colour,
                    edgecolors="white",
                    linewidths=line,
                    antialiaseds=bool(line),
                )
            )
            text = f"{label.format(limit)} ({counts[reason]:,})"
            legend.append(Patch(color=colour, label=text))
    if kept:
        axes.add_collection(
            PolyCollection(marks, facecolors=BLACK, linewidths=0, antialiaseds=False)
        )
        legend.append(Patch(color=BLACK, label=_kept_label(round, kept, begun)))
    legend.append(Patch(color=IDLE, label="idle slot"))
    axes.set(ylim=(trace.slots, 0), ylabel="slot, by when it falls idle")
    axes.yaxis.set_major_locator(whole_numbers(8))
    return legend


def _box(start: float, end: float, row: int) -> list[tuple[float, float]]:
    return [(start, row), (end, row), (end, row + 1), (start, row + 1)]


def _rows(trace: RolloutTrace) -> dict[int, int]:
    """Return each slot's row: the slot that is busy longest is the first."""
    last: dict[int, float] = {}
    for slot, end in zip(trace.spans["slot"], trace.spans["end"], strict=True):
        last[slot] = max(end, last.get(slot, 0.0))
    order = sorted(last, key=lambda slot: (-last[slot], slot))
    return {slot: row for row, slot in enumerate(order)}


def _kept_tokens(round: Round, trace: RolloutTrace) -> dict[str, int]:
    """Return the tokens that completions of the round have from earlier rounds, by request."""
    decoded: Counter[str] = Counter()
    for request, tokens in zip(trace.spans["request"], trace.spans["tokens"], strict=True):
        decoded[request] += tokens
    kept = {s.id: s.completion.drawn - decoded[s.id] for s in round.samples}
    # verification draws a token after a rejected draft
    least = 2 if "drafts/tokens" in round.metrics else 1
    return {request: tokens for request, tokens in kept.items() if tokens >= least}


def _kept_label(round: Round, kept: dict[str, int], begun: set[str]) -> str:
    what = "a draft" if "drafts/tokens" in round.metrics else "tokens"
    whole = len(kept.keys() - begun)
    label = f"begins with {what} from an earlier round ({len(kept) - whole:,})"
    return f"{label}; {whole:,} more were complete" if whole else label


def _draw_running(axes: Axes, trace: RolloutTrace) -> None:
    times, running = trace.usage
    axes.set_facecolor(IDLE)
    axes.grid(False)
    axes.stairs(np.array(running, float), times, fill=True, color=GREY)
    axes.set(ylim=(0, trace.slots), ylabel="slots in use")
    axes.yaxis.set_major_locator(whole_numbers(4))
    mean = (1 - trace.bubble_ratio) * trace.slots
    slots = counted(trace.slots, "slot")
    axes.set_title(f"On average {three_digits(mean)} of {slots} decode", size=11)


def _draw_work(axes: Axes, trace: RolloutTrace) -> Patch:
    """Draw when gradients were computed; return the entry of the legend."""
    axes.broken_barh([(start, end - start) for start, end in trace.work], (0, 1), color=GREEN)
    axes.set(ylim=(0, 1), yticks=[], ylabel="trainer")
    axes.grid(False)
    axes.set_title(
        f"Streamed training: gradients are computed for {seconds(trace.work_seconds)}, "
        f"{seconds(trace.overlap_seconds)} of them while completions decode",
        size=11,
    )
    return Patch(color=GREEN, label="the trainer computes gradients")
