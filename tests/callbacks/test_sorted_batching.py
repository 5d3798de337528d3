import csv
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from seen_rounds import Policies

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.callbacks import (
    MicroGroupSampling,
    RolloutCallback,
    SortedBatching,
)
from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.settings import UsageError
from lit_rlsched.training.logprobs import completion_logprobs

SMALL = {
    "prompts_per_round": 2,
    "num_generations": 2,
    "max_completion_length": 64,
    "micro_batch_tokens": 256,
}
"""Few completions, long enough that about half of them end by themselves."""


class Recorder(Policies):
    """Keeps plans, and gradients before clipping, too."""

    def __init__(self):
        super().__init__()
        self.plans, self.pools, self.gradients, self.figures = [], [], [], []

    def on_round_start(self, trainer, pl_module, plan):
        self.plans.append([g.copy() for g in plan])

    def on_round_end(self, trainer, pl_module, round):
        super().on_round_end(trainer, pl_module, round)
        self.pools.append(len(trainer.datamodule.run.pool))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.parameters()]
        self.gradients.append(torch.cat([g.flatten() for g in grads]).clone())

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        self.figures.append({k: v.item() for k, v in trainer.callback_metrics.items()})

    @property
    def trained(self):
        """`(group, index)` of everything that was trained on, in order."""
        return [(g.id, c.index) for r in self.rounds for g in r.groups for c in g.completions]


def log_probs(model, group, completion):
    """Of a completion's tokens, `[C]`."""
    prompt = group.prompt.token_ids
    logp, _ = completion_logprobs(
        model,
        torch.tensor([[*prompt, *completion.token_ids]]),
        torch.tensor([len(prompt)]),
        torch.tensor([len(completion.token_ids)]),
    )
    return logp[0]


def versions(completion):
    """The policy version of each token."""
    return [version for version, tokens in completion.segments for _ in range(tokens)]


def check_pools(recorder, size, generations):
    """Each prompt with all its completions exactly once a pool, and no pool before it is time."""
    trained = recorder.trained
    assert len(trained) == len(set(trained))
    drawn, waiting, pools = set(), set(), 0
    for plan, round, left in zip(recorder.plans, recorder.rounds, recorder.pools, strict=True):
        asked = {(g.id, c.index) for g in plan for c in g.completions}
        if not waiting:  # a new pool
            assert not asked & drawn
            assert {i for _, i in asked} == set(range(generations))
            pools, waiting = pools + 1, asked
            assert len(asked) == size * generations
            drawn |= asked
        assert asked <= waiting
        done = {(g.id, c.index) for g in round.groups for c in g.completions}
        assert done and done <= asked
        waiting -= done
        assert left == len({group for group, _ in waiting})
    return pools, waiting


# Whose tokens they are.


@pytest.mark.mostly_slow("TransformersEngine")
@pytest.mark.parametrize("engine", [TransformersEngine, VLLMEngine])
def test_every_log_prob_is_of_the_version_that_drew_the_token(fit, tiny_model, engine):
    recorder = Recorder()
    batching = SortedBatching(pool_rounds=4, mode="partial")
    module = GRPOModule(tiny_model, learning_rate=1e-2)
    fit(module, [recorder, batching], engine=engine(), trainer={"max_epochs": 6}, **SMALL)
    spans, gaps, moved = Counter(), [], []
    for round in recorder.rounds:
        for row in round.samples:
            c, at = row.completion, versions(row.completion)
            spans[len(c.segments)] += 1
            assert len(at) == len(c.token_ids) == len(c.logprobs)
            assert at == sorted(at) and at[-1] <= round.version
            gaps += recorder.gaps(row.group, c)
            moved += recorder.gaps(row.group, replace(c, segments=[(round.version, len(at))]))
    assert max(spans) >= 3 and sum(n for k, n in spans.items() if k > 1) >= 4
    assert max(gaps) < 1e-4
    assert max(moved) > 0.1  # of another version they would have been others


@pytest.mark.slow
def test_another_trainer_with_the_same_data_module(fit, tiny_model, tmp_path):
    first = Recorder()
    batching = SortedBatching(pool_rounds=4, mode="partial")
    module = GRPOModule(tiny_model, learning_rate=1e-3)
    _, module, data = fit(module, [first, batching], trainer={"max_epochs": 1}, **SMALL)
    assert first.pools[-1] > 0
    begun = sum(len(c.token_ids) for g in data.run.pool for c in g.completions)
    discarded = data.run.counters["num_discarded_tokens"]
    left = {(g.id, c.index) for g in data.run.pool for c in g.completions}
    second = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=5,
        callbacks=[second, batching],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=data)
    assert [r.version for r in second.rounds] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in data.run.record.rounds] == [0, 1, 2, 3, 4]
    assert [r.number for r in first.rounds + second.rounds] == list(range(6))
    counted = second.rounds[0].metrics["num_discarded_tokens"]
    assert counted == discarded + begun + second.rounds[0].metrics["rollout/discarded_tokens"]
    asked = {(g.id, c.index) for g in second.plans[0] for c in g.completions}
    assert asked == left  # that pool goes on
    assert all(not c.token_ids for g in second.plans[0] for c in g.completions)


@pytest.mark.slow
def test_several_iterations_and_a_limit_on_batches(fit):
    recorder = Recorder()
    trainer, _, _ = fit(
        callbacks=[recorder, SortedBatching(pool_rounds=3, mode="partial")],
        num_iterations=3,
        trainer={"max_epochs": 5, "limit_train_batches": 2},
        **SMALL,
    )
    assert trainer.global_step == 10
    assert [r.version for r in recorder.rounds] == [0, 2, 4, 6, 8]
    check_pools(recorder, 6, 2)
    for round in recorder.rounds:
        for completion in round.completions:
            assert set(versions(completion)) <= set(range(0, round.version + 1, 2))
            assert completion.old_logprobs is None  # the ratio is to what the engine recorded


# What is learned.


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["reinforce++", "tracker"])
def test_single_completions_are_trained_on(fit, tiny_model, advantage):
    recorder, expects = Recorder(), PromptStatistics()
    module = GRPOModule(tiny_model, learning_rate=1e-3, advantage=advantage)
    settings = {**SMALL, "prompts_per_round": 4, "num_generations": 3}
    fit(module, [recorder, SortedBatching(pool_rounds=3)], trainer={"max_epochs": 5}, **settings)
    check_pools(recorder, 12, 3)
    sizes = [len(r.completions) for r in recorder.rounds]
    assert sizes[0] >= 4 * 3
    assert any(len(g.completions) < 3 for r in recorder.rounds for g in r.groups)
    for round in recorder.rounds:
        rewards = torch.tensor([c.scores[0] for c in round.completions], dtype=torch.float64)
        if advantage == "tracker":
            known = expects.means(sample.group.prompt.uid for sample in round.samples)
            expects.observe(round.number, round.groups, by_index(round.groups))
            rewards = rewards - torch.from_numpy(known)
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        expected = torch.zeros(1).double() if len(rewards) == 1 else expected
        got = torch.tensor([c.advantage for c in round.completions], dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
        if (
            len(rewards) > 1 and advantage != "tracker"
        ):  # the spread that advantages are relative to
            assert round.metrics["reward_std"] == pytest.approx(rewards.std().item())
    assert any(c.advantage for c in recorder.completions)


def by_index(groups):
    return [[c.scores[0] for c in group.completions] for group in groups]


def test_single_completions_of_a_checkpoint_do_not_become_groups(fit, tiny_model, tmp_path):
    saves = [ModelCheckpoint(tmp_path / "saved", save_last=True, every_n_epochs=1)]
    trainer = {"max_epochs": 1, "enable_checkpointing": True}
    settings = {**SMALL, "num_generations": 3}
    single = GRPOModule(tiny_model, advantage="reinforce++")
    _, _, data = fit(single, [SortedBatching(3), *saves], trainer=trainer, **settings)
    assert any(len(group.completions) < 3 for group in data.run.pool)
    with pytest.raises(UsageError, match=r"Resume with the `advantage` that it was made with"):
        fit(
            callbacks=[SortedBatching(3)],
            trainer={"max_epochs": 3},
            ckpt_path=tmp_path / "saved" / "last.ckpt",
            **settings,
        )


def partial_gradients(fit, tiny_model, batching=None, **module):
    """Gradients, rounds and weights of a run in which many tokens are stale."""
    recorder = Recorder()
    policy = GRPOModule(tiny_model, learning_rate=3e-3, **module)
    batching = SortedBatching(pool_rounds=4, mode="partial", **(batching or {}))
    settings = {**SMALL, "num_generations": 3}
    callbacks = [recorder, batching, MicroGroupSampling(slots=8)]
    fit(policy, callbacks, trainer={"max_epochs": 4}, **settings)
    assert sum(any(c.advantage for c in r.completions) for r in recorder.rounds) >= 3
    assert len({v for c in recorder.completions for v, _ in c.segments}) >= 3
    return recorder


def hand_loss(recorder, term):
    """The losses by `term(logp, completion, version)` of each row, and their gradients."""
    for round, gradient, figures in zip(
        recorder.rounds, recorder.gradients, recorder.figures, strict=True
    ):
        policy = recorder.policies[round.version]
        terms = [
            term(log_probs(policy, r.group, r.completion), r.completion, round.version)
            for r in round.samples
        ]
        yield round, policy, torch.cat(terms), gradient, figures


def check_gradient(loss, policy, gradient):
    grads = torch.autograd.grad(loss, [*policy.parameters()])
    expected = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(
        gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()) + 1e-9
    )


def test_masked_stale_tokens_are_no_part_of_the_loss(fit, tiny_model):
    recorder = partial_gradients(fit, tiny_model, {"mask_stale_tokens": True})

    def fresh(logp, completion, version):
        return -completion.advantage * logp[torch.tensor(versions(completion)) == version]

    stale = 0
    for round, policy, terms, gradient, _ in hand_loss(recorder, fresh):
        stale += sum(len(c.token_ids) for c in round.completions) - len(terms)
        check_gradient(terms.sum() / len(terms), policy, gradient)
    assert stale > 50


@pytest.mark.slow
def test_the_ratio_to_the_engines_log_probs(fit, tiny_model):
    recorder = partial_gradients(fit, tiny_model)
    assert recorder.rounds[0].metrics["staleness/max"] == 0
    clipped = []

    def surrogate(logp, completion, version):
        ratio = (logp - torch.tensor(completion.logprobs)).exp()
        a = completion.advantage
        return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)

    for round, policy, terms, gradient, figures in hand_loss(recorder, surrogate):
        loss = terms.sum() / len(terms)
        assert figures["loss"] == pytest.approx(loss.item(), abs=1e-5)
        check_gradient(loss, policy, gradient)
        trained = [row for row in round.samples if row.completion.advantage]
        outside = tokens = 0
        with torch.no_grad():
            for row in trained:
                c = row.completion
                ratio = (log_probs(policy, row.group, c) - torch.tensor(c.logprobs)).exp()
                out = ratio > 1.2 if c.advantage > 0 else ratio < 0.8
                outside, tokens = outside + out.sum().item(), tokens + len(out)
        assert figures["clip_ratio/region_mean"] == pytest.approx(outside / tokens, abs=1e-6)
        moved = figures["sampling/sampling_logp_difference/mean"]
        assert moved > 1e-4 or round.metrics["staleness/max"] == 0
        clipped.append(outside)
    assert clipped[0] == 0 < max(clipped)


def test_uncorrected_stale_tokens_are_warned_of(fit, tiny_model):
    partial = [SortedBatching(mode="partial")]
    uncorrected = {"old_logprobs": "trainer", "importance_sampling_mode": None}
    with pytest.warns(UserWarning, match="as if the newest had drawn them"):
        fit(GRPOModule(tiny_model, **uncorrected), partial, trainer={"max_epochs": 1})


def test_rloo_in_partial_mode(fit, tiny_model):
    """The reference's log-probs and those of the trainer are of the round's weights."""
    recorder = Recorder()
    module = RLOOModule(tiny_model, learning_rate=1e-3, beta=0.5)
    callbacks = [recorder, SortedBatching(pool_rounds=4, mode="partial")]
    fit(module, callbacks, trainer={"max_epochs": 4}, **SMALL)
    assert any(len(c.segments) > 1 for c in recorder.completions)
    for round in recorder.rounds:
        model, rewards = recorder.policies[round.version], []
        for row in round.samples:
            c = row.completion
            with torch.no_grad():
                now = log_probs(model, row.group, c)
            torch.testing.assert_close(torch.tensor(c.old_logprobs), now, rtol=0, atol=1e-4)
            rewards.append(c.scores[0] - 0.5 * (sum(c.old_logprobs) - sum(c.ref_logprobs)))
        first, second = torch.tensor(rewards).view(-1, 2).T
        expected = torch.stack([first - second, second - first], 1).flatten()
        got = torch.tensor([c.advantage for c in round.completions])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


# What is logged, and which hooks fire.


@pytest.mark.mostly_slow("partial")
@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_figures_of_rounds_and_pools(fit, tmp_path, mode):
    recorder, logger = Recorder(), CSVLogger(tmp_path)
    batching = SortedBatching(pool_rounds=3, mode=mode)
    slots = MicroGroupSampling(slots=8)
    _, _, data = fit(
        callbacks=[recorder, batching, slots],
        trainer={"max_epochs": 7, "logger": logger, "log_every_n_steps": 1},
        **SMALL,
    )
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["rollout/round"]]
    assert len(rows) == 7
    figures = [{k: float(v) for k, v in row.items() if v} for row in rows]
    ends = [i for i, left in enumerate(recorder.pools) if not left]
    assert ends and [i for i, f in enumerate(figures) if "pool/rounds" in f] == ends
    assert [figures[i]["pool/rounds"] for i in ends] == [b - a for a, b in pairwise([-1, *ends])]
    start, discarded = 0, 0
    for i, (f, round) in enumerate(zip(figures, recorder.rounds, strict=True)):
        assert 0 <= f["rollout/bubble_ratio"] < 1 and f["rollout/slots"] == 8
        assert f["rollout/pool_prompts"] == recorder.pools[i]
        attempts = [1 + max(c.attempts for c in g.completions) for g in round.groups]
        assert f["rollout/attempts/mean"] == pytest.approx(sum(attempts) / len(attempts))
        assert f["rollout/attempts/max"] == max(attempts)
        assert f["rollout/trained_over_drawn_length"] > 0
        share = 1 - f["rollout/discarded_tokens"] / f["rollout/tokens"]
        assert f["rollout/useful_token_share"] == pytest.approx(share)
        discarded += f["rollout/discarded_tokens"]
        if mode == "partial":
            ages = Counter(round.version - v for c in round.completions for v in versions(c))
            shares = [f[f"staleness/{k}"] for k in range(8)]
            assert sum(shares) + f["staleness/8+"] == pytest.approx(1)
            assert shares == pytest.approx([ages[k] / ages.total() for k in range(8)])
            assert f["staleness/max"] == max(ages)
            assert f["rollout/useful_token_share"] == 1 and f["rollout/restarts"] == 0
        else:
            assert not any(name.startswith("staleness/") for name in f)
        if i in ends:
            pool = range(start, i + 1)
            drawn = sum(figures[j]["rollout/tokens"] for j in pool)
            kept = sum(len(c.token_ids) for j in pool for c in recorder.rounds[j].completions)
            # every token that was drawn was trained on or thrown away
            assert f["pool/useful_token_share"] == pytest.approx(kept / drawn)
            assert 0 <= f["pool/bubble_ratio"] < 1
            if mode == "partial":
                assert f["pool/trained_over_drawn_length"] == 1
            else:
                assert 0 < f["pool/trained_over_drawn_length"] < 1
            start = i + 1
    assert data.run.counters["num_discarded_tokens"] == discarded
    assert sum(r.metrics["rollout/discarded_tokens"] for r in recorder.rounds) == discarded
    assert (discarded > 0) == (mode == "on_policy")
    if mode == "partial":
        assert max(f["staleness/max"] for f in figures) >= 1


def test_settings_end_with_the_run_however_it_ends(fit):
    class Fails(RolloutCallback):
        def on_round_end(self, trainer, pl_module, round):
            self.data = trainer.datamodule
            raise RuntimeError("of the user's own")

    fails = Fails()
    batching = SortedBatching(mode="partial", mask_stale_tokens=True)
    with pytest.raises(RuntimeError, match="of the user's own"):
        fit(callbacks=[batching, MicroGroupSampling(slots=3), fails])
    assert (
        not fails.data.run.schedule.mask_stale_tokens
        and not fails.data.run.schedule.rule.ends_early
    )
    assert fails.data.run.schedule.slots.slots is None
