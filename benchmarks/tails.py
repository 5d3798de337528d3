"""Round times of RollPacker's tail batching and of plain rounds, on the shape of its paper.

    python -m benchmarks run tails
    python -m benchmarks run tails --curve 0.003 0.007 0.02

Deterministic: random lengths run through the controller and the round rule of a real run, on the
simulated engine. A round has 128 prompts with 8 completions of at most 16k tokens, and the longest
is about 25 to 32 times the median (arXiv 2509.21009). A completion that loses a race is drawn again
with another length, or continues after the verified part of its draft with a longer length. The
total variation distance of the next token between the policies of two successive rounds is 0.003.
Between the policy of a draft and the one that verifies it, it is that times the number of rounds
between them, which is the largest possible value. Half of the variance of log lengths is between
prompts, or none. Figures are means over 100 rounds, long rounds included.

Seconds model the hardware of the paper: 16 engines (7 B parameters on as many GPUs) that divide
the completions evenly, 64 each in a synchronous round; and one engine that decodes all of them. A
decode step takes 10 ms, 50 microseconds per running completion and 20 ns per token in the cache. A
position of a forward pass over known tokens takes 25 microseconds, half of what a running request
adds to a decode step (7 B parameters at 560 TFLOP/s). A draft takes one forward pass of the
trainer, or two if a part of it is rejected; the engine then prefills the accepted part.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import exp, log, sqrt
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

import torch

from benchmarks import results
from benchmarks.tabular import acceptances
from lit_rlsched.engines.sampling import counter_uniform
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.audit import Attempt, DraftAudit, length_bias
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.round_runner import DrawnRound
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound
from lit_rlsched.simulation.loop import Visit, simulated_rounds, simulated_session
from lit_rlsched.training.block_verification import prefix_weights
from lit_rlsched.types import Group, Prompt, Request, Sampling, stable_hash

GENERATIONS, LIMIT, EOS = 8, 16384, 0
NORMAL = NormalDist()
MEDIAN, SIGMA = 550, 1.1
PER_STEP, PER_POSITION = 0.01, 2.5e-5
"""Seconds of a decode step without requests, and of a position of a forward pass."""
PER_ENGINE = 64
"""Completions per engine in a synchronous round of the paper."""
RACES = [
    ("prompts race", (1.25, 1.0)),
    ("completions race as well", (1.25, 1.25)),
    ("completions race as well, 1.1 and 1.5", (1.1, 1.5)),
]
"""Races with their `prompt_ratio` and `completion_ratio`."""


def methods(prompts: int) -> dict[str, RoundRule]:
    """Return the rules to compare, for rounds with this number of prompts."""

    def tail(of_prompts: float, of_completions: float = 1.0, **more: Any) -> TailRound:
        return TailRound(prompts, GENERATIONS, of_prompts, of_completions, **more)

    return {
        "synchronous": FullRound(prompts),
        **{
            f"{name}{', drafts' if drafts else ''}": tail(*ratios, reuse_drafts=drafts)
            for name, ratios in RACES
            for drafts in (False, True)
        },
        "completions race alone": tail(1.0, 1.25),
        **{
            f"prompts race, {ratio}, losers go on": DeferringTailRound(
                prompts, GENERATIONS, ratio, 1.0, max_deferrals=8
            )
            for ratio in (1.25, 1.5, 2.0)
        },
    }


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths.

    Args:
        shared: Share of the variance of log lengths that is between prompts.
    """

    shared: float

    def __call__(self, request: Request) -> int:
        """Return the length for a request; one that continues after a prefix gets a longer one."""
        noise = _uniform("completion", request.seed)
        return self.longer(len(request.prefix_ids), request.prompt_ids, noise)

    def longer(self, than: int, prompt_ids: Sequence[int], noise: float) -> int:
        """Draw a length above `than` tokens by inverting the conditional distribution."""
        of_prompt = sqrt(self.shared) * NORMAL.inv_cdf(_uniform("prompt", prompt_ids[0]))
        scale = sqrt(1 - self.shared)
        if than:  # from the upper tail, where the probability does not round to 1
            least = (log((than + 0.5) / MEDIAN) / SIGMA - of_prompt) / scale
            own = -NORMAL.inv_cdf(NORMAL.cdf(-least) * (1 - noise))
        else:
            own = NORMAL.inv_cdf(noise)
        length = round(MEDIAN * exp(SIGMA * (of_prompt + scale * own)))
        return min(LIMIT, max(than + 1, length))


class Verifier(RoundHooks):
    """Accept drafts by the rule of a real run, for policies that differ by a given distance.

    The ratio `p/q` of a token is log-normal.

    Args:
        lengths: Lengths of the run.
        distance: Total variation distance of the next token between two successive policies. By
            the triangle inequality `n` versions are at most `n` times as far apart; here they are
            exactly that far, as if every step went in the same direction.
    """

    def __init__(self, lengths: Lengths, distance: float) -> None:
        self.lengths, self.distance = lengths, distance
        self.positions = 0
        """Positions of the trainer's forward passes in the last call."""
        self.ages: dict[int, DraftAudit] = {}
        """Drafts of the last call, by versions since they were drawn."""

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        """Turn drafts into completions, as `training.draft_verifier` does."""
        self.positions, self.ages = 0, {}
        for group, completion in ((g, c) for g in groups for c in g.completions if c.draft):
            draft, key = completion.draft, (group.id, completion.index, version)
            assert draft is not None
            completion.draft, n = None, len(draft.token_ids)
            age = version - draft.versions[-1]
            kept = self._kept(n, age, *key)
            audit = DraftAudit(n, kept, kept == n, drawn=int(kept < n))
            self.ages[age] = self.ages.get(age, DraftAudit()) + audit
            self.positions += n
            tokens = list(draft.token_ids[:kept])
            if kept < n:
                self.positions += n
                noise = _uniform("after", *key)
                length = self.lengths.longer(kept, group.prompt.token_ids, noise)
                tokens.append(EOS if length == kept + 1 else EOS + 1)
            completion.token_ids = array("i", tokens)
            completion.logprobs = array("d", bytes(8 * len(tokens)))
            completion.segments = [(version, len(tokens))]
            if tokens[-1] == EOS:
                completion.finish_reason = "stop"
            elif len(tokens) == LIMIT:
                completion.finish_reason = "length"
        return sum(self.ages.values(), DraftAudit())

    def _kept(self, n: int, age: int, *key: object) -> int:
        """Return how many of `n` tokens the rule accepts, with an integral for its sum."""
        sigma = 2 * NORMAL.inv_cdf((1 + min(self.distance * age, 0.999)) / 2)
        counters = torch.arange(n)
        streams = torch.tensor([stable_hash(use, *key) for use in ("ratio", "accept")])
        normal = torch.special.ndtri(counter_uniform(streams[0], counters).clamp(min=2**-54))
        log_weights = prefix_weights(sigma * normal - sigma**2 / 2, torch.zeros(n))
        far = log_weights[:-1] / sigma
        more = log_weights[:-1].exp() * torch.special.ndtr(far + sigma / 2)
        more -= torch.special.ndtr(far - sigma / 2)
        noise = counter_uniform(streams[1], counters)
        accepted = (noise < acceptances(log_weights, more.clamp(min=0))[1:]).nonzero()
        return int(accepted[-1]) + 1 if len(accepted) else 0


def _uniform(*key: object) -> float:
    return (stable_hash(*key) + 0.5) / 2**63


class Figures(NamedTuple):
    """Figures of a round without its tokens, which would not fit into memory for all rounds."""

    long: bool
    seconds: float
    """Seconds on one engine."""
    steps: int
    slot_steps: int
    lengths: list[int]
    """Tokens of each span in a slot."""
    discarded: int
    drafts: DraftAudit
    ages: dict[int, DraftAudit]
    trained: list[int]
    first: list[Attempt]
    """Completions that were drawn for the first time."""

    @classmethod
    def of(cls, drawn: DrawnRound, long: bool, verifier: Verifier) -> "Figures":
        """Return the figures of a round."""
        trace, harvest = drawn.trace, drawn.harvest
        return cls(
            long,
            trace.seconds + PER_POSITION * verifier.positions,
            trace.decode_steps,
            trace.slot_steps,
            trace.spans["tokens"],
            harvest.discarded_tokens,
            harvest.drafts,
            verifier.ages,
            [len(c.token_ids) for g in harvest.trained for c in g.completions],
            [a for a in harvest.ran if a.first],
        )

    def seconds_on(self, engines: int) -> float:
        """Return the seconds on engines that divide the completions and take every decode step."""
        steps = PER_STEP * self.steps
        return steps + (self.seconds - steps) / engines


def rounds(
    rule: RoundRule, shared: float, slots: int, n: int, distance: float = 0.003
) -> list[Figures]:
    """Return the figures of the first `n` rounds."""
    lengths = Lengths(shared)
    engine = SimulatedEngine(
        lengths=lengths,
        step_time_base=PER_STEP,
        per_prefill_token=PER_POSITION,
        stream=False,
    )
    session = simulated_session(engine, slots, LIMIT + 1, lambda: Admission(slots))
    verifier = Verifier(lengths, distance)
    visits = (Visit(Prompt(str(p), "", (1 + p,)), str(p)) for p in count())
    drawn = simulated_rounds(
        session, visits, Sampling(LIMIT), GENERATIONS, lambda number: rule, verifier
    )
    return [Figures.of(d, rule.is_long(d.planned), verifier) for d in islice(drawn, n)]


def row(
    name: str, drawn: Sequence[Figures], plain: Sequence[Figures], engines: Sequence[int]
) -> str:
    """Return a method and its speed relative to plain rounds as a Markdown row."""
    kinds = ([d.steps for d in drawn if d.long == long] for long in (False, True))
    tokens = sum(sum(d.lengths) for d in drawn)
    discarded = sum(d.discarded for d in drawn)
    drafts = sum((d.drafts for d in drawn), DraftAudit())
    trained = [length for d in drawn for length in d.trained]
    first = [attempt for d in drawn for attempt in d.first]
    figures: dict[str, float] = {
        "decode_steps": fmean(d.steps for d in drawn),
        "slot_steps": fmean(d.slot_steps for d in drawn),
        **{f"seconds, {n} engines": fmean(d.seconds_on(n) for d in drawn) for n in engines},
        "discarded_tokens": discarded / tokens,
        "draft_tokens": drafts.tokens,
        "accepted_draft_tokens": drafts.accepted_tokens,
        "trained_over_drawn_length": length_bias(trained, first),
    }
    results.add(name, figures)
    cells = [
        name,
        *(f"{fmean(steps):,.0f}" if steps else "" for steps in kinds),
        _beside([d.steps for d in drawn], [d.steps for d in plain], ",.0f"),
        *(
            _beside([d.seconds_on(n) for d in drawn], [d.seconds_on(n) for d in plain], ".1f")
            for n in engines
        ),
        f"{1 - discarded / tokens:.0%}",
        f"{drafts.accepted_tokens / drafts.tokens:.0%}" if drafts.tokens else "",
        f"{recovered(drawn):.0%}" if drafts.tokens else "",
        f"{figures['trained_over_drawn_length']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _beside(figures: Sequence[float], plain: Sequence[float], form: str) -> str:
    ratio = fmean(plain) / fmean(figures)
    return f"{fmean(figures):{form}}" + ("" if figures == plain else f" ({ratio:.2f}x)")


def recovered(drawn: Sequence[Figures]) -> float:
    """Return the share of otherwise discarded tokens that drafts keep."""
    kept = sum(d.drafts.accepted_tokens for d in drawn)
    return kept / (kept + sum(d.discarded for d in drawn))


def curve(prompts: int, shared: float, slots: int, n: int, distances: Sequence[float]) -> str:
    """Return accepted shares of drafts by their age and the distance of policies, as Markdown."""
    rules = methods(prompts)
    plain, waits, goes_on = (
        rules[name]
        for name in ("synchronous", "prompts race, drafts", "prompts race, 1.5, losers go on")
    )
    steps = fmean(d.steps for d in rounds(plain, shared, slots, n))
    lines = [
        "| distance a version | kept of a draft 1, 2, 3, 4 versions old | recovered of all waste |"
        " fewer decode steps | losers go on: recovered | fewer decode steps |",
        f"|{'---|' * 6}",
    ]
    for distance in distances:
        cells = [f"{distance}"]
        for rule in (waits, goes_on):
            drawn = rounds(rule, shared, slots, n, distance)
            if rule is waits:
                ages = [
                    sum((d.ages.get(age, DraftAudit()) for d in drawn), DraftAudit())
                    for age in range(1, 5)
                ]
                shares = (f"{a.accepted_tokens / max(1, a.tokens):.0%}" for a in ages)
                cells.append(" / ".join(shares))
            ratio = steps / fmean(d.steps for d in drawn)
            figures = {"recovered": recovered(drawn), "fewer_decode_steps": ratio}
            results.add(f"curve at {distance}, {'waits' if rule is waits else 'goes on'}", figures)
            cells += [f"{recovered(drawn):.0%}", f"{ratio:.2f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(
    prompts: int, shared: float, slots: int, n: int, distance: float, only: Sequence[str] = ()
) -> str:
    """Return all methods, or those whose name ends with one of `only`, as Markdown."""
    engines = sorted({prompts * GENERATIONS // PER_ENGINE, 1} - {0}, reverse=True)
    names = [
        *("", "decode steps of a short round", "of a long one", "mean"),
        *(f"seconds, {n} engine{'s' if n > 1 else ''}" for n in engines),
        *("useful tokens", "kept of drafts", "recovered of all waste", "trained over drawn length"),
    ]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    plain: list[Figures] = []
    for name, rule in methods(prompts).items():
        if plain and only and not name.endswith(tuple(only)):
            continue
        drawn = rounds(rule, shared, slots, n, distance)
        if not plain:
            plain = drawn
            spread = fmean(max(d.lengths) / median(d.lengths) for d in drawn)
            head = f"{prompts} prompts, {slots} slots, {shared:.0%} of the variance the prompt's"
            lines.insert(0, f"{head}; longest over median {spread:.0f}\n")
        lines.append(row(name, drawn, plain, engines))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = results.parser("tails", __doc__)
    parser.add_argument("--rounds", type=int, default=100, help="rounds per method")
    parser.add_argument("--prompts", type=int, default=128, help="prompts per round")
    parser.add_argument("--slots", type=int, nargs="+", default=[2048], help="numbers of slots")
    parser.add_argument(
        "--shared",
        type=float,
        nargs="+",
        default=[0.5, 0.0],
        help="shares of the variance of log lengths that are the prompt's",
    )
    parser.add_argument(
        "--distance",
        type=float,
        default=0.003,
        help="total variation distance of the next token between successive policies",
    )
    parser.add_argument(
        "--curve",
        type=float,
        nargs="+",
        help="print the accepted share of drafts at these distances instead of the tables",
    )
    parser.add_argument(
        "--only", nargs="+", default=(), help="methods whose name ends with one of these"
    )
    options = results.parse(parser, arguments)
    for slots in options.slots:
        for shared in options.shared:
            shape = options.prompts, shared, slots, options.rounds
            if options.curve:
                print(curve(*shape, options.curve), end="\n\n", flush=True)
            else:
                print(table(*shape, options.distance, options.only), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
