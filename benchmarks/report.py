"""Table of the comparison with TRL."""

import textwrap
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

Run = dict[str, Any]

NOTES = """\
Median over {repeats} runs per side [min to max]; ours/TRL is the median ratio of runs with the same
seed. The sides alternate, each run in a new process with one thread and without returning memory
from glibc's heap (`keep_heap`, on both sides). Both draw the same prompts each round and score them
with the same function; a completion cut at the limit scores 0. Weights, settings and number of
trained completions are the same. The clock runs from the start of the first round to the last
optimizer step, so start-up does not count.

CPU seconds are those of the process and its children. Our reward worker is a child that runs on
another core, which saves wall seconds only. Lengths differ because each side learns from its own
completions: compare the figures per generated token. Our update skips completions whose advantage
is zero, which leaves the gradient unchanged because beta is 0.

TRL {trl} decodes with {backend}, per_device_train_batch_size={batch}, bf16 and gradient
checkpointing off{patched}. Held-out accuracy is mean@4 at temperature 1 over {held_out} problems,
measured in the same way for both; it was {start} at the start. Load average at the end:
{load:.1f}."""

PATCHED = (
    ", and with patches, without which its weight sync fails on vLLM's CPU build (weights are "
    "reloaded, the tied head is sent) and the engine decodes in bf16; it also computes the old "
    "log-probs in a separate pass, counted as rollout"
)


def total(run: Run, clock: str, *parts: str) -> float:
    """Return the seconds of these parts of a run, or of the whole run."""
    return sum(lap[clock] for part in parts or run["laps"] for lap in run["laps"][part])


def share(run: Run, part: str, whole: str) -> float:
    """Return the ratio of two counters."""
    return run["counts"][part] / max(1, run["counts"][whole])


def usual_round(run: Run) -> float:
    """Return the CPU seconds of the median round, which excludes costs of the first round."""
    pairs = zip(run["laps"]["rollout"], run["laps"]["update"], strict=True)
    return median(drawn["cpu"] + updated["cpu"] for drawn, updated in pairs)


def final_reward(run: Run) -> float:
    """Return the mean reward of the last five rounds."""
    return fmean(run["rewards"][-5:])


Row = tuple[str, str, Callable[[Run], float], bool]


def _counter(title: str, name: str) -> Row:
    return title, "{:,.0f}", lambda run: run["counts"][name], True


ROWS: list[Row | str] = [
    "Counted",
    _counter("completions trained on", "completions"),
    _counter("  left out of the passes: zero advantage", "skipped"),
    _counter("tokens generated", "tokens"),
    ("mean length", "{:.1f}", lambda run: share(run, "tokens", "completions"), True),
    _counter("decode steps", "decode_steps"),
    _counter("rows decoded, including waiting ones", "decode_rows"),
    ("rows decoded per token", "{:.2f}", lambda run: share(run, "decode_rows", "tokens"), True),
    _counter("forward and backward passes", "updates"),
    _counter("completion positions in the update", "completion_positions"),
    (
        "  of these padding",
        "{:.1%}",
        lambda run: share(run, "completion_padding", "completion_positions"),
        False,
    ),
    _counter("positions in the update, prompts included", "positions"),
    ("  of these padding", "{:.1%}", lambda run: share(run, "padding", "positions"), False),
    ("  per generated token", "{:.2f}", lambda run: share(run, "positions", "tokens"), True),
    "Timed",
    ("CPU seconds", "{:.1f}", lambda run: total(run, "cpu"), True),
    ("  rollout and scoring", "{:.1f}", lambda run: total(run, "cpu", "rollout"), True),
    ("  update", "{:.1f}", lambda run: total(run, "cpu", "update"), True),
    ("  of the median round", "{:.2f}", usual_round, True),
    ("wall seconds", "{:.1f}", lambda run: total(run, "wall"), True),
    (
        "completions per CPU second",
        "{:.1f}",
        lambda run: run["counts"]["completions"] / total(run, "cpu"),
        True,
    ),
    (
        "completions per wall second",
        "{:.1f}",
        lambda run: run["counts"]["completions"] / total(run, "wall"),
        True,
    ),
    (
        "generated tokens per CPU second",
        "{:,.0f}",
        lambda run: run["counts"]["tokens"] / total(run, "cpu"),
        True,
    ),
    (
        "generated tokens per wall second",
        "{:,.0f}",
        lambda run: run["counts"]["tokens"] / total(run, "wall"),
        True,
    ),
    ("start-up, wall seconds (not included above)", "{:.1f}", lambda run: run["startup"], True),
    ("peak memory, MiB", "{:,.0f}", lambda run: run["peak_mib"], True),
    "Learned",
    ("reward, last five rounds", "{:.3f}", final_reward, False),
    (
        "held-out accuracy (mean@4)",
        "{:.3f}",
        lambda run: run["held_out"].get("val/accuracy", float("nan")),
        False,
    ),
]


def figures(run: Run) -> dict[str, float]:
    """Return all figures of the table for one run."""
    rows = [row for row in ROWS if not isinstance(row, str)]
    return {title.strip(): figure(run) for title, _, figure, _ in rows}


def report(result: dict[str, Any]) -> str:
    """Return the table and the notes that are needed to read it."""
    theirs, ours = result["runs"]["trl"], result["runs"]["ours"]
    lines = [_line("", "TRL", "ours", "ours/TRL")]
    for row in ROWS:
        if isinstance(row, str):
            lines += ["", row]
            continue
        title, form, figure, as_ratio = row
        a, b = [figure(run) for run in theirs], [figure(run) for run in ours]
        ratios = [y / x for x, y in zip(a, b, strict=True) if x] if as_ratio else []
        ratio = f"{median(ratios):.2f}" if ratios else ""
        lines.append(_line(title, _spread(a, form), _spread(b, form), ratio))
    setting = result["setting"]
    notes = NOTES.format(
        repeats=len(ours),
        trl=result["versions"]["trl"],
        backend={"hf": "transformers' generate", "vllm": "vLLM"}[setting["trl_backend"]],
        batch=setting["trl_batch_size"],
        patched=PATCHED if setting["trl_backend"] == "vllm" else "",
        held_out=setting["held_out"],
        start="{:.3f}".format(result["start"].get("val/accuracy", float("nan"))),
        load=result["load"][0],
    )
    paragraphs = [textwrap.fill(text, width=100) for text in notes.split("\n\n")]
    return "\n".join([*lines, "", *paragraphs])


def _line(title: str, *columns: str) -> str:
    theirs, ours, ratio = columns
    return f"{title:43}{theirs:>32}{ours:>32}{ratio:>9}".rstrip()


def _spread(values: list[float], form: str) -> str:
    middle, low, high = [form.format(of(values)) for of in (median, min, max)]
    return middle if low == high else f"{middle} [{low} to {high}]"
