"""A run with draft tokens ends as one without, in fewer decode steps."""

from importlib.util import find_spec

import pytest
import torch
from seen_rounds import Rounds

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    MicroGroupSampling,
    Speculation,
    TailBatching,
)
from lit_rlsched.callbacks import speculation as callback
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.scheduling.step_times import StepTimes


class Junk:
    """Is never right: nothing else is drawn that often."""

    def propose(self, text, siblings, most):
        return [2] * most


class Broken:
    def propose(self, text, siblings, most):
        raise LookupError("no more")


def exact_run(fit, model, *callbacks, **data):
    """Train in float64, and return the module and what each round logged."""
    seen = Rounds()
    settings = {"temperature": 0.5, "max_completion_length": 40, **data}
    callbacks = [*callbacks, seen]
    trainer = {"precision": "64-true", "max_epochs": 3}
    module = GRPOModule(model, learning_rate=1e-3)
    return fit(module, callbacks, trainer, **settings)[1], seen


SCHEDULES = {
    "plain": [],
    "slots": [MicroGroupSampling(slots=5)],
    "turns": [MicroGroupSampling(slots=5, order="least_attained")],
    "budget": [MicroGroupSampling(memory_budget="60KiB")],
}


@pytest.mark.mostly_slow("slots")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_ends_in_the_same_weights(fit, exact_model, schedule):
    plain, before = exact_run(fit, exact_model, *SCHEDULES[schedule])
    module, after = exact_run(fit, exact_model, *SCHEDULES[schedule], Speculation(4, 16))
    assert after.drawn == before.drawn
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=0, atol=1e-10)
    saved = [m["speculation/steps_saved"] for m in after.metrics]
    assert min(saved) >= 0 and sum(saved) > 0
    for old, new in zip(before.metrics, after.metrics, strict=True):
        if schedule in ("plain", "slots"):  # without pauses the order is known
            steps = new["rollout/decode_steps"] + new["speculation/steps_saved"]
            assert steps == old["rollout/decode_steps"]
        assert new["rollout/steps_over_lower_bound"] >= 1
        assert new["speculation/trained_over_drawn_speed"] == pytest.approx(1)


@pytest.mark.slow
def test_in_a_process_that_runs_ahead(fit, exact_model):
    runs = [
        exact_run(
            fit,
            exact_model,
            *callbacks,
            engine=ProcessEngine(TransformersEngine()),
        )
        for callbacks in ([], [Speculation(4, 16)])
    ]
    (plain, before), (module, after) = runs
    assert after.drawn == before.drawn
    # an engine of its own computes in float32, and its log-probs weigh the tokens
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=0, atol=2e-5)
    assert all(m["speculation/acceptance"] > 0 for m in after.metrics)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("apart", [False, True], ids=["here", "process"])
def test_a_run_with_vllm_draws_the_same(fit, tiny_model, apart):
    drawn = []
    for callbacks in ([], [Speculation(4, 6)]):
        seen, engine = Rounds(), VLLMEngine()
        fit(
            GRPOModule(tiny_model, learning_rate=1e-3),
            [*callbacks, MicroGroupSampling(slots=6), seen],
            {"max_epochs": 3},
            engine=ProcessEngine(engine) if apart else engine,
            temperature=0.5,
            max_completion_length=40,
        )
        drawn.append(seen.drawn)
        assert all(m.get("speculation/acceptance", 1) > 0 for m in seen.metrics)
    assert seen.metrics[0]["speculation/steps_saved"] > 0
    assert drawn[0] == drawn[1]


def test_what_a_round_logs(fit, tiny_model):
    seen = Rounds()
    fit(callbacks=[Speculation(3, 16), seen], temperature=0.3)
    for metrics in seen.metrics:
        found = {k.removeprefix("speculation/"): v for k, v in metrics.items() if "specul" in k}
        steps = metrics["rollout/decode_steps"]
        assert 0 < found["acceptance"] < 1
        assert 1 < found["tokens_per_row_step"] < 4
        assert found["steps"] <= steps <= steps + found["steps_saved"] <= 24
        assert found["drafter_failures"] == 0
        accepted = found["acceptance"] * found["proposed"]
        rows = accepted / (found["tokens_per_row_step"] - 1)
        assert found["positions_per_token"] == pytest.approx(
            (rows + found["proposed"]) / (rows + accepted)
        )


def test_without_the_callback_nothing_is_drafted(fit):
    seen = Rounds()
    fit(callbacks=[seen])
    assert not any("speculation" in name for m in seen.metrics for name in m)


def test_with_races_it_says_which_completions_are_favoured(fit):
    seen = Rounds()
    fit(callbacks=[Speculation(3, 64), TailBatching(prompt_ratio=1.5), seen], temperature=0.3)
    assert all(m["speculation/trained_over_drawn_speed"] > 0 for m in seen.metrics)


@pytest.mark.parametrize("saved", [-0.75, 0.75])
def test_a_run_that_it_slows_down_is_told_so_once(fit, monkeypatch, saved, recwarn):
    monkeypatch.setattr(callback, "ROUNDS", 2)
    monkeypatch.setattr(StepTimes, "fit", lambda trace: StepTimes(1.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(StepTimes, "saved", lambda times, trace: saved)
    seen = Rounds()
    fit(callbacks=[Speculation(3, 16), seen], trainer={"max_epochs": 4}, temperature=0.3)
    assert [m["speculation/seconds_saved"] for m in seen.metrics] == [saved] * 4
    told = [str(w.message) for w in recwarn if "costs more than it saves" in str(w.message)]
    assert len(told) == (saved < 0)
    assert all("2 rounds took 1.5 s longer" in text for text in told)


def test_a_drafter_that_fails_is_counted_and_told_of_once(fit):
    seen = Rounds()
    broken = Speculation(3, 16, f"{__name__}.Broken")
    with pytest.warns(UserWarning, match=r"Broken.*LookupError: no more") as caught:
        fit(callbacks=[broken, seen])
    assert sum("LookupError" in str(w.message) for w in caught) == 1
    for metrics in seen.metrics:
        assert metrics["speculation/drafter_failures"] > 0
        assert "speculation/acceptance" not in metrics
