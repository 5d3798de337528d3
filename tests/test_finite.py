"""Numbers that are not finite: dropped and counted, or the run stops before they reach a weight."""

from functools import partial

import pytest
import torch
from lightning import Callback
from lightning.pytorch.plugins import MixedPrecision
from plain_module import Plain
from seen_rounds import At, Rounds, vector

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.callbacks import (
    DownSampling,
    RolloutCallback,
)
from lit_rlsched.run.trainer import MicroBatchAccumulation

RLOO = partial(RLOOModule, beta=0.0, learning_rate=1e-3)
GRPO = partial(GRPOModule, learning_rate=1e-3)


def sometimes(value):
    """Huge for about one completion in six, else the share of digits."""

    def digits(prompts, completions, completion_ids, **kwargs):
        return [
            value if sum(ids) % 6 == 0 else sum(c.isdigit() for c in text) / max(1, len(text))
            for ids, text in zip(completion_ids, completions, strict=True)
        ]

    return digits


def constant():
    def bonus(prompts, completions, **kwargs):
        return [1.0] * len(completions)

    return bonus  # made here: a worker would import this file for one of its own


@pytest.mark.parametrize(
    ("module", "value"),
    [(RLOO, 1e38), (partial(GRPO, scale_rewards="none"), -1e200)],
)
def test_a_huge_reward_is_dropped_counted_and_blamed(fit, tiny_model, module, value):
    seen = Rounds()
    settings = {"reward_funcs": [constant(), sometimes(value)], "num_generations": 8}
    with pytest.warns(
        UserWarning, match=r"Reward function `digits` gave -?1e\+\d+, from which no finite"
    ):
        _, trained, data = fit(module(tiny_model), [seen], **settings)
    completions = [c for round in seen.rounds for c in round.completions]
    huge = [c for c in completions if abs(c.scores[1]) > 1]
    dropped = [c for c in completions if c.dropped]
    assert huge and {id(c) for c in huge} == {id(c) for c in dropped}  # and none of their siblings
    assert data.run.counters["dropped/nonfinite_advantage"] == len(huge)
    assert all(c.advantage == 0 for c in huge) and any(c.advantage for c in completions)
    assert vector(trained.model).isfinite().all()


@pytest.mark.parametrize("callbacks", [[], [DownSampling(2)]])
def test_a_weighted_sum_that_overflows_is_no_reward(fit, tiny_model, callbacks):
    seen = Rounds()
    settings = {"reward_funcs": [sometimes(1e308)], "reward_weights": [1e3]}
    with pytest.warns(UserWarning, match=r"Reward function `digits` gave 1e\+308"):
        _, trained, data = fit(GRPO(tiny_model), [seen, *callbacks], **settings)
    infinite = [c for r in seen.rounds for c in r.completions if c.scores[0] > 1]
    assert infinite and {c.dropped for c in infinite} == {"nonfinite_advantage"}
    assert data.run.counters["dropped/nonfinite_advantage"] == len(infinite)
    assert vector(trained.model).isfinite().all()


class Spoiled(GRPOModule):
    """Its loss is NaN from optimizer step 1 on."""

    def loss(self, batch):
        output = super().loss(batch)
        return output._replace(loss=output.loss * (torch.nan if self.trainer.global_step else 1))


class SpoiledPlain(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (torch.nan if self.trainer.global_step else 1)


def step_and_weights(trainer, pl_module, *_):
    return trainer.global_step, vector(pl_module)


class Stream(RolloutCallback):
    """Streams beside an engine in this process."""

    def setup(self, trainer, pl_module, stage):
        trainer.datamodule.run.schedule.streaming = 0.0


NOT_FINITE = r"gradient of optimizer step 1 is not finite \(norm nan, loss nan; round 2: rewards 0"


@pytest.mark.parametrize(
    ("make", "callbacks", "settings"),
    [
        (partial(Spoiled, gradient_clip_val=1.0), list, {}),
        (partial(Spoiled, gradient_clip_val=None), list, {}),
        (Spoiled, lambda: [Stream()], {"micro_batch_tokens": 64}),
        (SpoiledPlain, lambda: [MicroBatchAccumulation()], {}),
    ],
    ids=["clipped", "not clipped", "streamed", "automatic optimization"],
)
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step(
    fit, tiny_model, make, callbacks, settings
):
    module, after = make(tiny_model), At(step_and_weights, "on_train_batch_end")
    with pytest.raises(FloatingPointError, match=NOT_FINITE):
        fit(module, [*callbacks(), after], **settings)
    first = dict(after.seen)[1]
    assert torch.equal(vector(module), first) and first.isfinite().all()


def scaled_fp16(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    return MixedPrecision("16-mixed", "cpu", scaler)


@pytest.mark.parametrize("automatic", [False, True])
def test_a_grad_scaler_skips_steps_that_its_scale_made_infinite(fit, tiny_model, automatic):
    module, callbacks = (Plain(tiny_model), [MicroBatchAccumulation()]) if automatic else (None, [])
    precision = scaled_fp16(2.0**40)
    trainer = {"plugins": [precision], "max_epochs": 3}
    trainer, _, _ = fit(module, callbacks, trainer=trainer, verify_sync=False)
    assert trainer.global_step == 3
    assert precision.scaler.get_scale() < 2.0**40


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [False, True])
def test_a_grad_scaler_that_cannot_help_does_not_hide_it(fit, tiny_model, automatic):
    module = SpoiledPlain(tiny_model) if automatic else Spoiled(tiny_model)
    callbacks = [MicroBatchAccumulation()] if automatic else []
    trainer = {"plugins": [scaled_fp16(4.0)], "max_epochs": 9}
    with pytest.raises(FloatingPointError, match=r"optimizer step 4 is not finite \(norm nan"):
        fit(module, callbacks, trainer=trainer, verify_sync=False)


class Spoil(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch.no_grad():
            next(pl_module.model.parameters())[3, 3] = torch.inf


def test_weights_that_are_not_finite_are_not_blamed_on_the_engine(fit):
    message = r"trainer's weights are not finite: 1 tensors hold NaN or infinity, the first is `mod"
    with pytest.raises(FloatingPointError, match=message):
        fit(callbacks=[Spoil()])
