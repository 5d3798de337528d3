"""A window of prompts: free slots begin later ones, each round verifies what is old."""

import time
from collections import Counter

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from seen_rounds import At, Policies, Rounds, vector
from slow_parts import Sleepy, slowly

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    DownSampling,
    DynamicSampling,
    LengthPrediction,
    MicroGroupSampling,
    RolloutWindow,
    StreamedTraining,
)
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine


def run(fit, model, *callbacks, window=None, rate=1e-2, trainer=None, ckpt_path=None, **data):
    seen = Policies()
    _, module, datamodule = fit(
        GRPOModule(model, learning_rate=rate),
        [*callbacks, window or RolloutWindow(), seen],
        {"max_epochs": 5, **(trainer or {})},
        ckpt_path,
        **{"num_generations": 3, "prompts_per_round": 2, **data},
    )
    return seen, module, datamodule


@pytest.mark.mostly_slow("0-TransformersEngine")
@pytest.mark.parametrize("decoder", [TransformersEngine, VLLMEngine])
@pytest.mark.parametrize("overtake", [0, 1, 100])
def test_every_token_is_of_the_newest_policy(fit, tiny_model, overtake, decoder):
    pools = At(lambda trainer, *_: [g.copy() for g in trainer.datamodule.run.pool], "on_round_end")
    window = RolloutWindow(overtake=overtake)
    seen, _, data = run(fit, tiny_model, pools, window=window, engine=decoder(), steps_per_round=2)
    verified = 0
    for round in seen.rounds:
        assert len(round.groups) == 2
        for group, c in ((g, c) for g in round.groups for c in g.completions):
            assert c.segments == [(round.version, len(c.token_ids))] and not c.dropped
            assert max(seen.gaps(group, c)) < 1e-4
        verified += round.metrics.get("drafts/tokens", 0)
        assert "staleness/mean" not in round.metrics, "a rule without stale tokens"
    assert verified > 0 and any(r.metrics.get("drafts/accepted_tokens", 0) for r in seen.rounds)
    # one version has tokens in the pool, and its weights are kept
    assert all(
        {v for g in p for c in g.completions for v, _ in c.segments} <= {r.version}
        for p, r in zip(pools.seen, seen.rounds, strict=True)
    )
    # hooks have seen what is trained on, once
    trained = [c for r in seen.rounds for c in r.completions]
    assert {id(c) for c in trained} == {*map(id, seen.completions)}
    assert len(seen.completions) == len(trained) == len({*map(id, trained)})
    assert Counter(seen.groups) == Counter(g.id for r in seen.rounds for g in r.groups)
    left = [*data.run.pool]
    assert all(g.overtaken <= overtake * 2 for g in left)
    assert bool(left) == bool(overtake), "without overtaking nothing is begun for nobody"


def test_at_0_prompts_and_their_order_are_those_of_plain_rounds(fit, tiny_model):
    seen, _, _ = run(fit, tiny_model)
    plain = Rounds()
    fit(
        GRPOModule(tiny_model, learning_rate=1e-2),
        [plain],
        {"max_epochs": 5},
        num_generations=3,
        prompts_per_round=2,
    )
    of = [[[g.id for g in r.groups] for r in one.rounds] for one in (seen, plain)]
    assert of[0] == of[1]
    assert seen.planned == plain.planned, "and the hook has seen no others"
    assert all(r.metrics["rollout/trained_over_drawn_length"] > 0 for r in seen.rounds)


def test_what_an_unchanged_policy_drew_is_kept_whole_and_scored_once(fit, tiny_model, tmp_path):
    calls = tmp_path / "calls"

    def counted(prompts, completions, **kwargs):
        with open(calls, "a") as file:
            file.writelines("x\n" for _ in completions)
        return [float(len(c)) for c in completions]

    for overtake in (0, 100):
        calls.write_text("")
        window = RolloutWindow(overtake=overtake)
        seen, _, data = run(fit, tiny_model, window=window, rate=0.0, reward_funcs=[counted])
        shares = [r.metrics["drafts/accepted_share"] for r in seen.rounds[1:]]
        assert set(shares) == {1.0}
        waiting = sum(c.scored for g in data.run.pool for c in g.completions)
        assert len(calls.read_text().split()) == 5 * 6 + waiting
        assert all(c.scores == [float(len(c.text))] for r in seen.rounds for c in r.completions)


@pytest.mark.mostly_slow("1")
@pytest.mark.parametrize("overtake", [0, 1])
def test_a_run_does_not_depend_on_timing(fit, tiny_model, monkeypatch, overtake):
    """In the trainer's process and in one that runs ahead, which take any time."""

    def once(engine):
        window = RolloutWindow(overtake=overtake)
        seen, module, _ = run(
            fit, tiny_model, window=window, engine=engine, reward_funcs=[slowly()]
        )
        return seen.drawn, vector(module)

    first, trained = once(ProcessEngine(TransformersEngine()))
    update = GRPOModule.training_step

    def dawdle(self, *args):
        time.sleep(0.02)
        return update(self, *args)

    monkeypatch.setattr(GRPOModule, "training_step", dawdle)
    for engine in (ProcessEngine(Sleepy()), Sleepy()):
        drawn, again = once(engine)
        assert drawn == first
        # some CPUs' kernels round by where a tensor lies in memory
        torch.testing.assert_close(again, trained, rtol=0, atol=1e-6)


def test_tokens_whose_weights_are_missing_are_counted_and_drawn_again(fit, tiny_model, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    run(fit, tiny_model, saver, trainer={"enable_checkpointing": True})
    path = tmp_path / "step=2.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    (state,) = (s for s in checkpoint.values() if isinstance(s, dict) and "drafts" in s)
    begun = int((state["pool"]["offsets"].diff() > 0).sum())
    state["drafts"] = {}
    torch.save(checkpoint, path)
    seen, _, _ = run(fit, tiny_model, ckpt_path=str(path))
    first = seen.rounds[0].metrics
    assert first["dropped/lost_draft"] == begun > 0 == first["drafts/accepted_tokens"]
    assert max(c.attempts for c in seen.rounds[0].completions) == 1


def test_a_stale_token_ends_the_run(fit, tiny_model, monkeypatch):
    monkeypatch.setattr("lit_rlsched.rollout.rollout.put_off_old", lambda *of: [])
    monkeypatch.setattr("lit_rlsched.rollout.rollout.restart_stale", lambda *of: [])
    with pytest.raises(AssertionError, match=r"round 2 has a token of version 0"):
        run(fit, tiny_model)


def test_replacements_and_early_stops_see_only_the_round_itself(fit, tiny_model):
    """In the data's order; the replaced prompts leave with their round."""

    def coin(prompts, completions, **kwargs):
        return [
            float(len(c) % 2) * (int(p[0]) % 3 > 0)
            for p, c in zip(prompts, completions, strict=True)
        ]

    callbacks = [DynamicSampling(), DownSampling(2, early_stop=True)]
    seen, _, _ = run(fit, tiny_model, *callbacks, num_generations=4, reward_funcs=[coin])
    ids = [[g.id for g in r.groups] for r in seen.rounds]
    assert max(map(len, ids)) > 2 and min(map(len, ids)) >= 2
    every = [name for of_round in ids for name in of_round]
    assert len({*every}) == len(every)
    for round in seen.rounds:
        useful = [
            g for g in round.groups if len({*map(str, (c.scores for c in g.completions))}) > 1
        ]
        bound = len(round.groups) == 8
        assert len(useful) >= 2 or bound
    assert any(len(g.completions) < 4 for r in seen.rounds for g in r.groups)


@pytest.mark.slow
def test_with_predicted_lengths_few_slots_and_streamed_gradients(fit, tiny_model):
    window = RolloutWindow(overtake=0)
    callbacks = [MicroGroupSampling(slots=4), LengthPrediction(), StreamedTraining(start=0)]
    seen, _, _ = run(
        fit,
        tiny_model,
        *callbacks,
        window=window,
        engine=ProcessEngine(TransformersEngine()),
        max_completion_length=48,
        micro_batch_tokens=64,  # fewer than a group has: it is a part while the other one decodes
    )
    groups = [group for round in seen.rounds for group in round.groups]
    assert max(gap for g in groups for c in g.completions for gap in seen.gaps(g, c)) < 1e-4
    assert sum(r.metrics["streamed_training/streamed_share"] for r in seen.rounds) > 0
    assert all(r.metrics["rollout/slots"] == 4 for r in seen.rounds)
