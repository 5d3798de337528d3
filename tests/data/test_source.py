import json
import warnings
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import jsonargparse
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.rows import Rows, load_rows
from lit_rlsched.data.source import PromptSource
from lit_rlsched.data.tasks import Countdown, HubDataset
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Prompt

Tokenizer = Any

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), (i,)) for i in range(count)]


def test_hub_names_carry_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"question": "1+1"}, {"question": "2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load_rows(HubDataset("openai/gsm8k", "main", "test[:2]", prompt_column="question"))
    assert [row["prompt"] for row in rows] == ["1+1", "2"]
    instructed = HubDataset("openai/gsm8k", prompt_column="question", instructions="Think.")
    assert instructed.rows()[1]["prompt"] == [{"role": "user", "content": "Think.\n\n2"}]
    for spec in ("org/name", "org/name:test"):
        with pytest.raises(UsageError, match="no column `prompt`"):
            load_rows(spec)
    assert asked[2:] == [("org/name", None, s) for s in ("train", "test")]


def test_a_chat_on_the_hub_takes_no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1"}]}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: chats)
    with pytest.raises(UsageError, match="`prompt` of `org/name` holds chat messages"):
        HubDataset("org/name", instructions="Think.").rows()


def test_bad_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.parquet"):
        load_rows(tmp_path / "missing.parquet")
    with pytest.raises(UsageError, match=r"x\.csv` does not exist"):
        load_rows(str(tmp_path / "x.csv"))
    with pytest.raises(UsageError, match=r"not one that `datasets.save_to_disk` wrote"):
        load_rows(tmp_path)
    (tmp_path / "rows.json").write_text('{"prompt": "a"}')
    with pytest.raises(UsageError, match="It must hold a list of rows"):
        load_rows(tmp_path / "rows.json")
    splits = datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UsageError, match=r"has no split `train`, only \['test'\].*or its folder"):
        load_rows(tmp_path / "splits")
    assert list(load_rows(tmp_path / "splits" / "test")) == ROWS
    with pytest.raises(UsageError, match="Cannot read prompts from a int"):
        load_rows(3)


def test_jsonargparse_reads_every_kind_of_rows() -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--data", type=Rows)
    assert parser.parse_args(["--data", "org/name:test"]).data == "org/name:test"
    assert parser.parse_object({"data": deepcopy(ROWS)}).data == ROWS
    task = {"class_path": "Countdown", "init_args": {"split": "heldout", "numbers": {3: 1.0}}}
    built = parser.instantiate_classes(parser.parse_object({"data": task})).data
    assert isinstance(built, Countdown)
    assert (built.split, built.size, built.numbers) == ("heldout", 4000, {3: 1.0})


def test_template_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if think %} think{% endif %}"
    rows = [{"prompt": [{"role": "user", "content": "a"}]}]
    (prompt,) = make_prompts(
        rows, tokenizer, max_prompt_length=64, chat_template_kwargs={"think": True}
    )
    assert tokenizer.decode(prompt.token_ids) == "a think"
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        make_prompts(rows, tokenizer, max_prompt_length=64)


def test_each_text_is_tokenised_once(tokenizer: Tokenizer) -> None:
    seen: list[str] = []

    def spy(text: list[str], **settings: Any) -> Any:
        seen.extend(text)
        return tokenizer(text=text, **settings)

    rows = [{"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": "2"}, {"prompt": "y"}]
    one, two, _ = make_prompts(rows, spy, max_prompt_length=64)
    assert [*filter("a".__ne__, seen)] == ["x", "y"]  # of "a" it learns the special tokens
    assert one.uid != two.uid
    assert one.token_ids == two.token_ids


def test_equal_rows_are_kept_once_and_counted(tokenizer: Tokenizer) -> None:
    rows = [*ROWS, ROWS[0], {**ROWS[0], "answer": "11"}, {"answer": "4", "prompt": "2+2"}]
    assert load_rows(rows).unique()[1] == [2, 4]
    with pytest.warns(UserWarning, match=r"2 of 5 rows .*row 2: '1\+1'"):
        prompts = make_prompts(rows, tokenizer, max_prompt_length=64)
    assert [(p.text, p.columns["answer"]) for p in prompts] == [
        ("1+1", "2"), ("2+2", "4"), ("1+1", "11"),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_prompts(ROWS, tokenizer, max_prompt_length=64)


def test_a_row_keeps_its_name_in_other_company(tokenizer: Tokenizer) -> None:
    alone = make_prompts(ROWS[:1], tokenizer, max_prompt_length=64)[0].uid
    more = make_prompts([{"prompt": "1+1"}, *ROWS[::-1]], tokenizer, max_prompt_length=64)
    assert alone == more[2].uid == "47a205f4b3752022"


def test_long_and_empty_prompts_are_refused_and_never_cut(tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "abc"}, {"prompt": "abcde", "uid": "five"}, {"prompt": "abcdefg"}]
    message = (
        r"row 1 \(uid five\) has 5 tokens.*`max_completion_length` is 4.*2 of 3 .*longest with 7"
    )
    with pytest.raises(UsageError, match=message):
        make_prompts(rows, tokenizer, max_prompt_length=4)
    tokenizer.backend_tokenizer.enable_truncation(4)
    prompts = make_prompts(rows, tokenizer, max_prompt_length=7)
    assert [len(prompt.token_ids) for prompt in prompts] == [3, 5, 7]
    tokenizer.chat_template = "{# nothing #}"
    chats = [{"prompt": [{"role": "user", "content": "a"}]}]
    with pytest.raises(UsageError, match=r"row 0 .* has no tokens"):
        make_prompts(chats, tokenizer, max_prompt_length=7)


@given(
    size=st.integers(1, 12),
    draws=st.lists(st.floats(0, 1), max_size=20),
    stop=st.integers(0, 20),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_draws_conserve_prompts_and_resume_where_they_stopped(
    size: int, draws: list[float], stop: int, seed: int, shuffle: bool
) -> None:
    source = PromptSource(prompts_of(size), seed, shuffle)
    counts = [round(share * size) for share in draws]
    seen = []
    for turn, count in enumerate(counts):
        if turn == stop:
            state = json.loads(json.dumps(source.state_dict()))
            source = PromptSource(prompts_of(size), seed, shuffle)
            source.load_state_dict(state)
        drawn = source.draw(count)
        assert len({draw.prompt.uid for draw in drawn}) == len(drawn) == count
        seen += drawn

    never_stopped = PromptSource(prompts_of(size), seed, shuffle)
    assert [draw for count in counts for draw in never_stopped.draw(count)] == seen
    assert len({draw.key for draw in seen}) == len(seen)
    per_pass = Counter(draw.epoch for draw in seen)
    assert all(per_pass[epoch] == size for epoch in range(source.epoch))
    assert set(per_pass) <= set(range(source.epoch + 1))
    assert [draw.epoch for draw in seen] == sorted(draw.epoch for draw in seen)


def test_a_draw_over_the_end_of_a_pass_by_hand() -> None:
    source = PromptSource(prompts_of(4), seed=0, shuffle=False)
    keys = [[draw.key for draw in source.draw(3)] for _ in range(4)]
    assert keys == [
        ["p0@0", "p1@0", "p2@0"],
        ["p3@0", "p0@1", "p1@1"],
        ["p2@1", "p3@1", "p0@2"],
        ["p1@2", "p2@2", "p3@2"],
    ]
    source = PromptSource(prompts_of(3), seed=0, shuffle=False)
    source.draw(2)
    source.load_state_dict(source.state_dict() | {"offset": 1, "deferred": [(0, 0)]})
    assert [draw.key for draw in source.draw(3)] == ["p0@0", "p1@0", "p2@0"]


@given(size=st.integers(1, 12), each=st.integers(1, 12), passes=st.integers(1, 4))
def test_passes_of_whole_rounds_are_those_of_trl(size: int, each: int, passes: int) -> None:
    source = PromptSource(prompts_of(size), 0, shuffle=False, multiple=each)
    sampler = RepeatSampler(range(size), mini_repeat_count=1, batch_size=each, shuffle=False)
    theirs = [f"p{index}" for _ in range(passes) for index in sampler]
    drawn = [draw for _ in range(len(theirs) // each) for draw in source.draw(each)]
    assert [draw.prompt.uid for draw in drawn] == theirs
    shuffled = PromptSource(prompts_of(size), 0, multiple=each)
    keys = [draw.key for _ in range(len(theirs) // each) for draw in shuffled.draw(each)]
    assert len({*keys}) == len(keys) == len(theirs)
    assert {key.partition("@")[2] for key in keys} <= {str(epoch) for epoch in range(passes)}


def test_each_pass_has_its_own_order_fixed_by_the_seed() -> None:
    source = PromptSource(prompts_of(50), seed=3)
    orders = [[draw.prompt.uid for draw in source.draw(50)] for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert PromptSource(prompts_of(6), seed=0).order(1).tolist() == [4, 0, 3, 2, 5, 1]
    assert orders[0] != [draw.prompt.uid for draw in PromptSource(prompts_of(50), 4).draw(50)]


def test_more_than_there_are_is_refused() -> None:
    source = PromptSource(prompts_of(3), seed=0)
    with pytest.raises(UsageError, match=r"`prompts_per_round=4`.*Use 3 or less"):
        source.draw(4)
    assert source.draw(0) == []
    source = PromptSource(prompts_of(5), 0, shuffle=False, multiple=4)  # whole rounds alone
    with pytest.raises(UsageError, match=r"there are 4\. Use 4 or less"):
        source.draw(4, besides=["p0"])


@given(st.data())
def test_prompts_besides_those_in_hand(data: st.DataObject) -> None:
    """As a round draws that replaces prompts: whole, then one by one besides all of its own."""
    size = data.draw(st.integers(1, 9))
    source = PromptSource(prompts_of(size), seed=data.draw(st.integers(0, 3)))
    drawn: list[str] = []
    for _ in range(8):
        taken = source.draw(data.draw(st.integers(1, size)))
        for _ in range(data.draw(st.integers(0, size - len(taken)))):
            before = deepcopy(source)
            besides = {draw.prompt.uid for draw in taken}
            taken += source.draw(1, besides)
            assert before.draw(1, besides) == taken[-1:]
        assert len({draw.prompt.uid for draw in taken}) == len(taken)
        with pytest.raises(UsageError, match="at most once"):
            source.draw(size - len(taken) + 1, {draw.prompt.uid for draw in taken})
        drawn += [draw.key for draw in taken]
    assert len(set(drawn)) == len(drawn)
    passes = Counter(int(key.partition("@")[2]) for key in drawn)
    assert all(passes[epoch] == size for epoch in range(source.epoch))  # nobody is passed over


def test_besides_all_that_is_left_of_a_pass() -> None:
    """A pool may hold a prompt of the last pass that this one has not come to."""
    source = PromptSource(prompts_of(4), seed=0, shuffle=False)
    source.draw(3)
    (last,) = source.draw(1)  # still waits in the pool
    source.draw(3)
    (draw,) = source.draw(1, {last.prompt.uid})
    assert draw.prompt.uid != last.prompt.uid
