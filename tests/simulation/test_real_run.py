"""Runs of a real engine, and their simulation from the traces that they leave."""

import pytest

from lit_rlsched.callbacks import MicroGroupSampling, RolloutLogger
from lit_rlsched.cli.simulate import DEFAULTS, facts_of, simulate
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.costs import calibrated
from lit_rlsched.simulation.pipeline import Machine, Pipeline
from lit_rlsched.simulation.workload import Workload

SIZES = {"prompts_per_round": 4, "num_generations": 4, "max_completion_length": 24}


@pytest.mark.mostly_slow("callbacks1")
@pytest.mark.parametrize(
    "callbacks",
    [
        [],
        [(MicroGroupSampling, {"slots": 3})],
        [(MicroGroupSampling, {"slots": 6, "refill": "rounds"})],
    ],
)
def test_the_counts_of_each_round_are_those_of_the_run(fit, tmp_path, callbacks):
    made = [make(**arguments) for make, arguments in callbacks]
    trainer, *_ = fit(callbacks=[*made, RolloutLogger(num_completions=0)])
    traces = Traces(tmp_path)
    measured = [dict(row["metrics"]) for row in traces.rows("rounds")]
    schedule = make_schedule(made, facts_of({**DEFAULTS, **SIZES}))
    pipeline = Pipeline(schedule, Workload.of_run(traces), calibrated(traces), Machine(16), 4)
    rounds = pipeline.run(len(measured)).rounds
    assert len(rounds) == 2 and trainer.global_step == 2
    for ours, metrics in zip(rounds, measured, strict=True):
        for name in ("decode_steps", "slot_steps", "idle_slot_steps"):
            assert getattr(ours, name) == metrics[f"rollout/{name}"]
        assert ours.trained_tokens == metrics["rollout/tokens"]
    said = simulate(str(tmp_path), most_callbacks=1, rounds=2)
    assert "Decode step: seconds off by" in said and "Measured: " in said
    said = simulate(str(tmp_path), most_callbacks=1, rounds=2, gpu="h100", parameters=1e9)
    assert "costs computed for 1e+09 parameters" in said and "Measured: " not in said


@pytest.mark.slow
def test_a_resumed_run_has_the_traces_of_one_that_was_not_stopped(fit, tmp_path):
    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    fit(callbacks=[RolloutLogger()], trainer={"max_epochs": 3, "default_root_dir": whole})
    more = {"max_epochs": 2, "default_root_dir": folder}
    trainer, *_ = fit(callbacks=[RolloutLogger()], trainer=more)
    first = folder / "one.ckpt"
    trainer.save_checkpoint(first)
    fit(
        callbacks=[RolloutLogger()],
        trainer={"max_epochs": 3, "default_root_dir": folder},
        ckpt_path=first,
    )
    for name in ("completions", "spans"):
        ours, theirs = Traces(folder).rows(name), Traces(whole).rows(name)
        timed = {"reward_seconds", "start", "end"}
        for rows in (ours, theirs):
            for row in rows:
                for column in timed & row.keys():
                    del row[column]
        assert ours == theirs
    laps = {row["round"] for row in Traces(folder).rows("intervals")}
    assert laps == {1, 2, 3, 4}  # the last has the last update
