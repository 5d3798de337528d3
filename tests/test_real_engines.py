"""What is counted on real engines is what the simulation counts."""

from importlib.util import find_spec

import pytest

from benchmarks.real_engines import (
    GivenLengths,
    differences,
    draw_all,
    lengths_of,
    shapes,
    simulated_pool,
)
from lit_rlsched.engines.pool import EnginePool

SHAPES = shapes(256, 1 / 8)
LENGTHS = lengths_of(SHAPES, [0])


@pytest.fixture(scope="module")
def simulated(tiny_model):
    return draw_all(simulated_pool(LENGTHS, 2), tiny_model, SHAPES, [0])


def test_schedules_train_on_the_same_tokens(simulated):
    for shape in SHAPES:
        plain, *others = (simulated[shape.name, name][0].counts for name in shape.schedules)
        assert plain.tokens == plain.trained == plain.busy and plain.discarded == plain.kept == 0
        for counts in others:
            assert counts.rounds <= plain.rounds and counts.busiest < plain.busiest
            assert counts.tokens == counts.trained + counts.discarded
            assert counts.discarded or counts.kept
    trained = {name: drawn[0].counts.trained for name, drawn in simulated.items()}
    assert len({trained["SortedRL", name] for name in SHAPES[0].schedules}) == 1
    assert trained["RollPacker", "plain"] == trained["RollPacker", "prompts race"]
    assert trained["RollPacker", "plain"] > trained["RollPacker", "completions race as well"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_two_real_engines_count_what_simulated_ones_count(simulated, tiny_model):
    real = draw_all(EnginePool.of(GivenLengths(LENGTHS), 2), tiny_model, SHAPES, [0])
    assert {name: differences(real[name], simulated[name]) for name in simulated} == dict.fromkeys(
        simulated, "the same"
    )
