from collections import Counter
from functools import partial
from itertools import cycle
from statistics import fmean, stdev

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from seen_rounds import vector

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.callbacks import (
    DownSampling,
    DynamicSampling,
    MicroGroupSampling,
    RolloutCallback,
    SortedBatching,
)
from lit_rlsched.scheduling.down_sampling import RULES
from lit_rlsched.training.micro_batches import OptimizerStep

GRPO = partial(GRPOModule, learning_rate=1e-3, shared_prefix=False)
RLOO = partial(RLOOModule, learning_rate=1e-3, shared_prefix=False)
REINFORCE = partial(GRPO, advantage="reinforce++")
STOPPING = {
    "num_generations": 6,
    "max_completion_length": 64,
    "micro_batch_tokens": 512,
    "reward_workers": 2,
}
"""Completions of so many lengths that groups stop before all have ended."""


def spread():
    """A reward that hardly two completions share."""

    def spread(prompts, completions, completion_ids, **kwargs):
        return [sum(k * t for k, t in enumerate(ids, 1)) % 997 / 997 for ids in completion_ids]

    return spread


def coin(delay=0):
    """0 or 1, after `delay` times a few milliseconds."""

    def coin(prompts, completions, completion_ids, **kwargs):
        import time

        time.sleep(delay * (sum(completion_ids[0]) % 4) / 1000)
        return [float(ids[0] % 2) for ids in completion_ids]

    return coin


def by_prompt(constant):
    """`spread`, but 1 for prompts whose answer is among the constant ones."""

    def by_prompt(prompts, completions, completion_ids, answer, **kwargs):
        values = [sum(k * t for k, t in enumerate(ids, 1)) % 997 / 997 for ids in completion_ids]
        return [1.0 if a in constant else v for a, v in zip(answer, values, strict=True)]

    return by_prompt


class Recorder(RolloutCallback):
    """Keeps rounds, and of each optimizer step what was encoded for the backward pass."""

    def __init__(self):
        self.rounds, self.steps, self.counters, self.stopped = [], [], [], []
        self.weights, self.figures, self.forward = [], [], 0

    def on_train_start(self, trainer, pl_module):
        def count(embedding, inputs):
            self.forward += torch.is_grad_enabled() * len(inputs[0])

        pl_module.model.get_input_embeddings().register_forward_pre_hook(count)

    def on_round_end(self, trainer, pl_module, round):
        data = trainer.datamodule
        session = data.run.session
        rollout = session._rollout
        assert not session.worker.busy and not rollout._requests.live and not session.scorer.pending
        assert data.run.session.engine.stats().running == 0
        self.rounds.append(round)
        self.counters.append(dict(data.run.counters))
        stopped = [c for some in rollout.state.stopped.values() for c in some]
        self.stopped.append([(c.index, len(c.token_ids)) for c in stopped])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights.append(vector(pl_module))
        self.forward = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        batches = list(batch) if isinstance(batch, OptimizerStep) else [batch]
        self.steps.append((batch, batches, self.forward))
        self.figures.append({k: v.item() for k, v in trainer.callback_metrics.items()})

    @property
    def trained(self):
        """Everything that was trained on, and what of it."""
        return [
            (r.number, g.id, c.index, c.token_ids, c.advantage)
            for r in self.rounds
            for g in r.groups
            for c in kept(g)
        ]


def kept(group):
    return [c for c in group.completions if c.dropped is None]


def rewards(completions):
    return [c.scores[0] for c in completions]


def check_conservation(recorder, generations, prompts):
    """After each round, all that was drawn of so many prompts was trained on or is counted."""
    trained = drawn = tokens = 0
    for r, counters, stopped in zip(
        recorder.rounds, recorder.counters, recorder.stopped, strict=True
    ):
        drawn += generations * prompts
        trained += sum(len(kept(g)) for g in r.groups)
        dropped = {k: n for k, n in counters.items() if k.startswith("dropped/")}
        assert trained + sum(dropped.values()) == drawn
        assert counters["num_completions"] + dropped.get("dropped/stopped", 0) == drawn
        finished = sum(len(c.token_ids) for c in r.completions)
        thrown = sum(n for _, n in stopped)
        assert r.metrics["rollout/tokens"] == finished + thrown
        assert r.metrics["rollout/discarded_tokens"] == thrown
        tokens += thrown
        assert counters.get("num_discarded_tokens", 0) == tokens
    return recorder.counters[-1]


# What is trained on.


@pytest.mark.parametrize(
    ("make", "rule"), [(GRPO, "max_variance"), (RLOO, "max_reward"), (REINFORCE, "random")]
)
def test_the_backward_pass_is_on_keep_rows_of_each_group(fit, tiny_model, make, rule):
    recorder, settings = Recorder(), {"num_generations": 6, "steps_per_round": 2}
    fit(make(tiny_model), [recorder, DownSampling(3, rule)], reward_funcs=[spread()], **settings)
    assert len(recorder.steps) == 4
    assert all(len(kept(g)) == 3 for r in recorder.rounds for g in r.groups)
    trained = []
    for step, batches, forward in recorder.steps:
        assert len({row.group.id for row in step.samples}) == 2
        assert forward == len(step.samples) == 6 == sum(len(b.advantages) for b in batches)
        assert {b.step_sequences for b in batches} == {6}
        trained += [(row.group.id, row.completion.index) for row in step.samples]
    wanted = [(g.id, c.index) for r in recorder.rounds for g in r.groups for c in kept(g)]
    assert sorted(trained) == sorted(wanted)
    for number, r in enumerate(recorder.rounds):
        assert r.metrics["down_sampling/kept"] == 0.5 and r.metrics["batch/completions"] == 12
        tokens = sum(len(c.token_ids) for g in r.groups for c in kept(g))
        for _, batches, _ in recorder.steps[2 * number : 2 * number + 2]:
            assert {b.step_tokens for b in batches} == {tokens / 2}
    assert check_conservation(recorder, 6, 4)["dropped/down_sampled"] == 2 * 4 * 3


@pytest.mark.slow
def test_keeping_all_is_the_run_without(fit, tiny_model):
    settings = {"reward_funcs": [spread()], "steps_per_round": 2, "num_iterations": 2}
    _, plain, data = fit(GRPO(tiny_model), **settings)
    for rule, scope in zip(RULES, cycle(("selected", "full")), strict=False):
        _, same, again = fit(GRPO(tiny_model), [DownSampling(4, rule, scope)], **settings)
        assert torch.equal(vector(same), vector(plain))
        assert again.run.counters == data.run.counters


@pytest.mark.parametrize(
    ("make", "scope"),
    [
        (GRPO, "selected"),
        (GRPO, "full"),
        (partial(RLOO, beta=0.0), "selected"),
        (REINFORCE, "full"),
    ],
)
def test_advantages_by_hand(fit, tiny_model, make, scope):
    recorder = Recorder()
    callbacks = [recorder, DownSampling(3, "percentile", scope)]
    fit(make(tiny_model), callbacks, reward_funcs=[spread()], num_generations=6)
    for r in recorder.rounds:
        of_round = [
            c for g in r.groups for c in (kept(g) if scope == "selected" else g.completions)
        ]
        for g in r.groups:
            compared = rewards(kept(g) if scope == "selected" else g.completions)
            for c in kept(g):
                (own,) = c.scores
                if make is GRPO:
                    wanted = (own - fmean(compared)) / (stdev(compared) + 1e-4)
                elif make is REINFORCE:
                    every = rewards(of_round)
                    wanted = (own - fmean(every)) / (stdev(every) + 1e-4)
                else:
                    wanted = own - (sum(compared) - own) / (len(compared) - 1)
                assert c.advantage == pytest.approx(wanted, abs=1e-9)
            if make is not REINFORCE and scope == "selected":
                assert sum(c.advantage for c in kept(g)) == pytest.approx(0, abs=1e-9)
    # what an optimizer step sees
    for step, batches, _ in recorder.steps:
        seen = sorted(a for b in batches for a in b.advantages.tolist())
        assert seen == pytest.approx(sorted(row.completion.advantage for row in step.samples))


# Groups that teach nothing.


@pytest.mark.parametrize("dropped", [True, False])
def test_groups_of_equal_rewards(fit, tiny_model, sums, dropped):
    recorder = Recorder()
    constant = {row["answer"] for row in sums[1:8:2]}
    callbacks = [recorder, DownSampling(2, drop_uninformative=dropped)]
    settings = {"reward_funcs": [by_prompt(constant)], "shuffle": False, "train_data": sums[:8]}
    fit(GRPO(tiny_model), callbacks, trainer={"max_epochs": 1}, **settings)
    ((_, batches, forward),), (r,) = recorder.steps, recorder.rounds
    assert [len(kept(g)) for g in r.groups] == [2, 0 if dropped else 2] * 2
    assert {b.step_sequences for b in batches} == {4 if dropped else 8}
    lengths = [len(c.token_ids) for g in r.groups for c in kept(g)]
    assert {b.step_tokens for b in batches} == {sum(lengths)}
    assert forward == 4  # a row without advantage adds nothing but to what the loss is divided by
    assert r.metrics["down_sampling/empty_groups"] == (0.5 if dropped else 0)
    counters = check_conservation(recorder, 4, 4)
    assert counters.get("dropped/uninformative", 0) == (8 if dropped else 0)
    assert r.metrics["reward"] > fmean(s for g in r.groups[::2] for s in rewards(g.completions))


def test_a_step_without_anything_to_train_on_changes_no_weight(fit, tiny_model, sums, tmp_path):
    """The second and the third of four rounds; AdamW has momentum by then, and decays weights."""
    recorder, logger = Recorder(), CSVLogger(tmp_path)
    constant = [row["answer"] for row in sums[4:12]]
    rows = [{"prompt": f"{i}-1=", "answer": a} for i, a in enumerate("wxyz")]
    module = GRPO(tiny_model, weight_decay=0.1)
    trainer, _, _ = fit(
        module,
        [recorder, DownSampling(3)],
        {"max_epochs": 4, "logger": logger, "log_every_n_steps": 1},
        reward_funcs=[by_prompt(constant)],
        train_data=[*rows, *sums[4:12], *[{**row, "prompt": row["prompt"] + " "} for row in rows]],
        shuffle=False,
    )
    assert trainer.global_step == 4 and len(recorder.rounds) == 4
    assert [f["batch/empty_steps"] for f in recorder.figures] == [0, 1, 1, 0]
    assert [forward for *_, forward in recorder.steps] == [12, 0, 0, 12]
    first, *then, last = [*recorder.weights, vector(module)]
    assert all(torch.equal(weights, then[0]) for weights in then)
    assert not torch.equal(first, then[0]) and not torch.equal(then[-1], last)
    assert [r.version for r in recorder.rounds] == [0, 1, 2, 3]
    check_conservation(recorder, 4, 4)


# Completions without a score, and those that the loss leaves out.


MASKED = {
    "max_completion_length": 24,
    "mask_truncated_completions": True,
    "num_generations": 6,
}


@pytest.mark.parametrize("others", [[], [DynamicSampling()]], ids=["alone", "dynamic"])
def test_what_is_masked_is_never_selected(fit, tiny_model, others):
    recorder = Recorder()
    callbacks = [recorder, DownSampling(2, advantage_scope="selected"), *others]
    fit(GRPO(tiny_model), callbacks, reward_funcs=[spread()], **MASKED)
    groups = [g for r in recorder.rounds for g in r.groups]
    drawn, left = ([c for g in groups for c in of(g)] for of in (lambda g: g.completions, kept))
    assert {c.finish_reason for c in drawn} == {"stop", "length"}
    assert {c.finish_reason for c in left} == {"stop"}
    assert {len(kept(g)) for g in groups} == {0, 2}
    assert (len(groups) > 4 * len(recorder.rounds)) == bool(others)


@pytest.mark.parametrize("scope", [None, "selected"])
def test_by_default_right_answers_beside_cut_ones_teach(fit, tiny_model, scope):
    def ended(prompts, completions, finish_reasons, **kwargs):
        return [float(reason == "stop") for reason in finish_reasons]

    recorder = Recorder()
    callbacks = [recorder, DownSampling(2, advantage_scope=scope)]
    fit(GRPO(tiny_model), callbacks, reward_funcs=[ended], **MASKED)
    left = [c for r in recorder.rounds for c in r.completions if c.dropped is None]
    assert bool(left) == (scope is None)
    assert all(c.finish_reason == "stop" and c.advantage > 0 for c in left)


def test_what_has_no_score_is_never_selected(fit, tiny_model):
    def some(prompts, completions, completion_ids, **kwargs):
        values = [sum(ids) % 6 for ids in completion_ids]
        return [float("nan") if v == 3 else None if v > 3 else float(v) for v in values]

    recorder, module = Recorder(), GRPO(tiny_model, learning_rate=0.0)
    fit(module, [recorder, DownSampling(2)], {"max_epochs": 10}, reward_funcs=[some])
    seen, reasons = Counter(), Counter()
    for g in (g for r in recorder.rounds for g in r.groups):
        scored = [c for c in g.completions if c.scores != [None]]
        seen[len(scored)] += 1
        reasons += Counter(c.dropped for c in g.completions if c.dropped)
        assert {c.dropped for c in g.completions if c not in scored} <= {"unscored"}
        if len(scored) < 2:
            assert {c.dropped for c in scored} <= {"too_few_scores"}
        elif len(set(rewards(scored))) > 1:
            assert len(kept(g)) == 2 and all(c in scored for c in kept(g))
    assert set(seen) == {0, 1, 2, 3, 4}
    counters = check_conservation(recorder, 4, 4)
    assert {k[8:]: n for k, n in counters.items() if k.startswith("dropped/")} == reasons
    assert {"unscored", "too_few_scores", "down_sampled"} <= set(reasons)


# Stopping early.


def test_groups_stop_in_a_pool_and_however_long_rewards_take(fit, tiny_model):
    runs = []
    for delay in (0, 1):
        recorder, module = Recorder(), GRPO(tiny_model)
        stopping = DownSampling(2, early_stop=True, min_length_ratio=0)
        sorting = SortedBatching(3, mode="partial")
        callbacks = [recorder, stopping, sorting, MicroGroupSampling(9)]
        settings = {**STOPPING, "prompts_per_round": 3, "reward_funcs": [coin(delay)]}
        fit(module, callbacks, **settings)
        runs.append((recorder, vector(module)))
    (recorder, weights), (again, same) = runs
    assert recorder.trained == again.trained and recorder.stopped == again.stopped
    assert recorder.counters == again.counters
    assert torch.equal(weights, same)
    stopped = 0
    for g in (g for r in recorder.rounds for g in r.groups):
        assert all(c.finished and c.scored for c in g.completions)
        if len(g.completions) < 6:
            assert sorted(rewards(kept(g))) == [0, 1]
            stopped += 6 - len(g.completions)
    assert stopped == recorder.counters[-1]["dropped/stopped"] > 0


def test_a_reward_out_of_range_stops_nothing(fit):
    def wide(prompts, completions, completion_ids, **kwargs):
        return [float(ids[0] % 2) * 1.5 for ids in completion_ids]

    for high, stops in ((1.0, False), (1.5, True)):
        recorder = Recorder()
        stopping = DownSampling(4, early_stop=True, reward_range=(0, high), min_length_ratio=0)
        fit(callbacks=[recorder, stopping], **{**STOPPING, "reward_funcs": [wide]})
        counters = check_conservation(recorder, 6, 4)
        assert ("dropped/stopped" in counters) == stops
        mixed = [g for r in recorder.rounds for g in r.groups if len({*rewards(kept(g))}) == 2]
        assert mixed


@pytest.mark.slow
def test_after_a_round_that_was_too_short_the_next_is_decoded_in_full(fit, tmp_path):
    def run(epochs, folder, ratio=0.999, ckpt_path=None):
        recorder = Recorder()
        save = ModelCheckpoint(tmp_path / folder, save_last=True, every_n_epochs=1)
        callbacks = [recorder, DownSampling(4, early_stop=True, min_length_ratio=ratio), save]
        trainer = {"max_epochs": epochs, "enable_checkpointing": True}
        settings = {**STOPPING, "reward_funcs": [coin()]}
        _, module, _ = fit(None, callbacks, trainer, ckpt_path, **settings)
        return recorder, vector(module)

    whole, weights = run(4, "whole")
    stops = [len(stopped) > 0 for stopped in whole.stopped]
    assert stops == [True, False, True, False]
    ratios = [r.metrics["down_sampling/finished_over_drawn_length"] for r in whole.rounds]
    assert [ratio < 0.999 for ratio in ratios] == stops and ratios[1] == ratios[3] == 1
    part, _ = run(1, "part")
    rest, resumed = run(4, "part", ckpt_path=tmp_path / "part" / "last.ckpt")
    assert torch.equal(resumed, weights)
    assert part.trained + rest.trained == whole.trained
    assert all(run(3, "never", 0)[0].stopped)


@pytest.mark.mostly_slow("partial")
@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_the_guard_minds_what_stopping_did_and_not_what_sorting_did(fit, mode):
    """No group can stop, so nothing that the guard does could help."""
    recorder = Recorder()
    stopping = DownSampling(2, early_stop=True, reward_range=(-5, 5))
    callbacks = [recorder, stopping, SortedBatching(3, mode=mode)]
    long = {"num_generations": 3, "max_completion_length": 128, "prompts_per_round": 2}
    settings = {**STOPPING, **long, "reward_funcs": [coin()]}
    _, _, data = fit(callbacks=callbacks, trainer={"max_epochs": 3}, **settings)
    assert not any(recorder.stopped)
    for r in recorder.rounds:
        assert r.metrics["down_sampling/finished_over_drawn_length"] == 1
    assert (data.run.counters["num_discarded_tokens"] > 0) == (mode == "on_policy")


# With others.


def test_whole_groups_whatever_the_advantage(fit, tiny_model):
    """Where completions are compared with all of the update, sorting would deal them singly."""
    for callbacks, whole in (([], False), ([DownSampling(2)], True)):
        recorder = Recorder()
        sorting = SortedBatching(3, mode="partial")
        fit(
            REINFORCE(tiny_model),
            [recorder, sorting, *callbacks],
            {"max_epochs": 3},
            reward_funcs=[spread()],
            max_completion_length=64,
        )
        sizes = {len(g.completions) for r in recorder.rounds for g in r.groups}
        assert (sizes == {4}) == whole
        if whole:
            assert {len(kept(g)) for r in recorder.rounds for g in r.groups} == {2}
