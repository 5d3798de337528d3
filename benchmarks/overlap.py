"""Seconds of a round when the next one is drawn during the update, on RollPacker's shape.

    python -m benchmarks run overlap

Deterministic. Engine, lengths and verification are those of `benchmarks run tails`: 128 prompts
with 8 completions of at most 16k tokens, on 16 engines (7 B parameters on as many GPUs). An update
takes a forward and a backward pass over all positions, three times a forward pass, on a number of
trainers that divide it evenly; the verification takes one forward pass over a draft, or three if a
part of it is rejected. Engines and trainers have GPUs of their own.

With `R` the rollout, `U` the update, `V` the verification and `R'` the rollout of what is left of
the drafts, a round takes

- `synchronous`: `R + U`;
- `importance`: `max(R, U)`;
- `verify`: `max(R, V + R' + U)`, without streamed gradients, as free slots begin the drafts of the
  next round while this one is verified and its rest is drawn; `without free slots`
  `max(R, U) + V + R'`;
- `losers go on`: rollout and update of `TailBatching(1.5, max_deferrals=8)`, one after the other;
- `filled, n ahead`: prompts of the `n` next rounds take free slots, their drafts are verified
  before each round, and rollout and update follow one another; or, with `importance`, they go on
  as they are. This is a rule of the benchmark.

Figures are means over `--rounds` rounds, the first four left out.
"""

from collections.abc import Sequence
from itertools import count
from statistics import fmean
from typing import NamedTuple

from benchmarks import results
from benchmarks.tails import (
    GENERATIONS,
    LIMIT,
    PER_ENGINE,
    PER_POSITION,
    PER_STEP,
    Lengths,
    Verifier,
)
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.rollout.planner import RolloutBuffer, RoundPlanner
from lit_rlsched.rollout.round_runner import RoundRunner
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule, RoundState
from lit_rlsched.scheduling.tail_batching import DeferringTailRound
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.simulation.loop import PromptList, Visit, simulated_session
from lit_rlsched.types import Group, Prompt, Sampling

UPDATE = 3
"""Forward passes that an update takes as long as."""
UNMOVED = 1e-9
"""Distance of policies at which everything is kept."""


class FilledRound(RoundRule):
    """Begins the prompts of the next rounds in free slots, and ends with its own prompts."""

    ends_early = True
    keeps_drafts = True

    def __init__(self, prompts: int, ahead: int) -> None:
        self.update_prompts, self.ahead = prompts, ahead

    def most_prompts(self) -> int:
        return (1 + self.ahead) * self.update_prompts

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return self.most_prompts() - len(pool)

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        return pool[: self.most_prompts()]

    def done(self, state: RoundState) -> bool:
        own = {group.id for group in state.planned[: self.update_prompts]}
        return sum(group.id in own for group in state.decoded) == self.update_prompts

    def settle(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        return list(groups[: self.update_prompts]), list(groups[self.update_prompts :])


class Drawn(NamedTuple):
    """Seconds of the parts of a round on the engines."""

    ahead: float
    """Of drafts that are drawn during the update before."""
    rollout: float
    verify: float
    """Forward passes over drafts."""
    trained: int
    """Positions that the update has."""
    drafts: DraftAudit


def rounds(
    rule: RoundRule, ahead: bool, prompts: int, n: int, distance: float, engines: int
) -> list[Drawn]:
    """Return the rounds, of which drafts are drawn before if they are drawn `ahead`."""
    lengths, slots = Lengths(0.5), prompts * GENERATIONS
    if isinstance(rule, DeferringTailRound):
        slots = rule.most_prompts() * GENERATIONS
    engine = SimulatedEngine(
        lengths=lengths, step_time_base=PER_STEP, per_prefill_token=PER_POSITION, stream=False
    )
    session = simulated_session(engine, slots, LIMIT + 1, lambda: Admission(slots))
    verifier = Verifier(lengths, distance)
    planner = RoundPlanner(RolloutBuffer(), Sampling(LIMIT), GENERATIONS)
    visits = (Visit(Prompt(str(p), "", (1 + p,)), str(p)) for p in count())
    planner.source = PromptList(visits)  # type: ignore[assignment]
    runner, found = RoundRunner(planner), []

    def seconds(trace: RolloutTrace) -> float:
        steps = PER_STEP * trace.decode_steps
        return steps + (trace.seconds - steps) / engines

    for number in range(n):
        version, drafted = number + int(ahead), 0.0
        if ahead:
            groups = planner.plan(rule)
            for _ in session.rollout(groups, number):
                pass
            drafted = seconds(session.trace)
            for completion in (c for group in groups for c in group.completions):
                completion.put_off()
            planner.pool.settle(groups, groups)
        verifier.positions = 0
        drawn = runner.run(session, rule, version, version, verifier)
        runner.commit(drawn)
        harvest = drawn.harvest
        trained = sum(len(c.token_ids) for g in harvest.trained for c in g.completions)
        verification = PER_POSITION * verifier.positions
        found.append(Drawn(drafted, seconds(drawn.trace), verification, trained, harvest.drafts))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each number of trainers."""
    parser = results.parser("overlap", __doc__)
    parser.add_argument("--prompts", type=int, default=128, help="prompts of a round")
    parser.add_argument("--rounds", type=int, default=12, help="rounds")
    parser.add_argument(
        "--distances", type=float, nargs="*", default=[0.003, 0.0003], help="of successive policies"
    )
    parser.add_argument("--trainers", type=int, nargs="*", default=[16, 1], help="GPUs")
    options = results.parse(parser, arguments)
    prompts, engines = options.prompts, options.prompts * GENERATIONS // PER_ENGINE
    full = FullRound(prompts)
    losers = DeferringTailRound(prompts, GENERATIONS, 1.5, 1.0, max_deferrals=8)

    def draw(rule: RoundRule, distance: float, ahead: bool = False) -> list[Drawn]:
        return rounds(rule, ahead, prompts, options.rounds, distance, engines)[4:]

    fixed = {
        "synchronous": draw(full, 1),
        **{
            f"filled, importance, {n} ahead": [
                d._replace(verify=0.0, drafts=DraftAudit())
                for d in draw(FilledRound(prompts, n), UNMOVED)
            ]
            for n in (1, 4)
        },
    }
    for distance in options.distances:
        drawn = {
            **fixed,
            "verify": draw(full, distance, ahead=True),
            "losers go on": draw(losers, distance),
            **{f"filled, {n} ahead": draw(FilledRound(prompts, n), distance) for n in (1, 4)},
        }
        for trainers in options.trainers:
            _table(drawn, engines, trainers, distance)


def _table(drawn: dict[str, list[Drawn]], engines: int, trainers: int, distance: float) -> None:
    names = ["", "R, or with drafts R'", "U", "V", "seconds", "of synchronous", "kept of drafts"]
    print(f"\n{engines} engines, {trainers} trainers, distance {distance:g}:\n")
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    base = 0.0
    for name, of in drawn.items():
        rollout, ahead = fmean(d.rollout for d in of), fmean(d.ahead for d in of)
        update = fmean(UPDATE * PER_POSITION * d.trained for d in of) / trainers
        verification = fmean(d.verify for d in of) / trainers
        drafts = sum((d.drafts for d in of), DraftAudit())
        seconds = rollout + verification + (max(ahead, update) if ahead else update)
        lines = {name: (rollout, update, verification, seconds)}
        if ahead:
            lines = {
                "verify": (*lines[name][:3], max(ahead, verification + rollout + update)),
                "verify without free slots": lines[name],
            }
        if not base:
            base = seconds
            lines["importance"] = rollout, update, 0.0, max(rollout, update)
        for line, figures in lines.items():
            kept = f"{drafts.accepted_tokens / drafts.tokens:.0%}" if drafts.tokens else ""
            results.add(
                f"{line}, {trainers} trainers, {distance:g}",
                dict(zip(("rollout", "update", "verify", "seconds"), figures, strict=True)),
            )
            cells = [line, *(f"{f:.1f}" for f in figures), f"{base / figures[3]:.2f}x", kept]
            print(f"| {' | '.join(cells)} |")
