"""Speculation with vLLM: seconds by slots and settings, steps saved on recordings, step times.

    python -m benchmarks run speculation

`seconds`: prompts of the quick task are drawn by its model before training (`start`) and after it
(`end`, from the recording), without draft tokens and with several settings of `Speculation`, which
alternate. Every setting draws the same tokens, or the benchmark fails. A seed is a round of the
recording, with its own prompts. Seconds are of the rollout alone.

`whole`: the same for every third round (`--every`) of the recorded run, drawn by the policy that
drew it then. It takes long and is not run by default; the recording needs the run's policies
(`--trainer.callbacks.policies=true`).

`parts`: the CPU seconds of the engine in the same rounds, by part of a step: forward passes, logits
and draws, guesses of draft tokens, and the rest. They say why a rollout does not gain as much as
its steps are fewer. Timing itself costs a few per cent.

All three can use several `--schedules`: `fifo`, which refills slots at once; `least_attained`,
which is `MicroGroupSampling(order="least_attained")`; `rounds`, which is
`MicroGroupSampling(refill="rounds")`; and `tail`, which is `TailBatching`: three quarters of the
prompts of a round win, and at the end one long round draws all that lost.

`replay`: decode steps of recorded completions with and without draft tokens, counted without a
model. `--recording` may be that of any run: `lit-rlsched fit` writes it with
`--trainer.callbacks+=benchmarks.record.Recorder --trainer.callbacks.folder=FOLDER`.

`races`: who wins where a round ends early. Each recorded round is a race: the first half of its
prompts to be complete wins, with draft tokens and without, counted in decode steps (**simulated**:
rewards come at once). Differences are of means over the winners, with standard errors over rounds.

`steps`: median time of a decode step, by rows and by tokens of a row, with draft tokens that are
almost never right. Draft tokens pay if the tokens of a row-step exceed the ratio of the times.
"""

import os
import random
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.common import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from transformers import AutoConfig

from benchmarks import results
from benchmarks.record import policy_path, read_recording, record
from benchmarks.replay import Schedule, replay, replayed_rounds
from benchmarks.speculation_seconds import (
    GENERATIONS,
    MODEL,
    SCHEDULES,
    Setting,
    share,
    time_settings,
    time_whole_run,
)
from lit_rlsched.cli.malloc import keep_heap
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.training.round_metrics import speculation_metrics
from lit_rlsched.types import Group, Request, Sample, Sampling

SETTINGS = ["2:8", "4:4", "4:8", "4:16", "4:64", "8:8"]
CASES = ("seconds", "whole", "parts", "replay", "races", "steps")
POLICIES = {"whole", "parts"}
"""Cases that need the policies of the recorded run."""


def replay_recording(options: Any, settings: Sequence[Setting]) -> None:
    """Print the steps that draft tokens save on recorded completions."""
    rounds = read_recording(options.recording)
    parts = {
        "first rounds": rounds[:4],
        "last rounds": rounds[-4:],
        "whole run": rounds[:: options.every],
    }
    for (part, some), slots in product(parts.items(), options.slots):
        plain = replay(some, Schedule(""), slots).decode_steps
        print(f"\nreplay, {part}, {slots} slots\n")
        print(
            "| setting | steps | accepted | tokens a row-step | positions a token |\n"
            + "|---" * 5
            + "|"
        )
        for setting in settings:
            found = replay(some, Schedule("", drafting=setting.drafting), slots)
            steps, tokens = found.decode_steps, sum(trace.tokens for trace in found.traces)
            row_steps, proposed, accepted = (
                sum(trace.total(column) for trace in found.traces)
                for column in ("running", "proposed", "accepted")
            )
            per_row, positions = tokens / row_steps, (row_steps + proposed) / tokens
            figures = {"steps": steps, "plain_steps": plain, "tokens_per_row_step": per_row}
            figures |= {"positions_per_token": positions, "proposed": proposed}
            results.add(f"replay, {part}, {slots} slots, {setting.name}", figures)
            print(
                f"| {setting.name} | {steps:,} of {plain:,} ({plain / steps:.2f}x) | "
                f"{share(accepted, proposed)} | {per_row:.2f} | {positions:.2f} |"
            )


class Winners(NamedTuple):
    """The groups that won a race."""

    ids: set[str]
    reward: float
    """Mean over their completions, as all below."""
    length: float
    speed: float
    """Tokens per step, over those of all that was drawn."""


def race(groups: Sequence[Group], slots: int, drafting: Drafting | None) -> Winners:
    """Draw the first half of the groups to be complete."""
    rule = TailRound(len(groups) // 2, GENERATIONS, prompt_ratio=2.0)
    drawn = next(replayed_rounds([groups], Schedule("", drafting=drafting), slots, rule))
    won = [Sample(g, c) for g in drawn.harvest.trained for c in g.completions]
    scored = {Sample(g, c).id: c.scores for g in groups for c in g.completions}
    metrics = speculation_metrics(drawn.trace, [sample.id for sample in won])
    return Winners(
        {group.id for group in drawn.harvest.trained},
        statistics.fmean(sum(filter(None, scored[s.id] or ())) for s in won),
        statistics.fmean(len(s.completion.token_ids) for s in won),
        metrics.get("speculation/trained_over_drawn_speed", 1.0),
    )


def race_recording(options: Any, settings: Sequence[Setting]) -> None:
    """Print what draft tokens change about the winners of races."""
    rounds = read_recording(options.recording)
    for slots in options.slots:
        plain = [race(groups, slots, None) for groups in rounds]
        print(f"\nraces of {len(rounds)} rounds, {slots} slots\n")
        print(
            "| setting | other winners | reward | tokens | speed: won over all |\n"
            + "|---" * 5
            + "|"
        )
        for setting in settings:
            won = [race(groups, slots, setting.drafting) for groups in rounds]
            pairs = [*zip(won, plain, strict=True)]
            figures = {
                "other": [len(a.ids - b.ids) / len(a.ids) for a, b in pairs],
                "reward": [a.reward - b.reward for a, b in pairs],
                "tokens": [a.length - b.length for a, b in pairs],
                "speed": [a.speed for a, _ in pairs],
            }
            means = {name: statistics.fmean(of) for name, of in figures.items()}
            errors = {
                f"{n}_error": statistics.stdev(of) / len(of) ** 0.5 for n, of in figures.items()
            }
            results.add(f"races, {slots} slots, {setting.name}", means | errors)
            cells = [
                f"{means['other']:.1%}",
                f"{means['reward']:+.4f} ± {errors['reward_error']:.4f}",
                f"{means['tokens']:+.2f} ± {errors['tokens_error']:.2f}",
                f"{means['speed']:.3f} ± {errors['speed_error']:.3f}",
            ]
            print(f"| {setting.name} | {' | '.join(cells)} |")


class Junk:
    """A drafter whose tokens are almost never right."""

    tokens: ClassVar[int] = 0
    """Number of draft tokens of a row."""

    def propose(
        self, text: Sequence[int], siblings: Sequence[Sequence[int]], most: int
    ) -> Sequence[int]:
        """Return `tokens` tokens, if so many are allowed."""
        return [3 + (text[-1] + 7 * i) % 50 for i in range(min(most, self.tokens))]


def time_steps(options: Any) -> None:
    """Print the time of a decode step by rows and by tokens of a row."""
    rows, tokens = options.rows, [0, *options.tokens]
    most = max(tokens)
    engine = VLLMEngine()
    drafting = Drafting(most, max(rows), "benchmarks.speculation.Junk")
    length = options.context + (2 * options.steps + 4) * (1 + most)
    engine.start(EngineSpec(options.model, max(rows), length, (), drafting=drafting))
    vocabulary = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
    times: dict[tuple[int, int], list[float]] = {cell: [] for cell in product(rows, tokens)}
    for turn in range(3):
        cells = list(times)
        random.Random(turn).shuffle(cells)
        for count, drafted in cells:
            Junk.tokens = drafted
            rng = random.Random(count)
            prompts = [
                [rng.randrange(3, vocabulary) for _ in range(options.context)] for _ in range(count)
            ]
            limit = Sampling(length - options.context)
            engine.submit([Request(f"g/{i}", p, turn, limit) for i, p in enumerate(prompts)])
            for step in range(2 + options.steps):
                start = time.perf_counter()
                engine.step()
                if step > 1:
                    times[count, drafted].append(time.perf_counter() - start)
            engine.abort([f"g/{i}" for i in range(count)])
    engine.close()
    _print_steps(options, tokens, {cell: statistics.median(of) for cell, of in times.items()})


def _print_steps(options: Any, tokens: list[int], medians: dict[tuple[int, int], float]) -> None:
    print(f"\nms of a decode step, {options.model}, context {options.context}\n")
    print(
        "| rows | "
        + " | ".join(f"1 + {n}" for n in tokens)
        + " |\n"
        + "|---" * (1 + len(tokens))
        + "|"
    )
    for rows in options.rows:
        one = medians[rows, 0]
        results.add(f"step, {rows} rows", {f"{n} draft tokens": medians[rows, n] for n in tokens})
        cells = [f"{1e3 * one:.2f}", *(f"{medians[rows, n] / one:.2f}x" for n in tokens[1:])]
        print(f"| {rows} | {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = results.parser("speculation", __doc__)
    results.add_cases(parser, CASES)
    parser.set_defaults(cases=[case for case in CASES if case not in POLICIES])
    parser.add_argument(
        "--recording", default="runs/recording", help="folder of the recording; made if missing"
    )
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[8, 16, 64], help="numbers of slots"
    )
    parser.add_argument(
        "--settings", nargs="+", default=SETTINGS, metavar="TOKENS:WHILE_RUNNING", help="settings"
    )
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=["fifo"], help="schedules"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=3,
        help="distance of the rounds of `whole`, `parts` and of the whole run in `replay`",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="recorded rounds")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a round")
    parser.add_argument("--model", default=MODEL, help="folder of the model of `steps`")
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt in `steps`")
    parser.add_argument("--steps", type=int, default=40, help="timed steps per cell and turn")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8], help="draft tokens")
    options = results.parse(parser, arguments)
    settings = [Setting.read(text) for text in options.settings]
    if {*CASES[:-1]} & {*options.cases} and not Path(options.recording).exists():
        record(options.recording, "--trainer.callbacks.policies=true")
    of_policies = POLICIES & {*options.cases}
    if of_policies and not policy_path(options.recording, 0).exists():
        raise SystemExit(
            f"`--cases {' '.join(of_policies)}`: {options.recording} has no policies. Record the "
            "run again with `--trainer.callbacks.policies=true`, or give another `--recording`."
        )
    keep_heap()
    if "seconds" in options.cases:
        time_settings(options, settings)
    if "whole" in options.cases:
        time_whole_run(options, settings)
    if "parts" in options.cases:
        time_whole_run(options, settings, parts=True)
    if "replay" in options.cases:
        replay_recording(options, settings)
    if "races" in options.cases:
        race_recording(options, settings)
    if "steps" in options.cases:
        time_steps(options)


if __name__ == "__main__":
    main()
