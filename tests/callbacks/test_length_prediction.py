import math
import warnings

import pytest
import torch
from lightning import Trainer
from seen_rounds import Rounds, vector

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    LengthPrediction,
    MicroGroupSampling,
    RolloutLogger,
    SortedBatching,
)
from lit_rlsched.scheduling.length_prediction import PromptHistory
from lit_rlsched.scheduling.recorded_lengths import Oracle


def drawn(fit, *callbacks, **settings):
    seen = Rounds()
    settings = {"trainer": {"precision": "64-true", "max_epochs": 3}, **settings}
    _, module, _ = fit(callbacks=[seen, *callbacks], **settings)
    return seen.rounds, vector(module)


class Nonsense(PromptHistory):
    """Predicts what is not a length."""

    def predict(self, rows):
        return [[math.nan, -3.0, -math.inf][i % 3] for i in range(len(rows))]


@pytest.mark.mostly_slow("5-PromptHistory")
@pytest.mark.parametrize("predictor", [None, PromptHistory, Nonsense])
@pytest.mark.parametrize("probe_tokens", [0, 5])
def test_predictions_change_nothing_that_is_learned(fit, predictor, probe_tokens):
    plain, reference = drawn(fit)
    prediction = LengthPrediction(predictor and predictor(), probe_tokens)
    rounds, weights = drawn(fit, MicroGroupSampling(slots=3), prediction)
    for a, b in zip(rounds, plain, strict=True):
        assert [c.token_ids for c in a.completions] == [c.token_ids for c in b.completions]
        assert [c.advantage for c in a.completions] == [c.advantage for c in b.completions]
        assert a.metrics["rollout/peak_running"] == 3
    torch.testing.assert_close(weights, reference, rtol=0, atol=1e-9)


def test_calibration_is_logged_each_round(fit):
    rounds, _ = drawn(fit, MicroGroupSampling(slots=3), LengthPrediction(probe_tokens=5))
    for round in rounds:
        assert round.metrics["length_prediction/mae"] >= 0
        assert -1 <= round.metrics["length_prediction/rank_correlation"] <= 1
    probed = sum(len(c.token_ids) > 5 for c in rounds[0].completions)
    assert rounds[0].metrics["rollout/pauses"] == probed > 0


def test_a_checkpoint_of_another_predictor(fit, tiny_model, tmp_path):
    trainer, _, datamodule = fit(callbacks=[LengthPrediction()], trainer={"max_epochs": 1})
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.warns(UserWarning, match=r"of a `TokenConditioned`.*PromptHistory.*untrained"):
        fit(callbacks=[LengthPrediction(PromptHistory())], ckpt_path=tmp_path / "one.ckpt")
    validator = Trainer(accelerator="cpu", callbacks=[LengthPrediction()], logger=False)
    datamodule.run.settings.data["val"] = datamodule.run.settings.data["train"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*starts untrained.*")
        validator.validate(GRPOModule(tiny_model), datamodule, tmp_path / "one.ckpt")


def test_nothing_pauses_where_all_run_at_once(fit):
    rounds, _ = drawn(fit, LengthPrediction(probe_tokens=5))
    assert [r.metrics["rollout/pauses"] for r in rounds] == [0, 0, 0]
    assert rounds[-1].metrics["length_prediction/mae"] > 0


@pytest.mark.slow
def test_validation_is_neither_predicted_nor_learned_from(fit, sums):
    prediction = LengthPrediction(PromptHistory(), probe_tokens=5)
    rounds, _ = drawn(
        fit,
        MicroGroupSampling(slots=3),
        prediction,
        val_data=sums[80:],
        trainer={"num_sanity_val_steps": -1, "max_epochs": 1},
    )
    plain = LengthPrediction(PromptHistory(), probe_tokens=5)
    drawn(fit, MicroGroupSampling(slots=3), plain, trainer={"max_epochs": 1})
    assert str(prediction.state_dict()) == str(plain.state_dict())
    assert len(rounds) == 1


@pytest.mark.slow
def test_an_oracle_replays_a_run(fit, tmp_path):
    setting = {"trainer": {"default_root_dir": tmp_path, "max_epochs": 2, "precision": "64-true"}}
    plain, _ = drawn(fit, RolloutLogger(), **setting)
    traces = next(tmp_path.glob("**/traces"))
    oracle = LengthPrediction(Oracle(str(traces)), 0)
    slots = MicroGroupSampling(slots=3, order="planned")
    rounds, _ = drawn(fit, slots, oracle, **setting)
    for a, b in zip(rounds, plain, strict=True):
        assert [c.token_ids for c in a.completions] == [c.token_ids for c in b.completions]
        assert a.metrics["length_prediction/mae"] == 0
        assert a.metrics["length_prediction/rank_correlation"] == pytest.approx(1)
        assert a.metrics["rollout/steps_over_lower_bound"] < 1.1


class Spy(PromptHistory):
    """Keeps the lengths it learns from."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def observe(self, rows):
        self.lengths += [len(row.completion.token_ids) for row in rows]
        super().observe(rows)


def test_what_is_thrown_away_is_learned_from_at_its_length(fit):
    spy = Spy()
    callbacks = [SortedBatching(pool_rounds=3), LengthPrediction(spy), MicroGroupSampling(slots=9)]
    _, _, data = fit(callbacks=callbacks, trainer={"max_epochs": 3})
    assert len(spy.lengths) > data.run.counters["num_completions"] == 48
    assert min(spy.lengths) > 0
