import pytest
import torch

from lit_rlsched.run.evaluation import (
    Evaluated,
    EvaluationSettings,
    check_scored,
    evaluate,
    never_correct,
)
from lit_rlsched.run.trainer import StepMetrics
from lit_rlsched.settings import RunFailed
from lit_rlsched.types import Completion, Group, Prompt, Sampling

SAMPLING = Sampling(8, temperature=0.7)


def answered(scores, reason="stop"):
    completions = [
        Completion(i, [1] * (i + 1), [-1.0] * (i + 1), [], reason, scores=score)
        for i, score in enumerate(scores)
    ]
    return Group("g", Prompt("p", "x", (1,)), SAMPLING, completions)


def test_figures_by_hand():
    sampled = answered([[1.0, 0.5], [0.0, 0.5], [None, None], [0.99, 0.0]])
    figures = Evaluated(answered([[0.0, 1.0]]), sampled, [1.0, 2.0]).metrics()
    assert figures == {
        "greedy_accuracy": 0.0,
        "mean@4": 0.25,
        "pass@4": 1.0,
        "accuracy": 0.25,
        "reward": (2.0 + 1.0 + 0.0 + 0.99) / 4,
        "completions/mean_length": 2.5,
        "completions/clipped_ratio": 0.0,
    }


def test_the_threshold_says_what_is_correct():
    sampled = answered([[0.6], [0.4], [None], [0.5]])
    figures = Evaluated(None, sampled, [1.0], threshold=0.5).metrics()
    assert (figures["accuracy"], figures["pass@4"]) == (0.5, 1.0)


def test_fractions_that_never_count_are_said():
    def said(*scores, threshold=1.0):
        return never_correct(
            [Evaluated(None, answered([[s] for s in scores]), [1.0])], "f", threshold
        )

    assert "`f` gave 0.6 at most, below `val_accuracy_threshold=1.0`" in said(0.6, 0.2, None)
    assert said(0.0, 0.0, None) is None, "wrong, as an untrained model is"
    assert said(0.6, 1.0) is said(0.6, threshold=0.5) is said() is None


def test_held_out_completions_without_any_score_are_an_error():
    unscored, scored = answered([[None, None], [None, None]]), answered([[None, 0.0]])
    for completion in unscored.completions:
        completion.failure = "`f`: raised: KeyError"
    with pytest.raises(RunFailed, match="None of the 2 completions of held-out prompts has a rew"):
        check_scored([Evaluated(None, unscored, [1.0, 1.0])])
    check_scored([Evaluated(scored, unscored, [1.0, 1.0])])


def test_greedy_alone_is_the_accuracy():
    figures = Evaluated(answered([[1.0]], reason="length"), None, [1.0]).metrics()
    assert figures["accuracy"] == figures["greedy_accuracy"] == 1.0
    assert figures["completions/clipped_ratio"] == 1.0


def test_answers_come_in_the_order_of_the_data_and_the_rollout_is_closed_with_the_last():
    prompts = [Prompt(str(i), "x", (1,)) for i in range(4)]
    closed = []

    def backwards(groups):
        assert [g.sampling.temperature for g in groups] == [0.0, 0.7] * 4
        try:
            for group in reversed(groups):
                for completion in group.completions:
                    completion.scores = [1.0]
                yield group
        finally:
            closed.append(True)

    settings = EvaluationSettings(SAMPLING, num_generations=2, greedy=True)
    items = evaluate(prompts, settings, "val", backwards, [1.0])
    seen = [next(items).greedy.prompt.uid for _ in range(4)]
    assert seen == ["0", "1", "2", "3"]
    assert closed == [True]  # though nobody asked for a fifth


def test_step_metrics_are_weighted_by_tokens():
    metrics = StepMetrics()
    one = {"entropy": torch.tensor(1.0), "x/min": torch.tensor(3.0), "x/max": torch.tensor(3.0)}
    two = {"entropy": torch.tensor(4.0), "x/min": torch.tensor(2.0), "x/max": torch.tensor(2.0)}
    metrics.update(one, weight=1.0)
    metrics.update(two, weight=2.0)
    assert metrics.compute() == {"entropy": 3.0, "x/min": 2.0, "x/max": 3.0}
    assert StepMetrics().compute() == {}
