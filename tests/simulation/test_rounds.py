"""The simulation draws the same rounds as the round loop of `fit`, on engines of known lengths."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.in_flight_updates import WindowedRound
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound
from lit_rlsched.simulation.decoder import Engines, StepCosts
from lit_rlsched.simulation.loop import Visit, simulated_rounds, simulated_session
from lit_rlsched.simulation.rounds import SimulatedRounds, grow
from lit_rlsched.types import LengthOnly, Prompt, Sample, Sampling

RULES = {
    "full": lambda n, size: FullRound(n),
    "on policy": lambda n, size: SortedRound(n, 3 * n, size),
    "on policy, some": lambda n, size: SortedRound(n, 4 * n, size, oversubscribe=2),
    "single completions": lambda n, size: SortedRound(n, 3 * n, size, "completion"),
    "partial": lambda n, size: SortedRound(n, 3 * n, size, mode="partial"),
    "partial, stale": lambda n, size: SortedRound(n, 3 * n, size, "group", "partial", 1),
    "verified": lambda n, size: SortedRound(n, 3 * n, size, mode="verified"),
    "tail": lambda n, size: TailRound(n, size, 1.5),
    "tail, drafts": lambda n, size: TailRound(n, size, 1.5, reuse_drafts=True),
    "completions race": lambda n, size: TailRound(n, size, 1.5, 1.5),
    "deferred": lambda n, size: DeferringTailRound(n, size, 1.5, max_deferrals=2),
    "windowed": lambda n, size: WindowedRound(n, None, 2, 1),
    "verified when old": lambda n, size: WindowedRound(n, None, 1, 1, "verify"),
}
COSTS = StepCosts(0.5, 0.25, 0.0625, 2.0)  # sums of them are exact


class Accepts(RoundHooks):
    """Accepts drafts whole."""

    def __init__(self, lengths, drafts_next):
        self.lengths = lengths
        self.drafts_next = drafts_next

    def verify(self, groups, version):
        for group in groups:
            for completion in group.completions:
                if (draft := completion.draft) is not None:
                    completion.draft, tokens = None, len(draft.token_ids)
                    whole = tokens == self.lengths[Sample(group, completion).id]
                    grow(completion, tokens, version, whole)
        return DraftAudit()


def described(groups):
    return [
        (
            g.id,
            g.deferred,
            g.overtaken,
            [(c.index, len(c.token_ids), c.segments) for c in g.completions],
        )
        for g in groups
    ]


@st.composite
def cases(draw):
    size = draw(st.integers(1, 3))
    rule = draw(st.sampled_from([*RULES]))
    engines = draw(st.sampled_from([1, 1, 2, 3]))
    each = draw(st.integers(1, 12))
    limit = draw(st.sampled_from([12, 40, 90]))
    launched = 2 * size  # completions that race are more
    prompts = draw(
        st.lists(
            st.lists(st.integers(1, limit), min_size=launched, max_size=launched),
            min_size=1,
            max_size=24,
        )
    )
    contexts = draw(st.lists(st.integers(1, 9), min_size=len(prompts), max_size=len(prompts)))
    order = draw(st.sampled_from(["fifo", "fifo", "longest_first", "shortest_first"]))
    refill = draw(st.sampled_from(["continuous", "continuous", "rounds"]))
    drafts = draw(st.sampled_from([None, None, "cut"]))
    update = draw(st.integers(1, 4))
    return rule, size, engines, each, limit, prompts, contexts, order, refill, drafts, update


def visits_of(prompts, contexts):
    for number, context in enumerate(contexts):
        yield Visit(Prompt(str(number), "", LengthOnly(context)), str(number))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_rounds_are_those_of_the_loop(case):
    check(*case)


@pytest.mark.parametrize("seed", range(60))
def test_several_engines_meet_and_move_as_in_the_loop(seed):
    """Few slots and long completions, so that requests wait over many windows."""
    chance = random.Random(seed)
    size, engines = chance.randint(1, 4), chance.randint(2, 4)
    lengths = [
        [min(400, round(60 * math.exp(chance.gauss(0, 1))) + 1) for _ in range(2 * size)]
        for _ in range(24)
    ]
    contexts = [chance.randint(1, 9) for _ in lengths]
    name, order = chance.choice([*RULES]), chance.choice(["fifo"])
    drafts = chance.choice([None, "cut"])
    check(
        name,
        size,
        engines,
        chance.randint(1, 4),
        400,
        lengths,
        contexts,
        order,
        "continuous",
        drafts,
        5,
    )


def check(name, size, engines, each, limit, prompts, contexts, order, refill, drafts, update):
    """Draw all rounds both ways."""
    lengths = {f"{p}/{c}": n for p, of in enumerate(prompts) for c, n in enumerate(of)}
    rule, sampling = RULES[name](update, size), Sampling(limit)

    def engine():
        costs = {
            "step_time_base": COSTS.base,
            "per_running": COSTS.running,
            "per_kv_token": COSTS.kv,
            "per_prefill_token": COSTS.prefill,
        }
        return SimulatedEngine(lengths=lengths, length_only=True, stream=False, **costs)

    made = engine() if engines == 1 else EnginePool([engine() for _ in range(engines)])
    predicted = order.endswith("first")
    predictor = CalibratedPredictor(Oracle(lengths)) if predicted else None
    session = simulated_session(
        made, engines * each, limit + 20, lambda: Admission(each, refill, order), predictor
    )
    expected = simulated_rounds(
        session,
        visits_of(prompts, contexts),
        sampling,
        size,
        lambda number: rule,
        Accepts(lengths, drafts),
    )
    fast = SimulatedRounds(
        visits_of(prompts, contexts),
        lambda sample: lengths[sample.id],
        Engines(engines, each, COSTS, order, refill),
        sampling,
        size,
        (lambda s: max(1.0, lengths[s.id] - len(s.completion.token_ids))) if predicted else None,
        order == "longest_first",
    )
    for number, loop in enumerate(expected):
        ours = fast.draw(rule, number, drafts)
        assert described(ours.planned) == described(loop.planned)
        assert described(ours.harvest.trained) == described(loop.harvest.trained)
        assert described(ours.harvest.left) == described(loop.harvest.left)
        for kind in ("ran", "unfinished", "stale", "stopped", "drafted"):
            assert getattr(ours.harvest, kind) == getattr(loop.harvest, kind)
        assert ours.turns == loop.trace.decode_steps
        assert ours.row_steps == loop.trace.busy_slot_steps
        assert ours.slot_steps == loop.trace.slot_steps
        assert ours.prefilled == loop.trace.total("prefill_tokens")
        if engines == 1:
            assert ours.seconds == loop.trace.seconds
    assert fast.draw(rule, number + 1, drafts) is None
