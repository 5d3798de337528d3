"""Judges that an engine of their own decodes, inside the reward worker."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import collect, submit
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.rewards.engine_judge import EngineJudgeReward
from lit_rlsched.settings import UsageError

MODEL = str(Path(__file__).parents[2] / "examples" / "countdown" / "model")
SETTINGS: dict[str, Any] = {
    "template": "{completion}",
    "score_pattern": r"(\d+)",
    "score_range": (0, 100),
    "max_tokens": 200,
    "max_model_len": 400,
}
"""The model of the quick task answers puzzles: the last number it says stands for a grade."""
QUESTIONS = [f"Numbers: {a}, {a + 2}, {a + 5}. Target: {a + 7}." for a in range(2, 14)]


def said_by_generate(question: str) -> str:
    """The greedy answer as transformers itself gives it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = policy.generate(**inputs, do_sample=False, max_new_tokens=200)[0]
    return tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_a_second_vllm_engine_judges_many_at_once() -> None:
    judge = EngineJudgeReward(MODEL, VLLMEngine(), slots=4, **SETTINGS)
    questions = [*QUESTIONS, "1" * 300]
    with RewardScheduler([judge], timeout=100.0) as scheduler:
        for question in questions:
            submit(scheduler, question, question)
        jobs = collect(scheduler, 120.0)
        counters = scheduler.counters()
    too_long = jobs.pop(questions[-1])
    assert str(too_long.failures[0]).startswith(
        "no_answer: max_model_len=400 is too little for a question"
    )
    assert counters.pop("rewards/judge/no_answers") == 1
    scores = [job.scores[0] for job in jobs.values()]
    assert counters.pop("rewards/judge/unparsed") == scores.count(None) < len(scores) / 2
    assert not any(counters.values())
    for question in QUESTIONS[:3]:
        said = said_by_generate(question)
        assert jobs[question].extra == {"judge_answer": said}
        assert jobs[question].scores == [judge.score(said)]


def run_in_process(use: Callable, **settings: Any) -> Any:
    judge = EngineJudgeReward(MODEL, TransformersEngine(), **{**SETTINGS, **settings})
    judge.warm_up()
    return asyncio.run(use(judge))


def test_special_tokens_in_a_completion_are_text() -> None:
    judge = EngineJudgeReward(MODEL, TransformersEngine(), **SETTINGS)
    special = AutoTokenizer.from_pretrained(MODEL).all_special_tokens
    question = judge.question("p", f"x{''.join(special)}y", {})
    assert special and not any(token in question for token in special)


def test_answers_do_not_depend_on_the_company() -> None:
    async def use(judge: EngineJudgeReward) -> list[Any]:
        asked = [judge.answer(question) for question in QUESTIONS]
        return [
            answer if isinstance(answer, str) else type(answer)
            for answer in await asyncio.gather(*asked, return_exceptions=True)
        ]

    assert run_in_process(use, slots=1) == run_in_process(use, slots=12)


def test_a_question_whose_time_is_up_leaves_the_engine() -> None:
    async def use(judge: EngineJudgeReward) -> None:
        asked = [asyncio.create_task(judge.answer(question)) for question in QUESTIONS[:3]]
        while judge.engine.stats().decode_steps < 3:
            await asyncio.sleep(0)
        asked[0].cancel()  # it runs
        asked[2].cancel()  # it waits for a slot
        assert await asked[1] == said_by_generate(QUESTIONS[1])
        assert asked[0].cancelled() and asked[2].cancelled()
        assert judge.engine.stats().running == 0
        assert await judge.answer(QUESTIONS[0]) == said_by_generate(QUESTIONS[0])

    run_in_process(use, slots=2)


def test_an_engine_that_fails_fails_what_was_asked_and_goes_on() -> None:
    async def use(judge: EngineJudgeReward) -> None:
        step = judge.engine.step
        judge.engine.step = lambda: 1 / 0  # type: ignore[method-assign]
        asked = [judge.answer(question) for question in QUESTIONS[:3]]
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, ZeroDivisionError)
        judge.engine.step = step  # type: ignore[method-assign]
        assert judge.engine.stats().running == 0
        assert await judge.answer(QUESTIONS[0]) == said_by_generate(QUESTIONS[0])

    run_in_process(use, slots=2)


def test_a_model_that_cannot_judge_is_refused_at_the_start(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    judge = EngineJudgeReward(str(tmp_path), TransformersEngine())
    with pytest.raises(UsageError, match="its tokenizer has no chat template"):
        judge.warm_up()
