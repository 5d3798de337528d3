from itertools import groupby

from benchmarks.parallelism import (
    GPUS,
    MEDIANS,
    PHASES,
    PROMPTS,
    capacity,
    draw_round,
    fresh_prompts,
    restarts,
    simulate,
    table,
)
from lit_rlsched.scheduling.rollpacker import TensorParallelPlanner


def test_a_larger_size_has_more_cache_and_preempts_less():
    room = [capacity(size) * GPUS // size for size in (1, 2, 4, 8)]
    assert room == sorted(set(room))
    prompts = fresh_prompts(0, median=4000)
    preempted = [draw_round(prompts, PROMPTS, size)[0] for size in (1, 2, 4, 8)]
    assert preempted == sorted(set(preempted), reverse=True)


def test_a_round_ends_with_the_prompts_it_needs():
    prompts = fresh_prompts(3, median=500)
    preempted, done = draw_round(prompts, PROMPTS, 1)
    assert preempted == 0 and len(set(done)) == PROMPTS
    longest = [max(prompt) for prompt in prompts]
    late = [n for i, n in enumerate(longest) if i not in done]
    assert min(late) > max(longest[i] for i in done) - 256, "in chunks of 256 tokens"


def test_the_planner_settles():
    rounds = simulate(TensorParallelPlanner(size=1, maximum=GPUS), MEDIANS)
    fixed = simulate(TensorParallelPlanner(size=1, maximum=1), MEDIANS)
    assert [r.kind for r in rounds] == [r.kind for r in fixed]
    assert [r.kind == "long" for r in rounds] == [i % 5 == 4 for i in range(len(rounds))]
    assert sum(r.preemptions for r in rounds) < 0.9 * sum(r.preemptions for r in fixed)
    short = [r.size for r in rounds if r.kind == "short"]
    assert [size for size, _ in groupby(short)] == [1, 2, 4, 8, 4, 2, 1]
    assert restarts(rounds) > 0 == restarts(fixed)
    assert len(table(rounds, fixed).splitlines()) == 2 + 2 * len(PHASES)
