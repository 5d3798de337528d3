"""Seconds of rollouts with draft tokens, for `benchmarks.speculation`."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any, NamedTuple

from benchmarks.common import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import torch
from safetensors.torch import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import results
from benchmarks.record import policy_path, read_recording
from benchmarks.speculation_parts import StepParts
from lit_rlsched.engines.rollout_worker import RolloutWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

MODEL = "examples/countdown/model"
LIMIT, GENERATIONS = 512, 8
"""Of the quick task."""
SCHEDULES = ("fifo", "least_attained", "rounds", "tail")


class Setting(NamedTuple):
    """Arguments of `Speculation`; None: a run without it."""

    drafting: Drafting | None

    @classmethod
    def read(cls, text: str) -> "Setting":
        """Read `tokens:while_running`."""
        tokens, running = map(int, text.split(":"))
        return cls(Drafting(tokens, running))

    @property
    def name(self) -> str:
        """Name of a row."""
        d = self.drafting
        return "without" if d is None else f"tokens={d.tokens}, while_running={d.while_running}"


@dataclass
class Drawn:
    """A rollout."""

    tokens: dict[str, list[int]]
    seconds: float
    cpu_seconds: float
    steps: int
    row_steps: int
    """Running requests, summed over the steps."""
    proposed: int
    accepted: int
    lost: list[Prompt]
    """Prompts that lost a race."""


def share(accepted: int, proposed: int) -> str:
    """Return the accepted share as text."""
    return f"{accepted / proposed:.0%}" if proposed else "-"


class Case:
    """A setting with an engine of its own.

    Args:
        setting: Arguments of `Speculation`.
        slots: Most slots that it is used with.
        eos: The token that ends a completion.
    """

    def __init__(self, setting: Setting, slots: int, eos: int) -> None:
        self.setting = setting
        self.engine = VLLMEngine()
        self.engine.start(EngineSpec(MODEL, slots, 1024, (eos,), drafting=setting.drafting))
        self.drawn: list[Drawn] = []
        self.parts: StepParts | None = None
        """Where the seconds of the engine are spent, if that is measured."""

    def draw(
        self,
        policy: torch.nn.Module,
        prompts: Sequence[Prompt],
        slots: int,
        version: int,
        schedule: str = "fifo",
        race: bool = False,
    ) -> Iterator[None]:
        """Draw a round, or a race of its prompts that three quarters of them win.

        Yields:
            After each prompt, so that other cases can take a turn.
        """
        self.engine.sync_weights(policy.named_parameters(), version)  # empties the cache
        admission = Admission(
            slots,
            refill="rounds" if schedule == "rounds" else "continuous",
            order="least_attained" if schedule == "least_attained" else "fifo",
        )
        worker = RolloutWorker(self.engine, admission)
        controller = RolloutController(worker, Unscored(), seed=0)  # type: ignore[arg-type]
        plan = [
            Group(p.uid, p, Sampling(LIMIT), [Completion(i) for i in range(GENERATIONS)])
            for p in prompts
        ]
        places = len(plan) * 3 // 4 if race else len(plan)
        rule = TailRound(places, GENERATIONS, len(plan) / places) if race else FullRound(places)
        trace, before = worker.start_trace(), self.engine.stats()
        done, won, seconds, cpu_seconds = controller.run(plan, rule, version), [], 0.0, 0.0
        while True:
            start, cpu = time.perf_counter(), time.process_time()
            group = next(done, None)
            seconds += time.perf_counter() - start
            cpu_seconds += time.process_time() - cpu
            if group is None:
                break
            won.append(group.id)
            yield
        after = self.engine.stats()
        self.drawn.append(
            Drawn(
                {Sample(g, c).id: list(c.token_ids) for g in plan for c in g.completions},
                seconds,
                cpu_seconds,
                trace.decode_steps,
                trace.total("running"),
                after.proposed - before.proposed,
                after.accepted - before.accepted,
                [group.prompt for group in plan if group.id not in won[:places]],
            )
        )


def take_turns(draws: Sequence[Iterator[None]]) -> None:
    """Draw a round with several cases, one prompt after the other.

    The speed of a machine changes from second to second, for all of them alike.
    """
    for _ in zip_longest(*draws):
        pass


def time_settings(options: Any, settings: Sequence[Setting]) -> None:
    """Time the settings, which alternate, with the model before and after training."""
    rounds = _prompts(options)
    cases = _cases(options, settings)
    for name, folder in (("start", MODEL), ("end", f"{options.recording}/model")):
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for slots, schedule in product(options.slots, options.schedules):
            draws = [(policy, rounds[seed]) for seed in options.seeds]
            _time_rounds(f"{name}, {schedule}, {slots} slots", cases, slots, schedule, draws)
    for case in cases:
        case.engine.close()


def time_whole_run(options: Any, settings: Sequence[Setting], parts: bool = False) -> None:
    """Time the settings, which alternate, with the policies of a whole run.

    Args:
        options: The command line's.
        settings: What is compared.
        parts: Time the parts of the engine's steps instead of the rollout.
    """
    rounds = _prompts(options)
    cases = _cases(options, settings)
    for case in cases if parts else ():
        case.parts = StepParts(case.engine)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def policies() -> Iterator[tuple[torch.nn.Module, list[Prompt]]]:
        for number in range(0, len(rounds), options.every):
            load_model(policy, policy_path(options.recording, number))
            yield policy, rounds[number]

    for slots, schedule in product(options.slots, options.schedules):
        name = f"whole run, {schedule}, {slots} slots"
        _time_rounds(name, cases, slots, schedule, policies())
    for case in cases:
        case.engine.close()


def _prompts(options: Any) -> list[list[Prompt]]:
    """Prompts of the recorded rounds."""
    recording = read_recording(options.recording)
    return [[group.prompt for group in groups][: options.prompts] for groups in recording]


def _cases(options: Any, settings: Sequence[Setting]) -> list[Case]:
    eos, slots = AutoTokenizer.from_pretrained(MODEL).eos_token_id, max(options.slots)
    return [Case(setting, slots, eos) for setting in (Setting(None), *settings)]


def _time_rounds(
    name: str,
    cases: Sequence[Case],
    slots: int,
    schedule: str,
    rounds: Iterable[tuple[torch.nn.Module, list[Prompt]]],
) -> None:
    """Draw rounds with each case in turn, and print the sums.

    Args:
        name: Of the table.
        cases: What is compared.
        slots: Number of slots.
        schedule: One of `SCHEDULES`.
        rounds: Policy and prompts of each round.
    """
    race = schedule == "tail"
    for turn, (policy, prompts) in enumerate(rounds):
        if turn == 0:
            take_turns([case.draw(policy, prompts[:2], slots, 0) for case in cases])  # warms up
            for case in cases:
                case.drawn = []
                if case.parts is not None:
                    case.parts.clear()
        order = [*cases[turn % len(cases) :], *cases[: turn % len(cases)]]
        take_turns([case.draw(policy, prompts, slots, turn, schedule, race) for case in order])
    if race:
        lost = [[prompt for drawn in case.drawn for prompt in drawn.lost] for case in cases]
        pairs = zip(cases, lost, strict=True)
        take_turns([case.draw(policy, prompts, slots, turn + 1) for case, prompts in pairs])
    if cases[0].parts is None:
        _print_seconds(name, cases)
    else:
        _print_parts(name, cases)


def _print_parts(name: str, cases: Sequence[Case]) -> None:
    tables = {case.setting.name: case.parts.table() for case in cases if case.parts is not None}
    for case in cases:
        _check_same(case.drawn, cases[0].drawn)
        results.add(f"{name}, parts, {case.setting.name}", tables[case.setting.name])
    print(f"\n{name}: CPU seconds of the engine by part, {len(cases[0].drawn)} rounds\n")
    print(f"| | {' | '.join(tables)} |\n|{'---|' * (1 + len(tables))}")
    without = tables[cases[0].setting.name]
    for part in without:
        cells = [
            f"{table[part]:,.{0 if isinstance(table[part], int) else 2}f}"
            for table in tables.values()
        ]
        ratios = [without[part] / table[part] if table[part] else 0.0 for table in tables.values()]
        pairs = zip(cells, ratios, strict=True)
        print(f"| {part} | {' | '.join(f'{cell} ({ratio:.2f}x)' for cell, ratio in pairs)} |")


def _print_seconds(name: str, cases: Sequence[Case]) -> None:
    plain = cases[0].drawn
    print(f"\n{name}: {len(plain)} rounds, {_tokens(plain):,} tokens without draft tokens\n")
    print(
        "| setting | steps | accepted | tokens a row-step | CPU seconds | seconds |\n|" + "---|" * 6
    )
    for case in cases:
        _check_same(case.drawn, plain)
        steps = sum(d.steps for d in case.drawn)
        ratios = [p.cpu_seconds / d.cpu_seconds for p, d in zip(plain, case.drawn, strict=True)]
        proposed = sum(d.proposed for d in case.drawn)
        accepted = sum(d.accepted for d in case.drawn)
        cpu, wall = sum(d.cpu_seconds for d in case.drawn), sum(d.seconds for d in case.drawn)
        per_row = _tokens(case.drawn) / sum(d.row_steps for d in case.drawn)
        figures = {
            "steps": steps,
            "proposed": proposed,
            "accepted": accepted,
            "tokens_per_row_step": per_row,
            "cpu_seconds": cpu,
            "seconds": wall,
            "cpu_ratio": sum(d.cpu_seconds for d in plain) / cpu,
            "ratio": sum(d.seconds for d in plain) / wall,
        }
        results.add(f"{name}, {case.setting.name}", figures)
        print(
            f"| {case.setting.name} | {steps:,} | {share(accepted, proposed)} | "
            f"{per_row:.2f} | {cpu:.2f} ({figures['cpu_ratio']:.2f}x; {min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {wall:.2f} ({figures['ratio']:.2f}x) |"
        )


def _tokens(rounds: Sequence[Drawn]) -> int:
    return sum(len(tokens) for drawn in rounds for tokens in drawn.tokens.values())


def _check_same(rounds: Sequence[Drawn], plain: Sequence[Drawn]) -> None:
    """Fail if a token differs. Completions of a race may be shorter, as they may have lost."""
    for some, others in zip(rounds, plain, strict=True):
        for name in some.tokens.keys() & others.tokens.keys():
            drawn, expected = some.tokens[name], others.tokens[name]
            least = min(len(drawn), len(expected)) if some.lost or others.lost else None
            assert drawn[:least] == expected[:least], f"a token of {name} has changed"
