import pytest

from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.rewards.functions import (
    SoftOverlongPunishment,
    countdown_reward,
    extract_answer,
    math_verify_reward,
    reasoning_gym_reward,
)
from lit_rlsched.settings import UsageError

FACTS = {"numbers": [3, 5, 7], "target": 9}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("7+5=12-3=9\n<answer>7+5-3</answer>", 1.0),
        ("<answer>7+5</answer>", 0.0),  # not all numbers
        ("<answer>7+5+3</answer>", 0.0),
        ("<answer>3</answer> no: <answer> 7 + 5 - 3 </answer>", 1.0),  # the last one counts
        ("7+5-3", 0.0),
        ("<answer>7+5-3", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>7/(5-5)-3</answer>", 0.0),
        ([{"role": "assistant", "content": "<answer>7+5-3</answer>"}], 1.0),
    ],
)
def test_countdown(completion: str, score: float) -> None:
    assert countdown_reward([completion], metadata=[FACTS]) == [score]


def test_countdown_gives_nothing_for_a_completion_cut_at_the_limit() -> None:
    solved = "<answer>7+5-3</answer>"
    reasons = ["stop", "length", None]
    assert countdown_reward([solved] * 3, metadata=[FACTS] * 3, finish_reasons=reasons) == [1, 0, 1]


def test_reasoning_gym_scores_as_the_data_set_does() -> None:
    import reasoning_gym

    for task in ("chain_sum", "leg_counting", "polynomial_equations"):
        data = reasoning_gym.create_dataset(task, size=2, seed=1)
        for entry in data:
            for given in (entry["answer"], "12", "1 2 3", "0.5"):
                assert reasoning_gym_reward(
                    [f"well: <answer>{given}</answer>"],
                    task=[task],
                    metadata=[entry["metadata"]],
                    answer=[entry["answer"]],
                    question=[entry["question"]],
                ) == [data.score_answer(given, entry)], (task, given)


def test_the_last_answer_is_found_as_the_library_finds_it() -> None:
    from reasoning_gym.utils import extract_answer as theirs

    texts = ["", "<answer>", "<answer></answer>", "<answer> a <answer>b</answer>c</answer>"]
    texts += ["</answer><answer>x\n</answer><answer>y", "<answer>1</answer> <answer>\t2 </answer>"]
    assert [extract_answer(text) for text in texts] == [theirs(text) for text in texts]
    assert extract_answer("<answer>" * 100_000) is None  # theirs takes minutes


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [
        (r"so it is \boxed{\frac{2}{4}}", "1/2", 1.0),
        (r"so it is \boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1.0),
        (r"first $3$, then \boxed{4}", "4", 1.0),
        ("The answer is 42.", 42, 1.0),
        ("The answer is 41.", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("$x+1$", "$1+x$", 1.0),
        ("42", "???", None),
        (r"\boxed{72}", "Half of $96 is $<<96/2=48>>48, so $1,048 is left.\n#### 1,048", 0.0),
        (r"\boxed{1048}", "Half of $96 is $<<96/2=48>>48, so $1,048 is left.\n#### 1,048", 1.0),
        ([{"role": "assistant", "content": r"\boxed{42}"}], "42", 1.0),
    ],
)
def test_math_verify(completion: str, gold: object, score: float | None) -> None:
    assert math_verify_reward([completion], answer=[gold]) == [score]
    assert math_verify_reward([completion], solution=[gold]) == [score]


def test_soft_overlong_punishment() -> None:
    punish = SoftOverlongPunishment(max_completion_length=100, soft_punish_cache=20)
    lengths = [0, 80, 81, 90, 100, 101]
    assert punish(completion_ids=[[1] * n for n in lengths]) == [0, 0, -0.05, -0.5, -1, -1]
    with pytest.raises(UsageError, match="`soft_punish_cache=200` must be between 1 and"):
        SoftOverlongPunishment(100, 200)


def test_the_verifiers_in_a_worker() -> None:
    functions = [countdown_reward, math_verify_reward, SoftOverlongPunishment(4, 2)]
    with RewardScheduler(functions, timeout=2.0) as scheduler:
        assert scheduler.names[2] == "soft_overlong_punishment_reward"
        for reason in ("stop", "length"):
            scheduler.submit(
                reason,
                prompt="",
                completion="<answer>7+5-3</answer> is $9$",
                completion_ids=[1, 2, 3],
                columns={"metadata": FACTS, "answer": "9", "finish_reasons": reason},
            )
        scores = {}
        while scheduler.wait():
            scores |= {job.job_id: job.scores for job in scheduler.poll()}
    assert scores == {"stop": [1.0, 1.0, -0.5], "length": [0.0, 1.0, -0.5]}
