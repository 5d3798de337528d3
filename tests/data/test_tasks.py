import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.rows import load_rows
from lit_rlsched.data.tasks import Countdown, ReasoningGym
from lit_rlsched.processes import keep_heap
from lit_rlsched.rewards.functions import countdown_reward, reasoning_gym_reward
from lit_rlsched.settings import UsageError

SHIPPED = Path(__file__).parents[2] / "examples/countdown/model"

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def train() -> Rows:
    return Countdown("train", size=600).rows()


@pytest.fixture(scope="module")
def heldout() -> Rows:
    return Countdown("heldout", size=200).rows()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype="auto").eval()


def problem(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*sorted(row["metadata"]["numbers"]), row["metadata"]["target"])


def test_countdown_rows_say_what_the_task_is(train: Rows) -> None:
    sizes = Counter(row["size"] for row in train)
    assert sizes == {2: 120, 3: 300, 4: 180}
    assert len({row["uid"] for row in train}) == len({row["question"] for row in train}) == 600
    for row in train:
        numbers, target = row["metadata"]["numbers"], row["metadata"]["target"]
        assert len(numbers) == row["size"]
        assert set(numbers) <= set(range(1, 10))
        assert 1 <= target <= 20
        assert row["prompt"] == [{"role": "user", "content": row["question"]}]
        assert "\n\n" not in row["question"]
        assert ", ".join(map(str, numbers)) in row["question"]
        assert set(row["answer"]) <= set("0123456789+- ")
    assert json.loads(json.dumps(train)) == train


def test_countdown_answers_score_one_and_others_do_not(train: Rows) -> None:
    rows = train[:40]
    metadata = [row["metadata"] for row in rows]
    right = [f"<answer>{row['answer']}</answer>" for row in rows]
    assert countdown_reward(right, metadata=metadata) == [1.0] * 40
    wrong = [f"<answer>{row['answer']} + 1</answer>" for row in rows]
    assert countdown_reward(wrong, metadata=metadata) == [0.0] * 40


def test_no_problem_is_in_both_splits(train: Rows, heldout: Rows) -> None:
    assert not set(map(problem, train)) & set(map(problem, heldout))
    other_seed = Countdown("train", size=300, seed=5).rows()
    assert not set(map(problem, other_seed)) & set(map(problem, heldout))
    assert {row["uid"] for row in other_seed} != {row["uid"] for row in train}


def test_rows_are_the_same_every_time(heldout: Rows) -> None:
    assert Countdown("heldout", size=200).rows() == heldout


def test_larger_sizes_fill_in_for_a_size_that_runs_out() -> None:
    rows = Countdown("train", size=150, numbers={2: 0.9, 3: 0.1}, max_value=4).rows()
    sizes = Counter(row["size"] for row in rows)
    assert len(rows) == 150
    assert sizes[2] < 100
    with pytest.raises(UsageError, match=r"found only \d+ different prompts.*smaller `size`"):
        Countdown("train", size=150, numbers={2: 1.0}, max_value=3).rows()


@pytest.mark.slow
def test_four_thousand_prompts() -> None:
    rows = Countdown("train", size=4000).rows()
    assert Counter(row["size"] for row in rows) == {2: 353, 3: 2279, 4: 1368}


def test_reasoning_gym_rows_are_split_and_score_one() -> None:
    settings = {"min_terms": 2, "max_terms": 3}
    train = ReasoningGym("chain_sum", size=30, config=settings, instructions="Add.").rows()
    heldout = ReasoningGym("chain_sum", "heldout", size=30, config=settings).rows()
    assert len({row["uid"] for row in train + heldout}) == 60
    assert train[0]["prompt"][0]["content"] == "Add.\n\n" + train[0]["question"]
    columns = {name: [row[name] for row in train] for name in ("task", "answer", "metadata")}
    answers = [f"<answer>{row['answer']}</answer>" for row in train]
    assert reasoning_gym_reward(answers, **columns) == [1.0] * 30


def test_shipped_model_loads_and_is_the_one_described(model: Any, tokenizer: Any) -> None:
    assert model.num_parameters() == 449_632
    assert model.dtype == torch.float32
    assert model.config.model_type == "qwen3"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 2_000_000


def test_shipped_tokenizer_round_trips_prompts_and_completions(
    tokenizer: Any, train: Rows, heldout: Rows
) -> None:
    prompts = make_prompts(load_rows(train + heldout), tokenizer, max_prompt_length=64)
    for prompt, row in zip(prompts, train + heldout, strict=True):
        assert prompt.uid == row["uid"]
        assert prompt.token_ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(prompt.token_ids[1:]) == row["question"] + "\n"
    text = "5+3=8-2=6 12 n\n3+5+4=12 12 y\n<answer>3+5+4</answer>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert [t for t in tokenizer.convert_ids_to_tokens(ids) if "<" in t] == [
        "<answer>",
        "</answer>",
    ]


def test_shipped_chat_template_extends_itself(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert whole == prompt + "b" + tokenizer.eos_token


@torch.inference_mode()
def test_shipped_model_searches_and_sometimes_finds(
    model: Any, tokenizer: Any, heldout: Rows
) -> None:
    rows = heldout[:100]
    inputs = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=200)
    texts = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    scores = countdown_reward(texts, metadata=[row["metadata"] for row in rows])
    assert 0.2 < sum(scores) / len(rows) < 0.6
    assert math.isclose(sum(text.endswith("</answer>") for text in texts), 100, abs_tol=5)


def test_keep_heap_reports_whether_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert keep_heap() is False
