"""Streamed gradients are those of the update, whatever finished when."""

import random
import time
from functools import partial

import pytest
import torch
from seen_rounds import Rounds, vector

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.callbacks import (
    DownSampling,
    DynamicSampling,
    MicroGroupSampling,
    PromptBudget,
    RolloutWindow,
    SortedBatching,
    StreamedTraining,
    TailBatching,
)
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.scheduling.round_rule import FullRound

EXACT = {"precision": "64-true", "max_epochs": 3}
RAGGED = {
    "prompts_per_round": 8,
    "num_generations": 2,
    "max_completion_length": 48,
    "micro_batch_tokens": 56,
}
"""Groups end at different steps, and go into several micro-batches."""


def delayed(most, binary=False):
    """The share of digits, or whether there are many, told in any order."""

    def digits(prompts, completions, **kwargs):
        import random
        import time

        time.sleep(random.random() * most)
        shares = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
        return [float(share > 0.13) if binary else share for share in shares]

    return digits


class Stream(Rounds):
    """Streams beside an engine in this process: nothing overlaps, and all else is the same."""

    def __init__(self, start=0.0, policy=None):
        super().__init__()
        self.start, self.policy = start, policy

    def setup(self, trainer, pl_module, stage):
        trainer.datamodule.run.schedule.streaming = self.start
        if self.policy:
            trainer.datamodule.run.schedule.rule = self.policy

    def on_round_end(self, trainer, pl_module, round):
        super().on_round_end(trainer, pl_module, round)
        streamed = {row.group.id for part in round.accumulated for row in part.samples}
        assert streamed <= {group.id for group in round.groups}

    @property
    def parts(self):
        return [len(r.accumulated) for r in self.rounds]


class AnyOrder(FullRound):
    """Is certain of groups in an order of its own, which changes each time it is asked."""

    def __init__(self, prompts, seed):
        super().__init__(prompts)
        self.random = random.Random(seed)

    def final_groups(self, state):
        complete = [group for group in state.decoded if group.complete]
        return self.random.sample(complete, self.random.randint(0, len(complete)))


def check_same(module, plain):
    assert vector(module).dtype == torch.float64
    # AdamW makes rounding 1e5 times larger where the gradient is zero: of key biases
    torch.testing.assert_close(vector(module), vector(plain), rtol=0, atol=1e-10)


def check_streamed(fit, make, callbacks=list, **data):
    """Train without a stream and with one, to the same weights; return the stream and the data."""
    plain = fit(make(), callbacks(), EXACT, **RAGGED | data)[1]
    stream = Stream()
    _, streamed, trained = fit(make(), [*callbacks(), stream], EXACT, **RAGGED | data)
    check_same(streamed, plain)
    return stream, trained


@pytest.mark.mostly_slow("gspo")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "gspo", "cispo"])
def test_the_update_is_the_same_whatever_the_order(fit, exact_model, loss_type):
    def run(*callbacks, **data):
        module = GRPOModule(
            exact_model,
            learning_rate=1e-3,
            loss_type=loss_type,
            epsilon_high=5.0 if loss_type == "cispo" else None,
        )
        return fit(module, callbacks, EXACT, prompts_per_round=6, num_generations=3, **data)[1]

    plain = run()
    for seed in range(3):
        stream = Stream(policy=AnyOrder(6, seed))
        streamed = run(stream, micro_batch_tokens=[40, 80, 120][seed])
        assert any(stream.parts)
        check_same(streamed, plain)


SCHEDULES = {
    "tail": lambda: [TailBatching()],
    "completions race": lambda: [TailBatching(1.25, 1.25), MicroGroupSampling(slots=5)],
    "partial": lambda: [SortedBatching(2, mode="partial")],
    "down-sampling": lambda: [DownSampling(2)],
    "full scope": lambda: [DownSampling(2, advantage_scope="full")],
    "dynamic": lambda: [DynamicSampling()],
    "budget": lambda: [PromptBudget(2)],
    "window": lambda: [RolloutWindow()],
    "window overtaking": lambda: [RolloutWindow(overtake=1)],
    "early stop": lambda: [
        TailBatching(1.5),
        DownSampling(2, early_stop=True, reward_range=[0, 1], min_length_ratio=0),
    ],
}


@pytest.mark.mostly_slow("window")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_every_scheduler(fit, exact_model, schedule):
    early = schedule == "early stop"
    settings = {"reward_funcs": [delayed(0.02, early)], "reward_workers": 2}
    if schedule in ("budget", "early stop"):  # whose groups may end with two
        settings |= {"num_generations": 4}
    make = partial(GRPOModule, exact_model, learning_rate=1e-3)
    stream, data = check_streamed(fit, make, SCHEDULES[schedule], **settings)
    assert any(stream.parts)
    assert not early or data.run.counters["dropped/stopped"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "settings"),
    [(GRPOModule, {"loss_type": "gspo", "beta": 0.1}), (RLOOModule, {})],
    ids=["gspo", "rloo"],
)
def test_the_first_of_several_iterations_is_streamed(fit, exact_model, make, settings):
    made = partial(make, exact_model, learning_rate=1e-3, **settings)
    stream, _ = check_streamed(fit, made, num_iterations=3)
    assert all(stream.parts)


def test_the_metrics_are_those_of_the_update(fit, exact_model):
    logged = []
    for callbacks in ([], [Stream()]):
        module = GRPOModule(exact_model, learning_rate=1e-3)
        trainer, *_ = fit(module, callbacks, {**EXACT, "max_epochs": 1}, **RAGGED)
        logged.append({k: float(v) for k, v in trainer.logged_metrics.items()})
    plain, streamed = logged
    assert plain.keys() == streamed.keys() and {"loss", "grad_norm", "entropy"} < plain.keys()
    assert streamed == pytest.approx(plain, rel=1e-5, abs=1e-6)


@pytest.mark.mostly_slow("all")
@pytest.mark.parametrize("early", [False, True], ids=["all", "early stop"])
def test_when_scores_arrive_changes_nothing(fit, exact_model, early):
    """Not even a bit: what shares a micro-batch follows from what was decoded."""
    weights, parts = [], []
    selection = DownSampling(2, early_stop=True, reward_range=[0, 1], min_length_ratio=0)
    for delay in (0.0, 0.05, 0.05):
        stream = Stream(start=0.3)
        module = GRPOModule(exact_model, learning_rate=1e-3)
        _, module, data = fit(
            module,
            [stream, *([selection] if early else [])],
            reward_funcs=[delayed(delay, early)],
            reward_workers=2,
            **{**RAGGED, "num_generations": 4},
        )
        assert (data.run.counters["dropped/stopped"] > 0) == early
        weights.append(vector(module))
        parts.append([[[s.id for s in p.samples] for p in r.accumulated] for r in stream.rounds])
    assert any(parts[0]) and parts[0] == parts[1] == parts[2]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_gradients_of_before_are_forgotten(fit, exact_model):
    """Also by a module that keeps them at the start of a round, or whose run was interrupted."""

    class Keeps(GRPOModule):
        def on_round_start(self, plan):
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)

    stream, _ = check_streamed(fit, partial(Keeps, exact_model, learning_rate=1e-3))
    assert all(stream.parts)


@pytest.mark.slow
def test_gradients_are_computed_while_the_engine_decodes(fit, tiny_model):
    class Slow(TransformersEngine):
        """So slow that a gradient takes less than the tail."""

        def step(self):
            time.sleep(0.01)
            return super().step()

    seen, weights = Rounds(), []
    settings = {"max_completion_length": 160, "micro_batch_tokens": 168, "num_generations": 2}
    for callbacks, engine in (
        ([StreamedTraining(start=0), seen], ProcessEngine(Slow())),
        ([Stream()], TransformersEngine()),
    ):
        module = GRPOModule(tiny_model, learning_rate=1e-3)
        fit(module, [TailBatching(), *callbacks], engine=engine, **settings)
        weights.append(vector(module))
    assert torch.equal(*weights), "wherever the engine is"
    for round in seen.rounds:
        figures = {k: v for k, v in round.metrics.items() if k.startswith("streamed_training/")}
        assert 0 < figures["streamed_training/streamed_share"] <= 1
        assert figures["streamed_training/gradient_seconds"] > 0
        assert round.metrics["rollout/engine_restarts"] == 0
    assert sum(m["streamed_training/overlap_seconds"] for m in seen.metrics) > 0
