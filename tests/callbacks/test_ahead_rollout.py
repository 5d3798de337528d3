"""Rounds that are drawn ahead: content from weights and seeds, whatever the timing."""

import copy
import random
import threading
import time
from collections import Counter

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from seen_rounds import At, Rounds, gradient_norm, weights
from slow_parts import Sleepy, slowly

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.callbacks import (
    AheadRollout,
    DownSampling,
    DynamicSampling,
    LengthPrediction,
    MicroGroupSampling,
    RolloutCallback,
    RoundCheckpoint,
    StreamedTraining,
)
from lit_rlsched.callbacks.rollout_callback import run_of
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.training.draft_verifier import Drafts, EndedDrafts
from lit_rlsched.training.weight_sync import PolicyReader

BOTH = pytest.mark.parametrize("correction", ["verify", "importance"])
SMALL = {"num_generations": 3, "steps_per_round": 2}


class Unstreamed(RolloutCallback):
    """Compute no gradients during the rollout."""

    def on_train_start(self, trainer, pl_module):
        run_of(trainer, self).schedule.streaming = None


def run(
    fit,
    tiny_model,
    correction,
    *callbacks,
    trainer=None,
    ckpt_path=None,
    rate=1e-2,
    engine=TransformersEngine,
    **data,
):
    seen = Rounds()
    _, module, datamodule = fit(
        GRPOModule(tiny_model, learning_rate=rate),
        [seen, *callbacks, AheadRollout(correction)],
        {"max_epochs": 4, **(trainer or {})},
        ckpt_path,
        engine=ProcessEngine(engine()),
        **{**SMALL, **data},
    )
    return seen, weights(module), datamodule


def in_turn(monkeypatch):
    """Draw ahead before the update instead of beside it."""

    def decode_now(self, decode):
        beside = self.background
        beside._held = []
        decode()
        held, beside._held = beside._held, None
        for hook in held:
            hook()

    monkeypatch.setattr(RolloutSession, "in_background", decode_now)


@pytest.mark.slow
@BOTH
def test_a_run_does_not_depend_on_timing(fit, tiny_model, monkeypatch, correction):
    first = run(fit, tiny_model, correction, reward_funcs=[slowly()])
    update = GRPOModule.training_step

    def dawdle(self, *args):
        time.sleep(random.random() * 0.05)
        return update(self, *args)

    monkeypatch.setattr(GRPOModule, "training_step", dawdle)
    second = run(fit, tiny_model, correction, reward_funcs=[slowly()], engine=Sleepy)
    in_turn(monkeypatch)
    third = run(fit, tiny_model, correction, reward_funcs=[slowly()])
    for seen, trained, _ in (second, third):
        assert seen.drawn == first[0].drawn
        assert torch.equal(trained, first[1])


def test_importance_trains_on_completions_that_are_one_round_older(fit, tiny_model, sums):
    seen, _, _ = run(fit, tiny_model, "importance", val_data=sums[80:82])
    versions = [{v for c in r.completions for v, _ in c.segments} for r in seen.rounds]
    assert versions == [{0}, {0}, {2}, {4}]
    assert [r.version for r in seen.rounds] == [0, 2, 4, 6]
    assert [r.metrics["staleness/mean"] for r in seen.rounds] == [0, 2, 2, 2]
    check_hooks(seen)


def test_verified_rounds_are_drawn_by_the_newest_policy(fit, tiny_model):
    seen, _, data = run(fit, tiny_model, "verify")
    for round in seen.rounds:
        for completion in round.completions:
            assert completion.segments == [(round.version, len(completion.token_ids))]
    first, *later = (r.metrics for r in seen.rounds)
    assert all(0 < r.metrics["pool/useful_token_share"] <= 1 for r in seen.rounds)
    assert "drafts/tokens" not in first
    for metrics in later:
        assert metrics["drafts/tokens"] == metrics["ahead_rollout/tokens"] > 0
        assert 0 < metrics["drafts/accepted_share"] < 1
    assert not list(data.run.pool), "the last round drew nothing ahead"
    *begin, last = (r.metrics for r in seen.rounds)
    assert all(metrics["rollout/draft_tokens"] for metrics in begin)
    assert begin[0]["rollout/idle_slot_steps"] == 0, "nothing was verified"
    for metrics in begin[1:]:  # some drafts end before the verification does
        assert metrics["rollout/idle_slot_steps"] < metrics["rollout/slot_steps"] / 2
    assert "rollout/draft_tokens" not in last and last["rollout/idle_slot_steps"] > 0
    check_hooks(seen)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_pass_that_verifies_gives_the_old_logprobs(fit, tiny_model, monkeypatch, streamed):
    """Of drafts that are kept whole, where a round has two optimizer steps."""
    scored, whole = [], Counter()
    score, give = GRPOModule.score, Drafts.give_old_logprobs

    def note(self, batch):
        scored.append(len(batch.completion_lengths))
        return score(self, batch)

    def count(self, completions, version):
        without = [c for c in completions if c.old_logprobs is None]
        give(self, completions, version)
        whole[version] += sum(c.old_logprobs is not None for c in without)

    class Compare(Rounds):
        def on_round_end(self, trainer, pl_module, round):
            super().on_round_end(trainer, pl_module, round)
            rows = PolicyReader(pl_module.model).logprobs(
                [s.group.prompt for s in round.samples], round.completions, 1.0
            )
            for completion, again in zip(round.completions, rows, strict=True):
                assert [*completion.old_logprobs] == pytest.approx(again.tolist(), abs=1e-5)

    monkeypatch.setattr(GRPOModule, "score", note)
    monkeypatch.setattr(Drafts, "give_old_logprobs", count)
    seen = Compare()
    fit(
        GRPOModule(tiny_model, learning_rate=3e-4),
        [seen, AheadRollout()],
        {"max_epochs": 3},
        engine=ProcessEngine(TransformersEngine()),
        micro_batch_tokens=64,
        **({"num_generations": 3, "num_iterations": 2} if streamed else SMALL),
    )
    assert [whole[version] > 0 for version in (0, 2, 4)] == [False, True, True]
    assert sum(scored) + whole.total() == sum(len(r.completions) for r in seen.rounds)
    assert all(bool(r.accumulated) == streamed for r in seen.rounds[1:])


def check_hooks(seen):
    """Each hook was called once: for the rounds, their groups and completions."""
    assert seen.planned == [[g.id for g in r.groups] for r in seen.rounds]
    assert sorted(seen.groups) == sorted(g.id for r in seen.rounds for g in r.groups)
    assert {id(c) for c in seen.completions} == {id(c) for r in seen.rounds for c in r.completions}
    assert len(seen.completions) == sum(len(r.completions) for r in seen.rounds)


def test_drafts_of_an_unchanged_policy_are_kept_whole(fit, tiny_model):
    seen, _, _ = run(fit, tiny_model, "verify", rate=0.0)
    for round in seen.rounds[1:]:
        assert round.metrics["drafts/accepted_share"] == 1
        assert round.metrics["rollout/tokens"] == round.metrics.get("rollout/draft_tokens", 0)


@BOTH
def test_a_prompt_of_the_first_two_rounds_gets_other_completions(fit, tiny_model, sums, correction):
    """Both are drawn under the first version."""
    data = {"train_data": sums[:4], "shuffle": False}
    seen, _, _ = run(fit, tiny_model, correction, trainer={"max_epochs": 2}, rate=0.0, **data)
    first, second = ([[*c.token_ids] for c in r.completions] for r in seen.rounds)
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.mostly_slow("validation-importance")
@BOTH
@pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param(lambda: [], id="validation"),
        pytest.param(
            lambda: [MicroGroupSampling(slots=5), LengthPrediction()], id="length prediction"
        ),
        pytest.param(lambda: [DynamicSampling(), DownSampling(2)], id="dynamic sampling"),
    ],
)
def test_a_resumed_run_is_the_same(fit, tiny_model, sums, tmp_path, correction, callbacks):
    """From every step: with a round or with drafts, in the middle of a round and at its end."""
    data = {"val_data": sums[80:84], "train_data": sums[:40]}
    saver = ModelCheckpoint(tmp_path / "c", "{step}", save_top_k=-1, every_n_train_steps=1)
    on = {"enable_checkpointing": True}
    seen, whole, _ = run(fit, tiny_model, correction, *callbacks(), saver, trainer=on, **data)
    for step in (1, 2, 5):
        path = str(tmp_path / "c" / f"step={step}.ckpt")
        again, trained, _ = run(fit, tiny_model, correction, *callbacks(), ckpt_path=path, **data)
        assert torch.equal(trained, whole), f"from step {step}"
        assert again.drawn == seen.drawn[-len(again.rounds) :]
        for now, then in zip(again.rounds, seen.rounds[-len(again.rounds) :], strict=True):
            assert not now.metrics.keys() ^ then.metrics.keys()
            assert [c.text for c in now.completions] == [c.text for c in then.completions]
            assert now.metrics["num_tokens"] == then.metrics["num_tokens"]
            assert now.metrics["rollout/tokens"] == then.metrics["rollout/tokens"]


def counted_calls(path):
    def digits(prompts, completions, **kwargs):
        import time

        time.sleep(0.01)
        with open(path, "a") as file:
            file.write("x")
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    return digits


class Patient(RolloutCallback):
    """Begins an update only when so many rewards were computed."""

    def __init__(self, path):
        self.path, self.seen = path, []

    def on_train_batch_start(self, trainer, *args):
        rounds = trainer.current_epoch + 1 + (trainer.current_epoch < trainer.max_epochs - 1)
        end = time.monotonic() + 60
        while self.path.stat().st_size < 12 * rounds and time.monotonic() < end:
            time.sleep(0.01)
        self.seen.append(self.path.stat().st_size)


def test_rewards_are_computed_during_the_update(fit, tiny_model, tmp_path):
    """If all drafts are kept, those of the next round have their rewards when the update begins."""
    patient = Patient(tmp_path / "calls")
    reward = counted_calls(str(patient.path))
    data = {"steps_per_round": 1, "reward_funcs": [reward], "trainer": {"max_epochs": 3}}
    seen, _, _ = run(fit, tiny_model, "verify", patient, rate=0.0, **data)
    assert patient.seen == [24, 36, 36]
    kept = [r.metrics.get("ahead_rollout/rewards_kept") for r in seen.rounds]
    assert kept == [None, 12, 12]
    assert all(c.scored for r in seen.rounds for c in r.completions)
    check_hooks(seen)


@pytest.mark.slow
def test_rewards_of_drafts_that_were_cut_are_computed_again(fit, tiny_model, monkeypatch):
    seen, trained, _ = run(fit, tiny_model, "verify", reward_funcs=[slowly()])
    for round in seen.rounds[1:]:
        assert round.metrics["ahead_rollout/rewards_kept"] == round.metrics["drafts/completed"]
    monkeypatch.setattr(Scorer, "submit_ahead", lambda *args: None)
    again, other, _ = run(fit, tiny_model, "verify", reward_funcs=[slowly()])
    assert not any(r.metrics.get("ahead_rollout/rewards_kept") for r in again.rounds)
    assert again.drawn == seen.drawn and torch.equal(other, trained)
    for now, then in zip(again.rounds, seen.rounds, strict=True):
        assert [c.scores for c in now.completions] == [c.scores for c in then.completions]


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 2])
def test_verified_rounds_stream_their_gradients(fit, tiny_model, iterations):
    settings = {"steps_per_round": 1, "trainer": {"precision": "64-true", "max_epochs": 3}}
    settings["num_iterations"] = iterations
    settings["micro_batch_tokens"] = 64
    seen, plain, _ = run(fit, tiny_model, "verify", Unstreamed(), **settings)
    assert not any(r.accumulated for r in seen.rounds)
    for callbacks in ([], [StreamedTraining(start=0)]):
        again, streamed, _ = run(fit, tiny_model, "verify", *callbacks, **settings)
        assert again.drawn == seen.drawn
        assert any(r.accumulated for r in again.rounds)
        torch.testing.assert_close(streamed, plain, rtol=0, atol=1e-6)


EXACT = {"steps_per_round": 1, "micro_batch_tokens": 150}


def of_one_pass(rounds):
    """Drafts that the update verified in each round, and how many of them it kept."""
    return [
        (
            sum(len(samples) for step in parts for samples in step.micro_batches),
            sum(len(step.drafts) for step in parts),
        )
        for parts in ([s for s in r.accumulated if s.drafts is not None] for r in rounds)
    ]


WAYS = {
    "dapo": {},
    "grpo": {"module": {"loss_type": "grpo"}},
    "dr_grpo": {"module": {"loss_type": "dr_grpo", "importance_sampling_mode": "token_mask"}},
    "gspo": {"module": {"loss_type": "gspo", "old_logprobs": "engine"}},
    "cispo": {"module": {"loss_type": "cispo", "epsilon_high": 5.0}},
    "rloo": {"make": RLOOModule, "module": {"beta": 0.0}},
    "lora": {"module": {"lora_rank": 4, "learning_rate": 3e-3}},
    "selected": {"callbacks": [DownSampling(2)]},
    "selected, in small parts": {"callbacks": [DownSampling(2)], "micro_batch_tokens": 40},
    "masked": {"mask_truncated_completions": True},
    "two iterations": {"num_iterations": 2},
    "a third of the slots": {"callbacks": [MicroGroupSampling(slots=5)]},
    "two engines": {"engine": EnginePool([ProcessEngine(TransformersEngine()) for _ in range(2)])},
}


@pytest.mark.mostly_slow("selected, in small parts", "rloo")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_pass_verifies_and_trains(fit, exact_model, way):
    """The update is that of verified completions; some drafts are cut, and rewards change then."""
    way = {"make": GRPOModule, "module": {}, "callbacks": [], **way}
    make, settings, others = (way.pop(name) for name in ("make", "module", "callbacks"))

    def trained(*callbacks):
        seen = Rounds()
        torch.manual_seed(0)  # of adapters
        module = make(exact_model, **{"learning_rate": 1e-2, **settings})
        fit(
            module,
            [seen, *callbacks, *copy.deepcopy(others), AheadRollout()],
            {"precision": "64-true", "max_epochs": 4},
            **{
                "engine": ProcessEngine(TransformersEngine()),
                "num_generations": 4,
                **EXACT,
                **copy.deepcopy(way),
            },
        )
        return seen, weights(module)

    seen, one = trained()
    again, two = trained(Unstreamed())
    assert seen.drawn == again.drawn
    first, *later = of_one_pass(seen.rounds)
    assert first == (0, 0) and len(later) == 3
    assert 0 < sum(kept for _, kept in later) < sum(tried for tried, _ in later)
    if "micro_batch_tokens" in way:  # some of it was made up for during the rollout
        assert any(b.again for r in seen.rounds for s in r.accumulated for b in s)
    assert not any(r.accumulated for r in again.rounds)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-8)
    for now, then in zip(seen.rounds, again.rounds, strict=True):
        for name in ("drafts/accepted_tokens", "drafts/completed", "drafts/distance", "reward"):
            assert now.metrics.get(name) == pytest.approx(then.metrics.get(name))
        for a, b in zip(now.completions, then.completions, strict=True):
            assert a.advantage == pytest.approx(b.advantage) and a.dropped == b.dropped


@pytest.mark.parametrize(
    ("module", "others", "reason"),
    [
        ({"beta": 0.1}, [], "the KL is a term besides"),
        ({}, [DynamicSampling()], "scores decide what is drawn"),
        ({}, ["trainer_state"], "scores change until then"),
    ],
)
def test_drafts_are_verified_first_where_one_pass_would_be_wrong(
    fit, tiny_model, module, others, reason
):
    data = {}
    if others == ["trainer_state"]:
        data = {"reward_funcs": [lambda completions, trainer_state, **_: [*map(len, completions)]]}
        others = []
    seen = Rounds()
    fit(
        GRPOModule(tiny_model, learning_rate=1e-2, **module),
        [seen, *copy.deepcopy(others), AheadRollout()],
        {"max_epochs": 3},
        engine=ProcessEngine(TransformersEngine()),
        num_generations=3,
        **EXACT,
        **data,
    )
    assert of_one_pass(seen.rounds) == [(0, 0)] * 3, reason
    assert all(r.metrics["drafts/tokens"] for r in seen.rounds[1:])
    kept = [r.metrics["ahead_rollout/rewards_kept"] > 0 for r in seen.rounds[1:]]
    assert not (data and any(kept))


def test_a_step_whose_drafts_are_all_cut_still_has_a_gradient(fit, tiny_model, monkeypatch):
    """Of zeros, with which AdamW's momentum goes on."""
    monkeypatch.setattr(EndedDrafts, "accepts", lambda self, rows, logp: torch.zeros(len(rows)))
    norms, seen = At(gradient_norm, "on_before_optimizer_step"), Rounds()

    class Alike(RolloutCallback):
        """All rewards of the round are equal once it is drawn."""

        def on_completion_end(self, trainer, pl_module, completion):
            if trainer.current_epoch:
                completion.scores = [0.5]

    fit(
        GRPOModule(tiny_model, learning_rate=1e-2),
        [seen, Alike(), norms, AheadRollout()],
        {"max_epochs": 3},
        engine=ProcessEngine(TransformersEngine()),
        num_generations=3,
        **EXACT,
    )
    assert [tried > 0 for tried, _ in of_one_pass(seen.rounds)] == [False, True, True]
    assert norms.seen[0] > 0 and norms.seen[1:] == [0.0, 0.0]


def test_a_loss_of_ones_own_trains_on_verified_completions(fit, tiny_model):
    class Own(GRPOModule):
        def loss(self, batch):
            return super().loss(batch)

    seen = Rounds()
    fit(
        Own(tiny_model),
        [seen, AheadRollout()],
        {"max_epochs": 2},
        engine=ProcessEngine(TransformersEngine()),
        num_generations=3,
        **EXACT,
    )
    assert of_one_pass(seen.rounds) == [(0, 0)] * 2


@pytest.mark.slow
def test_when_rewards_of_drafts_come_changes_nothing(fit, tiny_model):
    settings = {**EXACT, "num_generations": 4, "rate": 3e-3}
    first, trained, _ = run(fit, tiny_model, "verify", **settings, reward_funcs=[slowly()])
    second, again, _ = run(
        fit, tiny_model, "verify", **settings, reward_funcs=[slowly()], engine=Sleepy
    )
    assert all(kept for _, kept in of_one_pass(first.rounds)[1:2])
    assert first.drawn == second.drawn and torch.equal(trained, again)


@pytest.mark.mostly_slow("2-selects0")
@pytest.mark.parametrize("selects", [[], [DownSampling(2)]])
@pytest.mark.parametrize("iterations", [1, 2])
def test_gradients_of_one_pass_that_a_checkpoint_lost_are_computed_again(
    fit, tiny_model, tmp_path, iterations, selects
):
    """Bit for bit, with the drafts that were cut in the same micro-batches."""
    path = tmp_path / "in_update.ckpt"

    class Save(RolloutCallback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 2 * iterations and not path.exists():
                trainer.save_checkpoint(path)

    settings = {**EXACT, "num_iterations": iterations, "num_generations": 4, "rate": 3e-3}
    if selects:
        settings["micro_batch_tokens"] = 40
    seen, whole, _ = run(fit, tiny_model, "verify", *copy.deepcopy(selects), Save(), **settings)
    tried, kept = of_one_pass(seen.rounds)[2]
    assert tried > kept > 0
    again, trained, _ = run(
        fit, tiny_model, "verify", *copy.deepcopy(selects), ckpt_path=path, **settings
    )
    assert torch.equal(trained, whole)
    assert again.drawn == seen.drawn[-len(again.rounds) :]


@pytest.mark.parametrize(
    ("callbacks", "settings", "module"),
    [
        ([DynamicSampling()], {}, {}),  # the engine would wait
        ([], {"steps_per_round": 2}, {}),
        ([], {}, {"scale_rewards": "batch"}),
    ],
)
def test_gradients_are_not_streamed_where_that_gains_nothing(
    fit, tiny_model, callbacks, settings, module
):
    seen = Rounds()
    fit(
        GRPOModule(tiny_model, **module),
        [seen, *callbacks, AheadRollout()],
        {"max_epochs": 2},
        engine=ProcessEngine(TransformersEngine()),
        num_generations=3,
        micro_batch_tokens=64,
        **settings,
    )
    before, last = seen.rounds
    assert not before.accumulated
    assert bool(last.accumulated) == bool(callbacks), "nothing is drawn beside the last update"


def test_a_round_that_was_drawn_ahead_is_dropped_without_the_callback(fit, tiny_model, tmp_path):
    saver = ModelCheckpoint(tmp_path / "c", "{step}", save_top_k=-1, every_n_train_steps=3)
    on = {"enable_checkpointing": True, "max_epochs": 3}
    run(fit, tiny_model, "importance", saver, trainer=on)
    seen = Rounds()
    _, _, data = fit(
        callbacks=[seen],
        trainer={"max_epochs": 3},
        ckpt_path=tmp_path / "c" / "step=3.ckpt",
        **SMALL,
    )
    (after,) = seen.rounds
    assert after.version == 4 and after.metrics.get("staleness/mean", 0) == 0
    assert all(c.segments[0][0] == 4 for c in after.completions)
    assert data.run.counters["num_discarded_tokens"] > 0


def test_uncorrected_stale_tokens_are_warned_of(fit, tiny_model):
    settings = {"old_logprobs": "trainer", "importance_sampling_mode": None}
    with pytest.warns(UserWarning, match="as if the newest had drawn them"):
        fit(
            GRPOModule(tiny_model, **settings),
            [AheadRollout("importance")],
            {"max_epochs": 1},
            engine=ProcessEngine(TransformersEngine()),
        )


def test_saving_is_not_charged_for_the_rollout(fit, tiny_model, tmp_path, monkeypatch):
    """What a save costs decides how rare the next ones are."""
    saver, waits = RoundCheckpoint(tmp_path), []
    save = Trainer.save_checkpoint

    def note(trainer, *args, **kwargs):
        session = trainer.datamodule.run.session
        waits.append(session is not None and session.background.running)
        return save(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "save_checkpoint", note)
    run(fit, tiny_model, "verify", saver, trainer={"enable_checkpointing": True})
    assert waits and not any(waits)


@BOTH
def test_an_error_in_training_ends_the_rollout_beside_it(fit, tiny_model, correction):
    class Fails(RolloutCallback):
        def on_train_batch_end(self, trainer, *args):
            self.session = trainer.datamodule.run.session
            if trainer.global_step == 3:
                raise ValueError("no more")

    fails = Fails()
    with pytest.raises(ValueError, match="no more"):
        run(fit, tiny_model, correction, fails)
    assert all(thread.name != "rollout_0" for thread in threading.enumerate())
    assert fails.session.engine.pid is None


def test_an_error_beside_training_is_raised(fit, tiny_model, monkeypatch):
    from lit_rlsched.engines.remote import RemoteWorker

    advance, main = RemoteWorker.advance, threading.main_thread()

    def breaks(self, most=None):
        if threading.current_thread() is not main:
            raise RuntimeError("broken beside training")
        return advance(self, most)

    monkeypatch.setattr(RemoteWorker, "advance", breaks)
    with pytest.raises(RuntimeError, match="broken beside training"):
        run(fit, tiny_model, "verify")
