"""Bias of the expected gradient under each schedule, summed exactly over all that may happen.

    python -m benchmarks run bias

Two prompts, a vocabulary of EOS and two other tokens, at most 3 tokens, and a policy that is a
table of logits: a prompt has 15 possible completions. One prompt's completions are short, the
other's long. A second task has three prompts, with at most 2 tokens and so 7 completions each;
updates there have one prompt, and the data begin with each of them equally often. The reward is 1
if a completion has the token 2, so that longer completions have it more often. Rules, rollout loop,
verification, selection, advantages and loss are the package's, the engine is simulated. Where a
round ends early an update has one prompt and a pool two; where completions are selected an update
has one prompt; else it has both. Advantages are relative to the others' mean (`leave_one_out`), and
the loss is `dr_grpo`, which divides by constants, so that full rounds give the gradient of the mean
reward without bias.

The bias is the distance between the expected gradient and that of the mean reward of all prompts
under the same policy, over the norm of the latter; the cosine is that of their angle. `an update`:
the last one of a pool. `a pool`: all of its updates, each weighted by its completions. `policy
moves`: the last update of a pool, if each update moves the distribution of the next token by a mean
total variation distance of `--distance`, in the direction of the gradient.

The last table shows how far verified completions are from draws of the verifying policy if the
engine that drew the drafts computes other log-probs than the trainer: its logits have normal noise.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain, combinations, product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import results, tabular
from benchmarks.bias_cases import LIMITS, VOCAB, Cases, Policy, Schedule, Trained, World
from benchmarks.bias_cases import reward as reward_of
from benchmarks.tabular import Tokens
from lit_rlsched.callbacks import DynamicSampling
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.training.advantages import leave_one_out
from lit_rlsched.training.losses import policy_loss
from lit_rlsched.training.round import Round
from lit_rlsched.training.selection import Selection
from lit_rlsched.types import Completion, Group, Prompt, Sampling

G = 2
EACH = ((0,), (1,))
CYCLES = ((0, 1, 2), (1, 2, 0), (2, 0, 1))
DRAWN = tuple(product((0, 1), repeat=4))


def _full(update: int = 2, **settings: Any) -> Schedule:
    return Schedule(lambda: FullRound(update), **settings)


def _sorted(mode: Any, **settings: Any) -> Schedule:
    return Schedule(lambda: SortedRound(1, 2, G, mode=mode), sees="length", **settings)


def _tail(ratio: float = 2.0, completions: float = 1.0, **settings: Any) -> Schedule:
    return Schedule(lambda: TailRound(1, G, ratio, completions, **settings), sees="length")


def _window(prompts: int, overtakes: int, slots: int) -> Schedule:
    rule = partial(WindowRound, 1, prompts, overtakes)
    return Schedule(rule, "length", slots=slots, prompts=3, runs=CYCLES)


def _selected(rule: Any, early: bool = False, **settings: Any) -> Schedule:
    selection = Selection(2, rule, reward_range=(0.0, 1.0) if early else None, **settings)
    sees = "both" if early else "nothing"
    return _full(1, sees=sees, generations=4, selection=selection, runs=EACH)


SCHEDULES = {
    "full rounds": _full(),
    "`MicroGroupSampling` (one slot)": _full(sees="length", slots=1),
    '`SortedBatching(mode="on_policy")`': _sorted("on_policy"),
    '`SortedBatching(mode="partial")`': _sorted("partial"),
    "`TailBatching`": _tail(),
    "`TailBatching(completion_ratio=1.5)`": _tail(completions=1.5),
    "`RolloutWindow(2)` (three slots)": Schedule(
        lambda: WindowRound(1, 2, 0), "length", slots=3, runs=((0, 1), (1, 0))
    ),
    "`RolloutWindow(2, overtake=1)`": Schedule(lambda: WindowRound(1, 2, 1), "length"),
    '`AsyncRollout(1, 2, "wait")`': _full(ahead=True),
    '... `old_logprobs="trainer"`, `"token_truncate"`': _full(
        ahead=True, loss=(("importance_sampling_mode", "token_truncate"),)
    ),
    '... `old_logprobs="trainer"`, `"sequence_truncate"`': _full(
        ahead=True, loss=(("importance_sampling_mode", "sequence_truncate"),)
    ),
    '`AsyncRollout(2, too_old="wait")`': Schedule(
        lambda: WindowRound(1, 2, 1, 9, None), "length", ahead=True
    ),
    '`DownSampling(rule="random")`': _selected("random", drop_uninformative=False),
    '`DownSampling(rule="max_variance")`': _selected("max_variance"),
    '... `advantage_scope="full"`': _selected("max_variance", full_scope=True),
    "... `early_stop=True`": _selected("max_variance", early=True),
    '`DownSampling(rule="percentile")`': _selected("percentile"),
    '`DownSampling(rule="max_reward")`': _selected("max_reward"),
    "`DynamicSampling`": _full(
        1, sees="reward", replacement=DynamicSampling(), runs=DRAWN, rounds=1
    ),
    "`PromptBudget(pilot=2)` of four": _full(1, sees="reward", generations=4, pilot=2, runs=EACH),
    "three prompts, full rounds": _full(1, prompts=3, runs=CYCLES),
    "three prompts, `RolloutWindow(2)` (three slots)": _window(2, 0, 3),
    "three prompts, `RolloutWindow(3)` (four slots)": _window(3, 0, 4),
    "three prompts, `RolloutWindow(3, overtake=1)`": _window(3, 1, 6),
    "three prompts, `RolloutWindow(3, overtake=2)`": _window(3, 2, 6),
}

Key = tuple[int, Tokens, tuple[tuple[int, int], ...], bool]
Rows = dict[Key, float]
"""Expected advantages of completions by prompt, tokens, spans of earlier policies, and sign."""
Rewards = tuple[tuple[float, ...], ...]
"""By group and completion."""


@cache
def advantages(rewards: Rewards, schedule: Schedule) -> list[tuple[float, list[list[float]]]]:
    """Return what the update makes of rewards, with its probability; NaN where it drops one."""
    found = []
    for probability, kept in _kept(rewards, schedule.selection):
        seen = torch.tensor(
            [
                [r if i in chosen else math.nan for i, r in enumerate(row)]
                for row, chosen in zip(rewards, kept, strict=True)
            ],
            dtype=torch.float64,
        )
        whole = schedule.selection is not None and schedule.selection.full_scope
        values = leave_one_out(torch.tensor(rewards, dtype=torch.float64) if whole else seen)
        found.append((probability, values.masked_fill(seen.isnan(), math.nan).tolist()))
    return found


def _kept(rewards: Rewards, selection: Selection | None) -> list[tuple[float, list[set[int]]]]:
    """Indices that are trained on, by group."""
    if selection is None:
        return [(1.0, [set(range(len(row))) for row in rewards])]
    if selection.rule == "random":  # each subset is equally likely
        subsets = [set(s) for s in combinations(range(len(rewards[0])), selection.keep)]
        choices = list(product(subsets, repeat=len(rewards)))
        return [(1 / len(choices), list(choice)) for choice in choices]
    groups = [
        Group(
            f"{i}",
            Prompt(f"{i}", "", (0,)),
            Sampling(1),
            [Completion(j, scores=[r]) for j, r in enumerate(row)],
        )
        for i, row in enumerate(rewards)
    ]
    selection.select(Round(0, 0, groups), [1.0], True, 0)
    return [(1.0, [{c.index for c in g.completions if not c.dropped} for g in groups])]


def add(rows: Rows, update: Sequence[Trained], weight: float, schedule: Schedule) -> None:
    """Add the expected advantages of an update, over the number of completions trained on."""
    split = []
    for one in update:
        laws: dict[float, dict[Tokens, float]] = defaultdict(dict)
        for x, w in one.law.items():
            laws[reward_of(x)][x] = w
        totals = [(r, law, sum(law.values())) for r, law in laws.items()]
        split.append([of for of in totals if of[2] > 0])
    names = dict.fromkeys(one.group for one in update)
    places = [[i for i, one in enumerate(update) if one.group == name] for name in names]
    for outcome in product(*split):
        rewards = tuple(tuple(outcome[i][0] for i in group) for group in places)
        probability = weight * math.prod(total for *_, total in outcome)
        for chance, values in advantages(rewards, schedule):
            kept = sum(not math.isnan(a) for row in values for a in row)
            for i, a in zip(chain(*places), chain(*values), strict=True):
                if math.isnan(a) or not a:
                    continue
                _, law, total = outcome[i]
                for x, w in law.items():
                    key = update[i].prompt, x, update[i].spans, a > 0
                    share = probability * chance * a / kept * w / total
                    rows[key] = rows.get(key, 0.0) + share


def gradient(
    rows: Rows, policies: Sequence[Policy], version: int, schedule: Schedule
) -> np.ndarray:
    """Return the gradient with respect to the logits, by the package's loss.

    The loss is linear in advantages of one sign, so expected advantages give the expected gradient.
    """

    def of(number: int) -> Policy:
        return policies[min(number, len(policies) - 1)]

    logits, limit = of(version).logits.clone().requires_grad_(), of(version).limit
    place, table = {p: i for i, p in enumerate(of(version).open)}, logits.log_softmax(-1)
    mask, drew = torch.zeros(2, len(rows), limit, dtype=torch.float64)
    values = []
    for i, (prompt, tokens, spans, _) in enumerate(rows):
        versions = [v for v, n in spans for _ in range(n)] + [version] * len(tokens)
        values.append(table[prompt, [place[tokens[:k]] for k in range(len(tokens))], list(tokens)])
        for k, token in enumerate(tokens):
            mask[i, k], drew[i, k] = 1, of(versions[k]).tables[prompt][tokens[:k]][token]
    logp = torch.zeros_like(mask).index_put(mask.nonzero(as_tuple=True), torch.cat(values))
    settings = dict(schedule.loss)
    drawn_by = "rollout_logp" if "importance_sampling_mode" in settings else "old_logp"
    loss = policy_loss(
        logp,
        torch.tensor(list(rows.values()), dtype=torch.float64),
        mask,
        loss_type="dr_grpo",
        step_sequences=1,
        max_completion_length=limit,
        **{drawn_by: drew},
        **settings,
    ).loss
    (found,) = torch.autograd.grad(-limit * loss, logits)
    return found.flatten().numpy()


def mean_reward_gradient(policy: Policy) -> np.ndarray:
    """Return the gradient of the mean reward of all prompts."""
    logits = policy.logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for prompt, law in enumerate(policy.laws):
        rows = logits[prompt].log_softmax(-1)
        for x in law:
            at = [policy.open.index(x[:k]) for k in range(len(x))]
            total = total + reward_of(x) * rows[at, list(x)].sum().exp()
    (found,) = torch.autograd.grad(total / len(policy.laws), logits)
    return found.flatten().numpy()


class Updates(NamedTuple):
    """Expected gradients of the updates of a pool."""

    last: np.ndarray
    """Of its last update, if there are as many."""
    all: np.ndarray
    """Of all of them."""
    version: int
    """Of the policy of the last update."""


def expected(schedule: Schedule, policies: Sequence[Policy]) -> Updates:
    """Sum over everything that a schedule may do."""
    rows: dict[int, Rows] = defaultdict(dict)
    weighted: dict[int, Rows] = defaultdict(dict)
    chance: dict[int, float] = defaultdict(float)
    completions = 0.0
    for prompts in schedule.runs:
        for case in (cases := Cases()):
            rounds = list(World(schedule, case, policies).rounds(prompts))
            probability = cases.probability / len(schedule.runs)
            for number, update in enumerate(rounds):
                chance[number] += probability
                completions += probability * len(update)
                if update:
                    add(rows[number], update, probability, schedule)
                    add(weighted[number], update, probability * len(update), schedule)
    first, last = int(schedule.ahead), max(rows)
    parts = [gradient(of, policies, n + first, schedule) for n, of in weighted.items()]
    one = gradient(rows[last], policies, last + first, schedule) / chance[last]
    return Updates(one, np.sum(parts, axis=0) / completions, last + first)


def policies(distance: float, seed: int = 0, prompts: int = 2) -> list[Policy]:
    """Return three policies, each `distance` from the one before in the gradient's direction."""
    generator = torch.Generator().manual_seed(seed)
    shape = prompts, len(tabular.prefixes(VOCAB, LIMITS[prompts])), VOCAB
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    shorter = torch.linspace(0.7, -0.7, prompts, dtype=torch.float64)
    logits[:, :, tabular.EOS] += shorter.unsqueeze(1)
    found = [Policy(logits)]
    for _ in range(2):
        was = found[-1]
        step = torch.from_numpy(mean_reward_gradient(was)).reshape(was.logits.shape)
        low, high = 0.0, 1e3
        for _ in range(60):
            middle = (low + high) / 2
            far = _distance(was, Policy(was.logits + middle * step)) > distance
            low, high = (low, middle) if far else (middle, high)
        found.append(Policy(was.logits + low * step))
    return found


def _distance(one: Policy, other: Policy) -> float:
    """Mean over tokens of completions of all prompts."""
    tables = list(zip(one.tables, other.tables, strict=True))
    total = sum(sum(tabular.mean_distances(p, q, one.limit)) for p, q in tables)
    return total / sum(len(x) * w for law in one.laws for x, w in law.items())


def bias(found: np.ndarray, policy: Policy) -> float:
    """Return the relative distance from the gradient of the mean reward."""
    true = mean_reward_gradient(policy)
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def cosine(found: np.ndarray, policy: Policy) -> float:
    """Return the cosine of the angle to the gradient of the mean reward."""
    true = mean_reward_gradient(policy)
    return float(found @ true / np.linalg.norm(found) / np.linalg.norm(true))


def measure(schedule: Schedule, moving: Sequence[Policy]) -> dict[str, float]:
    """Return the figures of a schedule."""
    frozen, moves = expected(schedule, moving[:1]), expected(schedule, moving)
    newest = moving[min(moves.version, len(moving) - 1)]
    return {
        "bias of an update": bias(frozen.last, moving[0]),
        "its cosine": cosine(frozen.last, moving[0]),
        "bias of a pool": bias(frozen.all, moving[0]),
        "bias, policy moves": bias(moves.last, newest),
        "cosine, policy moves": cosine(moves.last, newest),
    }


def mismatch(noise: float, seeds: Sequence[int], limit: int = 4) -> dict[str, float]:
    """Return how far verified completions are from draws of the verifying policy, by distance."""
    rows = []
    for seed in seeds:
        q = tabular.random_policy(VOCAB, limit, 3 * seed, 1.0)
        p = tabular.moved(q, 3 * seed + 1, 0.3)
        engine = tabular.moved(q, 3 * seed + 2, noise)
        drawn, out = tabular.sequences(engine, limit), defaultdict[Tokens, float](float)
        for x, w in drawn.items():
            begun = tabular.verified(p, x, w, q, engine)
            for y, v in tabular.completed(p, begun, limit).items():
                out[y] += v
        rows.append(
            {
                "of a token": fmean(list(tabular.mean_distances(engine, q, limit))),
                "of draws, engine to trainer": tabular.distance(drawn, tabular.sequences(q, limit)),
                "of verified ones": tabular.distance(out, tabular.sequences(p, limit)),
                "bound": 1.5 * sum(tabular.mean_distances(engine, q, limit)),
            }
        )
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def _cell(name: str, value: float) -> str:
    if "cosine" in name:
        return f"{value:.3f}"
    return "0" if value < 1e-12 else f"{value:.1%}"


def _print(
    rows: dict[str, dict[str, float]], first: str, cell: Callable[[str, float], str]
) -> None:
    names = list(next(iter(rows.values())))
    print(f"| {' | '.join([first, *names])} |\n|{'---|' * (len(names) + 1)}")
    for row, figures in rows.items():
        results.add(row, figures)
        print(f"| {' | '.join([row, *(cell(n, v) for n, v in figures.items())])} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = results.parser("bias", __doc__)
    parser.add_argument("--distance", type=float, default=0.02, help="between two updates")
    parser.add_argument("--seed", type=int, default=0, help="of the policy")
    results.add_cases(parser, SCHEDULES)
    options = results.parse(parser, arguments)
    for prompts in LIMITS:
        moving = policies(options.distance, options.seed, prompts)
        cases = [name for name in options.cases if SCHEDULES[name].prompts == prompts]
        if cases:
            _print({name: measure(SCHEDULES[name], moving) for name in cases}, "", _cell)
            print()
    noises = {f"{noise:g}": mismatch(noise, range(10)) for noise in (1e-3, 1e-2, 0.05)}
    _print(noises, "noise of logits", lambda name, value: f"{value:.1e}")
