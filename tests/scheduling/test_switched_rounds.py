"""Rules that take turns at random lose no prompt, and train on none twice."""

from collections import Counter
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.switched_rounds import SwitchedRound
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound
from lit_rlsched.simulation.decoder import Engines
from lit_rlsched.simulation.rounds import SimulatedRounds
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.types import Sampling

LIMIT, SIZE = 40, 2


def rules(update: int) -> list:
    return [
        FullRound(update),
        SortedRound(update, 4 * update, SIZE, mode="verified"),
        SortedRound(update, 4 * update, SIZE, mode="partial"),
        TailRound(update, SIZE, 1.25, reuse_drafts=True),
        DeferringTailRound(update, SIZE, 1.5, max_deferrals=3),
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.lists(st.lists(st.integers(1, LIMIT), min_size=SIZE, max_size=SIZE), min_size=70),
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=14),
    st.floats(0, 1),
)
def test_the_pool_and_its_drafts_survive_a_switch(update, slots, lengths, choices, accepted):
    work, rule = (
        Workload(lengths, [3] * len(lengths), LIMIT),
        SwitchedRound(dict(enumerate(rules(update)))),
    )
    drawn_prompts = []

    def visits():
        for visit in islice(work.visits(), len(lengths)):
            drawn_prompts.append(visit.key)
            yield visit

    engines = Engines(slots=slots)
    rounds = SimulatedRounds(
        visits(), work.length, engines, Sampling(LIMIT), SIZE, accepted=accepted
    )
    trained: Counter[str] = Counter()
    for version, (chosen, fills) in enumerate(choices):
        rule.chosen = chosen
        one = rounds.draw(rule, version, "cut" if fills else None)
        if len(drawn_prompts) < len(lengths):
            assert len(one.harvest.trained) >= update
        for group in one.harvest.trained:
            trained[group.id] += 1
            assert len(group.completions) == SIZE
            for completion in group.completions:
                assert completion.finished
                of = lengths[int(group.prompt.uid)][completion.index]
                assert len(completion.token_ids) == of
                if rule.max_staleness == 0:
                    assert {author for author, _ in completion.segments} == {version}
    left = {group.id for group in rounds.planner.pool}
    assert not left & trained.keys() and max(trained.values()) == 1
    assert left | trained.keys() == {*drawn_prompts}


def test_it_acts_as_the_rule_that_is_chosen():
    made = rules(2)
    rule = SwitchedRound(dict(enumerate(made)))
    for chosen, of in enumerate(made):
        rule.chosen = chosen
        assert (rule.max_staleness, rule.ends_early) == (of.max_staleness, of.ends_early)
        assert rule.patience == of.patience and rule.keeps_drafts and rule.off_policy
        assert rule.fresh_prompts([]) == max(2, of.fresh_prompts([]))
    assert rule.most_prompts() == max(of.most_prompts() for of in made) == 8
