"""What a model reads of chat messages, and of strings beside a tokenizer's special tokens."""

from typing import Any

import datasets
import pytest
from character_tokenizer import make_tokenizer
from tokenizers.processors import TemplateProcessing

from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.rows import load_rows
from lit_rlsched.data.tokenizing import PromptTokenizer
from lit_rlsched.settings import UsageError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "so "}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "adds"}}
CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
    "<im_start>{{ m.role }}{% if 'name' in m %} {{ m.name }}{% endif %}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<im_end>\n{% endfor %}"
    "{% if add_generation_prompt %}<im_start>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def adding(before: str, after: str) -> Any:
    """A tokenizer that puts special tokens before and after each text."""
    tokenizer = make_tokenizer()
    tokens = [("<bos>", 2), ("<eos>", 1)]
    post = TemplateProcessing(f"{before} $A {after}".strip(), None, tokens)
    tokenizer.backend_tokenizer.post_processor = post
    return tokenizer


def reads(rows: Any, tokenizer: Any, **settings: Any) -> list[str]:
    """What the model reads of each row."""
    made = PromptTokenizer(tokenizer, settings)
    return [tokenizer.decode(ids) for ids in made([*load_rows(rows)])]


@pytest.fixture(params=[CHATML, LLAMA], ids=["chatml", "llama"])
def chatty(request: pytest.FixtureRequest) -> Any:
    """A tokenizer that adds BOS and EOS, with two families' kinds of chat template."""
    tokenizer = adding("<bos>", "<eos>")
    tokenizer.chat_template = request.param
    return tokenizer


def plain(tokenizer: Any, chat: list[Any], **settings: Any) -> str:
    """What transformers makes of a chat without anything to mend."""
    ids = tokenizer.apply_chat_template(chat, return_dict=True, **settings)["input_ids"]
    return str(tokenizer.decode(ids))


def test_optional_keys_and_parts_are_read_as_if_written_plainly(chatty: Any) -> None:
    named = {**USER, "name": "bob"}
    tooled = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    chats = [[USER], [named], [USER, tooled, {"role": "tool", "content": "3"}]]
    expected = [plain(chatty, chat, add_generation_prompt=True) for chat in chats]
    odd = [
        [{**USER, "name": None, "tool_calls": None}],
        [{**named, "content": [{"type": "text", "text": "h"}, {"text": "i", "image": None}]}],
        [USER, {**tooled, "content": None}, {"role": "tool", "content": "3", "name": None}],
    ]
    for rows in (chats, odd):
        assert reads([{"prompt": chat} for chat in rows], chatty) == expected
    data = datasets.Dataset.from_list([{"prompt": chat} for chat in chats])
    assert data[0]["prompt"][0]["name"] is None
    assert reads(data, chatty) == reads([*data], chatty) == expected
    assert [*load_rows(data)] == [{"prompt": chat} for chat in chats]  # as rewards see them
    assert not any("None" in text or "'type'" in text for text in expected)
    assert max(text.count("<bos>") for text in expected) <= 1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "system", "content": None}, r"a message 1 \(system\) without a content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, r"\(assistant\) without a con"),
        ({"role": "user"}, r"a message 1 \(user\) without a content"),
        ({"role": None, "content": "a"}, r"a message 1 without a `role`"),
        ({"content": "a"}, r"a message 1 without a `role`"),
        ({"role": "user", "content": {"a": 1}}, r"whose `content` is a dict.*json\.dumps"),
        ({"role": "user", "content": 3}, r"whose `content` is a int"),
        ({"role": "user", "content": [{"type": "image"}]}, r"the part `image` in the content of"),
        ({"role": "user", "content": [{"type": "input_audio", "x": 1}]}, r"the part `input_audio`"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "a part without a text"),
        ({"role": "user", "content": ["hi"]}, r"a part without a text \(hi\)"),
    ],
)
def test_messages_that_no_template_reads_are_refused(message: dict[str, Any], words: str) -> None:
    rows = [{"prompt": [USER]}, {"prompt": [USER, message]}]
    for form in (rows, datasets.Dataset.from_list(rows, on_mixed_types="use_json")):
        with pytest.raises(UsageError, match=rf"row 1 .*{words}"):
            load_rows(form)


def test_a_last_message_of_the_assistant_is_continued(chatty: Any) -> None:
    rows = [{"prompt": [USER, ANSWER]}, {"prompt": [USER]}, {"prompt": [USER, ANSWER, USER]}]
    begun, asked, again = reads(rows, chatty)
    assert begun == plain(chatty, [USER, ANSWER], continue_final_message=True)
    assert begun.rstrip().endswith("so") and begun.count("assistant") == 1
    for text, row in ((asked, rows[1]), (again, rows[2])):
        assert text == plain(chatty, row["prompt"], add_generation_prompt=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"continue_final_message": False, "add_generation_prompt": True},
        {"add_generation_prompt": False, "continue_final_message": False},
        {"continue_final_message": "content"},
    ],
)
def test_how_a_prompt_ends_is_a_setting(chatty: Any, settings: dict[str, Any]) -> None:
    expected = [plain(chatty, [USER, ANSWER], **settings)]
    assert reads([{"prompt": [USER, ANSWER]}], chatty, **settings) == expected
    row = {"prompt": [USER, ANSWER], "chat_template_kwargs": settings}
    assert reads([row], chatty) == expected


def test_one_of_the_two_arguments_decides_the_other(chatty: Any) -> None:
    rows, ask = [{"prompt": [USER, ANSWER]}, {"prompt": [USER]}], {"add_generation_prompt": True}
    anew = [plain(chatty, row["prompt"], **ask) for row in rows]
    assert reads(rows, chatty, **ask) == anew
    assert reads(rows, chatty, continue_final_message=False) == anew
    assert reads(rows[:1], chatty, add_generation_prompt=False) == reads(rows[:1], chatty)
    open_end = [plain(chatty, [USER], continue_final_message=True)]
    assert reads(rows[1:], chatty, continue_final_message=True) == open_end


def test_a_row_has_tools_and_template_arguments_of_its_own() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, off),
        ({"tools": [TOOL]}, {**off, "tools": [TOOL]}),
        ({"tools": '[{"type": "function", "function": {"name": "f"}}]'},
         {**off, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ({"tools": [], "chat_template_kwargs": None}, off),
        ({"chat_template_kwargs": on}, on),
        ({"chat_template_kwargs": '{"enable_thinking": true}'}, on),
    ]  # fmt: skip
    expected = [plain(tokenizer, [USER], add_generation_prompt=True, **more) for _, more in cases]
    rows = [{"prompt": [USER], **columns, "uid": i} for i, (columns, _) in enumerate(cases)]
    assert reads(rows, tokenizer, **off) == expected
    assert len({*expected}) == 4
    made = make_prompts(rows, tokenizer, max_prompt_length=999, chat_template_kwargs=off)
    assert [tokenizer.decode(p.token_ids) for p in made] == expected
    assert made[1].columns["tools"] == [TOOL]  # for reward functions
    even = [{"prompt": [USER], "tools": [TOOL]}, {"prompt": [USER], "tools": None}]
    assert reads(datasets.Dataset.from_list(even), tokenizer) == reads(even, tokenizer)
    with pytest.raises(UsageError, match=r"row 0 cannot be tokenised: .*`tools` is a dict"):
        make_prompts([{"prompt": [USER], "tools": TOOL}], tokenizer, max_prompt_length=99)
    with pytest.raises(UsageError, match=r"row 0 .*`chat_template_kwargs` has `tokenize`"):
        bad = {"prompt": [USER], "chat_template_kwargs": {"tokenize": False}}
        make_prompts([bad], tokenizer, max_prompt_length=99)


@pytest.mark.parametrize(("before", "after"), [("<bos>", "<eos>"), ("<bos>", ""), ("", "<eos>")])
def test_a_string_begins_once_and_has_no_end(before: str, after: str) -> None:
    tokenizer = adding(before, after)
    texts = {
        "ab": f"{before}ab",
        "<bos>ab": "<bos>ab",
        "<bos>[user]a<eos>[assistant]": "<bos>[user]a<eos>[assistant]",
        "ab<eos>": f"{before}ab<eos>",
        "a<bos>": f"{before}a<bos>",
    }
    assert reads([{"prompt": text} for text in texts], tokenizer) == [*texts.values()]


def test_a_template_of_the_settings_serves_a_tokenizer_without_one() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    assert reads([{"prompt": [USER]}], tokenizer, chat_template=LLAMA) == [
        "<bos>[user]hi<eos>[assistant]"
    ]


def plainly(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    (prompt,), ((answer,),) = prompts, completions
    keys = {*answer} == {"role", "content"} and answer["role"] == "assistant"
    texts = all(type(message["content"]) is str for message in prompt)
    return [float(keys and texts and not any(None in message.values() for message in prompt))]


def test_reward_functions_see_plain_messages_in_training_and_validation(fit: Any) -> None:
    chats = [[{**USER, "name": "bob"}], [USER, ANSWER], [{**USER, "content": "ho"}, ANSWER]]
    data = datasets.Dataset.from_list([{"prompt": chat} for chat in chats])
    trainer, _, datamodule = fit(
        train_data=data,
        val_data=[{"prompt": [{"role": "user", "content": [{"type": "text", "text": "hey"}]}]}],
        reward_funcs=[plainly],
        prompts_per_round=3,
        num_generations=2,
        shuffle=False,
        trainer={"max_epochs": 1},
    )
    assert trainer.callback_metrics["reward"] == trainer.callback_metrics["val/reward"] == 1
    decode = make_tokenizer().decode
    first = [decode(prompt.token_ids) for prompt in datamodule.run.startup.prompts.first(3)]
    assert first[1:] == ["user: hi\nassistant: so ", "user: ho\nassistant: so "]
