import pytest

from lit_rlsched.data.source import DomainSource
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.types import Prompt, Sampling

PROMPTS = [Prompt(f"{d}{i}", "?", (1,), {"domain": d}) for i in range(3) for d in "xy"]


class Domains(FullRound):
    """One of each domain, two completions more than are trained on."""

    def draws(self, pool):
        return [(domain, 1) for domain in "xy"] if not pool else []

    def domain_of(self, prompt):
        return prompt.columns["domain"]

    def launched(self, num_generations):
        return num_generations + 2


def pool_of(rule, prompts=PROMPTS):
    pool = Pool(Sampling(8), 2)
    pool.connect(DomainSource(prompts, 0, False, rule.domain_of))
    return pool


def ended(plan):
    return RoundResult(plan, [], [], [], [])


def uids(groups):
    return [group.prompt.uid for group in groups]


def test_a_plan_is_of_the_pool_and_then_of_the_data():
    pool, rule = pool_of(Domains(2)), Domains(2)
    plan = pool.plan(rule)
    assert uids(plan) == uids(pool) == ["x0", "y0"]
    assert [c.index for c in plan[0].completions] == [0, 1, 2, 3]
    assert uids(pool.plan(rule)) == ["x0", "y0"]
    pool.commit(ended(plan), rule)
    assert uids(pool.plan(rule)) == ["x1", "y1"]


def test_a_replacement_is_of_the_same_domain_until_all_of_it_is_in_the_pool():
    pool, rule = pool_of(Domains(2)), Domains(2)
    plan = pool.plan(rule)
    for expected in ("y1", "y2"):
        other = pool.replacement(plan[1], plan, rule)
        plan.append(other)
        assert other.prompt.uid == expected
        assert all(group is not other for group in pool)
    assert pool.replacement(plan[1], plan, rule) is None
    assert uids(pool) == ["x0", "y0", "y1", "y2"]


def test_what_an_earlier_round_had_drawn_comes_before_the_data():
    pool, rule = pool_of(Domains(2)), Domains(2)
    plan = pool.plan(rule)
    pool.replacement(plan[0], plan, rule)  # of a round that was cut short
    again = pool.plan(rule)[:2]
    assert pool.replacement(again[0], again, rule).prompt.uid == "x1"
    assert len(pool) == 3


@pytest.mark.parametrize("late", [False, True])
def test_what_was_put_off_is_replaced_by_what_was(late):
    pool, rule = pool_of(Domains(2)), Domains(2)
    plan = pool.plan(rule)
    plan[0].deferred = int(late)
    waiting = list(pool)[1]
    waiting.deferred = 1
    expected = "y0" if late else "x1"  # of whatever domain, where it waited
    assert pool.replacement(plan[0], plan[:1], rule).prompt.uid == expected


def test_a_source_of_the_same_domains_goes_on_where_it_was():
    pool, rule = pool_of(FullRound(2)), FullRound(2)
    pool.commit(ended(pool.plan(rule)), rule)
    pool.connect(DomainSource(PROMPTS, 0, False, rule.domain_of))
    assert uids(pool.plan(rule)) == ["x1", "y1"]
    pool.connect(DomainSource(PROMPTS, 0, False, Domains(2).domain_of))
    assert pool.source.sources.keys() == {"x", "y"}
