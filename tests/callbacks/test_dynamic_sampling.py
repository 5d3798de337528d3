from collections import defaultdict
from statistics import fmean

import pytest
import torch
from seen_rounds import Rounds

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    DownSampling,
    DynamicSampling,
    LengthPrediction,
    MicroGroupSampling,
    PromptBudget,
    PromptChoice,
    RolloutLogger,
    RolloutWindow,
)
from lit_rlsched.callbacks.report.collect import run_data
from lit_rlsched.data.source import PromptSource
from lit_rlsched.training.advantages import group_relative

ROWS = [
    {"prompt": f"{a}*{b}=", "answer": str((a * b + a) % 3), "uid": f"{a}*{b}"}
    for a in range(9)
    for b in range(4)
]
"""Prompts whose answer is 0 teach nothing: some of 36."""


def teaches(prompt):
    return prompt.columns["answer"] != "0"


def reward(delay=0, unscored=False):
    """Differs between completions, but for prompts with the answer 0."""

    def reward(prompts, completions, completion_ids, answer, **kwargs):
        import time

        time.sleep(delay * (sum(completion_ids[0]) % 4) / 1000)
        if unscored and answer[0] == "0":
            return [None]
        values = [sum(k * t for k, t in enumerate(ids, 1)) % 997 / 997 for ids in completion_ids]
        return [0.5 if a == "0" else v for a, v in zip(answer, values, strict=True)]

    return reward


class Recorder(Rounds):
    def on_round_end(self, trainer, pl_module, round):
        super().on_round_end(trainer, pl_module, round)
        run = trainer.datamodule.run
        assert not run.session.worker.busy and len(run.pool) == 0

    @property
    def groups_of_steps(self):
        return [len({row.group.id for row in step.samples}) for step in self.steps]

    @property
    def trained(self):
        """Groups of each round that are trained on, and with which completions."""
        return [
            [
                (g.id, [(c.index, c.token_ids) for c in g.completions if not c.dropped])
                for g in r.groups
                if any(not c.dropped for c in g.completions)
            ]
            for r in self.rounds
        ]


def expected(data, rounds, size, bound):
    """Prompts drawn and those trained on, by the data's order and what is known to teach."""
    source = PromptSource(
        data.run.startup.prompts.train, data.run.settings.seed, data.run.settings.shuffle
    )
    drawn, trained = [], []
    for _ in range(rounds):
        taken = source.draw(size)
        while sum(teaches(d.prompt) for d in taken) < size and len(taken) < size * bound:
            taken += source.draw(1, {d.prompt.uid for d in taken})
        drawn.append([d.key for d in taken])
        trained.append([d.key for d in taken if teaches(d.prompt)])
    return drawn, trained


def check(recorder, data, size=4, bound=4, generations=4):
    """Every prompt that was drawn is trained on, or all of its completions are counted."""
    drawn, trained = expected(data, len(recorder.rounds), size, bound)
    assert [[g.id for g in r.groups] for r in recorder.rounds] == drawn
    assert [[name for name, _ in groups] for groups in recorder.trained] == trained
    assert sorted(recorder.groups) == sorted(name for names in drawn for name in names)
    kept = prompts = 0
    for r, counters, plan in zip(recorder.rounds, recorder.counters, recorder.planned, strict=True):
        assert len(plan) == size  # what was planned before anything was known
        assert r.metrics["dynamic_sampling/num_gen_batches"] == len(r.groups) / size
        assert len({g.prompt.uid for g in r.groups}) == len(r.groups)
        prompts += len(r.groups)
        kept += sum(c.dropped is None for c in r.completions)
        dropped = sum(n for k, n in counters.items() if k.startswith("dropped/"))
        assert kept + dropped == generations * prompts
    return drawn


@pytest.mark.slow
def test_the_prompts_of_a_round_follow_from_the_data_and_the_rewards(fit):
    """Not from slots, orders, or how long rewards take."""
    trained = []
    slots = MicroGroupSampling(5, order="longest_first")
    for delay, others in ((0, []), (1, [slots, LengthPrediction(probe_tokens=4)])):
        recorder = Recorder()
        _, _, data = fit(
            callbacks=[recorder, DynamicSampling(), *others],
            train_data=ROWS,
            reward_funcs=[reward(delay)],
            reward_workers=1 + delay,
        )
        drawn = check(recorder, data)
        assert any(len(names) > 4 for names in drawn)
        assert recorder.groups_of_steps == [4, 4]
        trained.append(recorder.trained)
    assert trained[0] == trained[1]  # tokens too


@pytest.mark.parametrize("unscored", [False, True])
def test_at_the_bound_a_round_trains_on_what_there_is(fit, unscored):
    """One prompt in three teaches at first, then none."""
    recorder = Recorder()
    poor = [r for r in ROWS if r["answer"] == "0"]
    good = [r for r in ROWS if r["answer"] != "0"]
    rows = [poor[0], good[0], *poor[1:4], good[1], *poor[4:14], *good[2:10]]
    _, _, data = fit(
        callbacks=[recorder, DynamicSampling(2)],
        trainer={"max_epochs": 1 if unscored else 3},
        train_data=rows,
        reward_funcs=[reward(unscored=unscored)],
        shuffle=False,
    )
    check(recorder, data, 4, 2)
    if unscored:
        assert recorder.counters[-1]["dropped/unscored"] == 6 * 4
        return
    assert [len(groups) for groups in recorder.trained] == [2, 0, 4]
    assert [r.metrics["batch/empty_steps"] for r in recorder.rounds] == [0, 1, 0]
    assert [r.metrics["dynamic_sampling/num_gen_batches"] for r in recorder.rounds] == [2, 2, 1]
    assert recorder.counters[-1]["dropped/uninformative"] == 14 * 4
    assert data.run.counters["num_completions"] == 20 * 4


def test_with_down_sampling(fit, tiny_model):
    recorder = Recorder()
    callbacks = [recorder, DynamicSampling(), DownSampling(2), MicroGroupSampling(5)]
    settings = {"train_data": ROWS, "reward_funcs": [reward(1)], "steps_per_round": 2}
    _, _, data = fit(GRPOModule(tiny_model), callbacks, **settings)
    check(recorder, data)
    assert all(len(kept) == 2 for groups in recorder.trained for _, kept in groups)
    assert recorder.groups_of_steps == [2, 2, 2, 2]
    counters = recorder.counters[-1]
    assert counters["dropped/down_sampled"] == 2 * 4 * 2
    uninformative = sum(len(r.groups) - 4 for r in recorder.rounds) * 4
    assert counters["dropped/uninformative"] == uninformative > 0


def test_it_is_logged_and_reported_how_prompts_were_chosen(fit, tmp_path):
    recorder, last, means = Rounds(), {}, defaultdict(list)
    settings = {"train_data": ROWS, "reward_funcs": [reward()], "num_generations": 3}
    callbacks = [recorder, PromptChoice("thompson", explore=0.25)]
    save = {"default_root_dir": tmp_path}
    fit(callbacks=[*callbacks, RolloutLogger()], trainer=save | {"max_epochs": 12}, **settings)
    for round in recorder.rounds:
        for group in round.groups:
            means[group.prompt.uid].append(fmean(c.scores[0] for c in group.completions))
        last |= {g.prompt.uid: teaches(g.prompt) for g in round.groups}
        in_order = [g.id for g in round.groups if "@c" not in g.id]
        assert round.metrics["prompt_choice/explored_share"] == len(in_order) / 4 == 0.25
        assert round.metrics["prompt_choice/known_prompts"] == len(last)
        share = 1 - sum(last.values()) / len(last)
        assert round.metrics["prompt_choice/known_zero_std"] == pytest.approx(share)
    assert len({g.id for r in recorder.rounds for g in r.groups}) == 4 * 12
    reported = run_data(tmp_path)["prompts"]
    assert len(reported) == len(means) and max(often for _, often, *_ in reported) > 1
    for uid, often, first, newest in reported:
        assert often == len(means[uid])
        assert (first, newest) == pytest.approx((means[uid][0], means[uid][-1]), rel=1e-3)


def first_round(fit, *callbacks, delay=0):
    recorder = Rounds()
    settings = {"train_data": ROWS, "reward_funcs": [reward(delay)], "reward_workers": 1 + delay}
    fit(callbacks=[recorder, *callbacks], trainer={"max_epochs": 1}, **settings)
    return recorder


@pytest.mark.mostly_slow("few slots", "dynamic")
@pytest.mark.parametrize(
    "others",
    [
        lambda: [],
        lambda: [MicroGroupSampling(3, order="longest_first"), LengthPrediction(probe_tokens=4)],
        lambda: [RolloutWindow(8)],
        lambda: [DynamicSampling(2)],
        lambda: [DownSampling(2)],
    ],
    ids=["alone", "few slots", "window", "dynamic", "down-sampling"],
)
def test_a_prompt_whose_first_rewards_are_equal_gets_no_more_completions(fit, others):
    """Those that it gets are those of a plain round, whatever slots and rewards take."""
    whole = {g.id: [c.token_ids for c in g.completions] for g in first_round(fit).rounds[0].groups}
    for delay in (0, 1):
        run = first_round(fit, PromptBudget(2), *others(), delay=delay)
        (found,) = run.rounds
        sizes = [4 if teaches(group.prompt) else 2 for group in found.groups]
        assert [len(group.completions) for group in found.groups] == sizes and 2 in sizes
        for group in found.groups:
            if group.id in whole:  # else it replaces one
                drawn = [c.token_ids for c in group.completions]
                assert drawn == whole[group.id][: len(drawn)]
        assert found.metrics["prompt_budget/whole_share"] == sizes.count(4) / len(sizes)
        assert run.counters[0]["dropped/stopped"] == 2 * sizes.count(2)
        assert len(run.completions) == sum(sizes) == len({id(c) for c in run.completions})
        for group in found.groups:
            kept = [c for c in group.completions if not c.dropped]
            rewards = torch.tensor([[c.scores[0] for c in kept]], dtype=torch.float64)
            if len(kept) > 1:
                advantages = group_relative(rewards)[0].tolist()
                assert [c.advantage for c in kept] == pytest.approx(advantages, abs=1e-9)
