"""What traces say of a run: `simulate` refuses for it what `fit` does, and nothing else."""

import json
import re
from contextlib import suppress
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import look

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule, callbacks
from lit_rlsched.callbacks import RolloutLogger, TailBatching, what_if
from lit_rlsched.callbacks.what_if import ALTERNATIVES, beside, candidate, missing, options
from lit_rlsched.cli.simulate import facts_of, simulate
from lit_rlsched.engines import ProcessEngine, SimulatedEngine, TransformersEngine
from lit_rlsched.run.saving.traces import FACTS
from lit_rlsched.run.switches import class_names, make_schedule, recorded
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.workload import Length, Workload
from lit_rlsched.training.learner import PlainLearner
from lit_rlsched.training.schedule import RunFacts

OPTIONS = options(8)
CHOSEN = [*combinations(OPTIONS, 0), *combinations(OPTIONS, 1), *combinations(OPTIONS, 2)]


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0]


class Mine(GRPOModule):
    """As a user may have it: another obstacle."""

    def streaming_obstacle(self) -> str | None:
        return "mine needs the whole update"


MODULES = [
    lambda: GRPOModule("m"),
    lambda: GRPOModule("m", scale_rewards="batch"),
    lambda: GRPOModule("m", loss_type="bnpo"),
    lambda: GRPOModule("m", advantage="reinforce++"),
    lambda: GRPOModule("m", old_logprobs="engine"),
    lambda: RLOOModule("m"),
    lambda: RLOOModule("m", normalize_advantages=True),
    lambda: Mine("m"),
    PlainLearner,
]
OTHERS = [callbacks.DynamicSampling(), callbacks.ParallelismPlanner()]


@st.composite
def runs(draw: st.DrawFn) -> RunFacts:
    """Facts about a run: every field that a run of `fit` sets."""
    steps = draw(st.sampled_from([1, 2]))
    data = RolloutDataModule(
        [{"prompt": "1"}],
        reward,
        engine=draw(st.sampled_from([TransformersEngine, ProcessEngine, SimulatedEngine]))(),
        prompts_per_round=4,
        num_generations=draw(st.sampled_from([1, 2, 4])),
        steps_per_round=steps,
        num_iterations=draw(st.sampled_from([1, 3])),
        max_completion_length=draw(st.sampled_from([1, 64])),
        **draw(st.sampled_from([{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])),
        **draw(st.sampled_from([{}, {"tools": [look]}])),
    )
    module = draw(st.sampled_from(MODULES))()
    return RunFacts(
        data.run.settings,
        module,
        class_names(draw(st.lists(st.sampled_from(OTHERS), max_size=2))),
        module=getattr(module, "hparams", {}),
        automatic=draw(st.booleans()),
        ranks=draw(st.sampled_from([1, 2])),
        sharded=draw(st.sampled_from([None, "FSDP2Strategy"])),
        prompts=draw(st.sampled_from([None, 4, 7, 100])),
    )


def refusal(chosen: Any, facts: RunFacts) -> str | None:
    try:
        make_schedule([make(**arguments) for make, arguments in chosen], facts)
    except UsageError as error:
        return str(error)
    return None


def again(facts: RunFacts) -> RunFacts:
    """The facts as `simulate` has them, from the JSON of the traces."""
    of = facts.settings
    sizes = ("prompts_per_round", "num_generations", "steps_per_round", "num_iterations")
    about = {name: getattr(of, name) for name in sizes}
    about["max_completion_length"] = of.sampling.max_completion_length
    return facts_of(json.loads(json.dumps({**about, FACTS: recorded(facts)})))


@pytest.mark.filterwarnings("ignore")
@given(runs(), st.lists(st.sampled_from(CHOSEN), min_size=10, max_size=10))
@settings(max_examples=40)
def test_the_traces_of_a_run_refuse_what_the_run_refuses(facts, chosen):
    known = again(facts)
    for each in chosen:
        assert refusal(each, known) == refusal(each, facts)
    assert recorded(known) == json.loads(json.dumps(recorded(facts)))


def test_every_fact_is_recorded():
    """`trains` is always true: a trace is of a `fit`."""
    names = {field.name for field in fields(RunFacts)} - {"settings", "trains"}
    data = RolloutDataModule([{"prompt": "1"}], reward, engine=TransformersEngine())
    assert names <= recorded(RunFacts(data.run.settings)).keys()


@pytest.mark.filterwarnings("ignore")
@given(runs(), st.sampled_from(CHOSEN))
@settings(max_examples=60)
def test_a_candidate_is_what_the_run_allows_with_an_engine_beside_it(facts, chosen):
    """In place of the callbacks that decide its schedule, and beside its others."""
    own = replace(facts, callbacks=facts.callbacks | {"TailBatching"})
    engine: Any = facts.settings.engine
    apart = engine if isinstance(engine, ProcessEngine) else ProcessEngine(engine)
    fits = replace(facts, settings=replace(facts.settings, engine=apart))
    with suppress(UsageError):
        candidate(chosen, beside(again(own)))
        assert refusal(chosen, fits) is None


@pytest.mark.filterwarnings("ignore")
@given(runs())
def test_each_callback_has_a_row_or_a_reason(facts):
    rows = {c.name for c in what_if.candidates(beside(facts), most=1)}
    said = "\n".join(what_if.left_out(facts))
    known = [*map(what_if.written, options(facts.settings.num_generations))]
    assert [name for name in known if name not in rows] == [name for name in known if name in said]
    assert "DynamicSampling()" in said and all("): " in line for line in said.splitlines())


@pytest.mark.mostly_slow("module0-StreamedTraining")
@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ({"scale_rewards": "batch"}, "StreamedTraining"),
        ({"old_logprobs": "engine"}, None),
    ],
)
def test_the_traces_of_a_run_say_what_it_is(fit, tiny_model, tmp_path, module, refused):
    of_run = [TailBatching(), callbacks.AdaptiveTimeouts(), RolloutLogger(num_completions=0)]
    made = GRPOModule(tiny_model, learning_rate=1e-3, **module)
    _, _, data = fit(made, of_run, {"max_epochs": 3})
    facts = data.run.facts
    about = Traces(tmp_path).about
    assert about[FACTS] == json.loads(json.dumps(recorded(facts))) and facts.prompts == 80
    said = simulate(str(tmp_path), rounds=2, most_callbacks=1)
    table = said.partition("Rules of other")[0]
    assert ("  StreamedTraining()" in table) == (refused is None)
    assert re.search(r"TailBatching\(\)  \(this run: [\d.]+ s measured\)", table)
    assert "Simulated without the run's `AdaptiveTimeouts`." in said and "tools" not in said
    if "TailBatching" not in (best := said.partition("Recommended: ")[2].partition("\n")[0]):
        assert best and "# in place of the run's TailBatching: remove" in said


def test_what_a_simulation_leaves_out_is_said():
    def said(callbacks: list[str], tools: bool, *turns: int) -> list[str]:
        work: Any = Workload([[Length.of(5, turns, 1.0)]], [1], 9)
        about = {"callbacks": callbacks, FACTS: {"tools": tools}}
        return missing(what_if.Setting(about, work, *[Any] * 3))

    tools, others = said(["TailBatching", "DynamicSampling"], True)
    assert "without tools" in tools and "`DynamicSampling`" in others and "Tail" not in others
    assert said(["DynamicSampling"], True, 3, -2, 2) == [others]
    assert said(sorted(ALTERNATIVES), False) == []


def test_the_newest_rounds_are_simulated_in_another_order(tmp_path):
    """A run whose completions have become longer."""
    from written_traces import write_run

    traces = Traces(write_run(tmp_path, rounds=9))
    newest = traces.newest(2)
    for name in ("rounds", "completions", "spans", "intervals"):
        kept = [row for row in traces.rows(name) if row["round"] >= 8]
        assert newest.rows(name) == kept and kept != traces.rows(name)
    work = Workload.of_run(newest)
    shuffled = work.shuffled(0)
    assert sorted(shuffled.lengths) == sorted(work.lengths) and shuffled.lengths != work.lengths
    assert len(work.lengths) == 2 * 4
    assert traces.newest(99).rows("completions") == traces.rows("completions")
