"""Tool calls: what a chat template renders is read back, and what is cut is text."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_families import byte_tokenizer, tokenizer_of

from lit_rlsched.environments.chat import Call, ToolChat
from lit_rlsched.settings import UsageError

TYPES = ("string", "integer", "number", "boolean", "array", "object")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "One.",
            "parameters": {
                "type": "object",
                "properties": {kind: {"type": kind, "description": "A."} for kind in TYPES},
                "required": [],
            },
        },
    }
    for name in ("add", "look_up")
]
USER = {"role": "user", "content": "hi"}
CHATML = "<|im_start|>{}\n", "<|im_end|>\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
GRANITE = "<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"
CALL = "{'name': f.name, 'arguments': f.arguments}"
HERMES = "<tool_call>\n{{ " + CALL + " | tojson }}\n</tool_call>"
KEYS = (
    "<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}\n<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>"
)
MIXED = {
    "Hermes": (CHATML, HERMES),
    "Hermes with Llama's headers": (LLAMA, HERMES),
    "Hermes with Granite's headers": (GRANITE, HERMES),
    "GLM's with Granite's headers": (GRANITE, KEYS),
    "a list": (CHATML, "<tool_call>[{{ " + CALL + " | tojson }}]</tool_call>"),
    "parameters": (CHATML, HERMES.replace("'arguments'", "'parameters'")),
    "Llama's with `arguments`": (LLAMA, "{{ " + CALL + " | tojson }}"),
    "OpenAI's form": (CHATML, HERMES.replace("f.arguments}", "f.arguments | tojson}")),
}
"""Headers and calls that no model's own template has together, and some that have."""
OF_TRL = [
    "qwen2_5",
    "qwen3_training",
    "qwen3_5_think_training",
    "qwen3_5_nothink",
    "nemotron_3_nano_training",
    "glm4moe_training",
    "llama3_1",
    "gemma4",
    "gemma4_v5",
]
REFUSED = {
    "another mark": (CHATML, HERMES.replace("tool_call>", "x:tool_call>")),
    "another key": (CHATML, HERMES.replace("'arguments'", "'args'")),
    "GLM's with a wrong key": (CHATML, KEYS.replace("{{ k }}", "{{ k }}{{ k }}")),
    "values without their spaces": (CHATML, KEYS.replace("v if", "v | trim if")),
    "values as Python writes them": (CHATML, KEYS.replace("v | tojson", "v")),
}


def template(headers, call):
    """A chat template with such headers and calls; the tools of the prompt look like calls."""
    header, end = headers
    return (
        "{% if tools %}" + header.format("system") + 'Write <tool_call>{"name": "add", "arguments":'
        " {}}</tool_call>. {{ tools | tojson }}" + end + "{% endif %}{% for m in messages %}"
        + header.format("{{ m.role }}") + "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set f = c.function %}" + call + "{% endfor %}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}" + header.format("assistant") + "{% endif %}"
    )  # fmt: skip


@cache
def chat_of(name):
    """A tokenizer of a family, and its chat."""
    if name in OF_TRL:
        tokenizer = tokenizer_of(name)
    else:
        headers, call = {**MIXED, **REFUSED}[name]
        tokenizer = byte_tokenizer(template(headers, call), headers[1].strip())
    return tokenizer, ToolChat(tokenizer, None, [tokenizer.eos_token_id])


def drawn(tokenizer, chat):
    """The tokens before the last turn of a chat, and of this turn, as its template renders it."""
    whole = tokenizer.apply_chat_template(chat, tools=TOOLS, return_dict=False)
    before = tokenizer.apply_chat_template(
        chat[:-1], tools=TOOLS, return_dict=False, add_generation_prompt=True
    )
    same = next(i for i, (a, b) in enumerate(zip(whole, [*before, None], strict=False)) if a != b)
    turn, end = whole[same:], tokenizer.eos_token_id
    return whole[:same], turn[: turn.index(end)] if end in turn else turn


def turn_of(calls, content=""):
    made = [
        {"type": "function", "id": f"c{i:08d}", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


TEXT = st.text(st.characters(exclude_categories=["C"], exclude_characters="<>|") | st.just("\n"))
KEY = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)
LEAVES = TEXT | st.integers() | st.booleans()
NESTED = st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(KEY, x), max_leaves=4)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "string": TEXT,
        "integer": st.integers(),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
        "array": st.lists(NESTED, max_size=3),
        "object": st.dictionaries(KEY, NESTED, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "look_up"]), ARGUMENTS), min_size=1, max_size=2)


@pytest.mark.mostly_slow(
    "Hermes", "a list", "OpenAI's form", "llama3_1", "qwen3_training", "gemma4"
)
@pytest.mark.parametrize("name", [*MIXED, *OF_TRL])
@given(calls=CALLS, cut=st.floats(0, 1))
def test_what_a_template_renders_is_read_and_what_is_cut_is_text(name, calls, cut):
    tokenizer, chat = chat_of(name)
    calls = [Call(*call) for call in (calls[:1] if "lama" in name else calls)]
    before, turn = drawn(tokenizer, [USER, turn_of(calls)])
    end = [tokenizer.eos_token_id]
    message, found = chat.calls(before, turn + end, TOOLS)
    assert found == calls
    assert message["content"] == ""
    functions = [each["function"] for each in message["tool_calls"]]
    assert [Call(each["name"], each["arguments"]) for each in functions] == calls
    for left in (turn[: int(cut * len(turn))], turn[: int(cut * len(turn))] + end):
        message, found = chat.calls(before, left, TOOLS)
        found = found or []  # None: it cannot be parsed
        assert found == calls[: len(found)]
        if not found and name in MIXED:  # others have a thought before
            text = tokenizer.decode(left, skip_special_tokens=True)
            assert message["content"].strip() == text.strip()


@pytest.mark.parametrize("name", [*MIXED, *OF_TRL])
def test_a_call_is_not_made_again_in_the_next_turn(name):
    tokenizer, chat = chat_of(name)
    called = turn_of([("add", {"string": "x"})])
    reply = {"role": "tool", "name": "add", "content": "1", "tool_call_id": "c00000000"}
    before, turn = drawn(tokenizer, [USER, called, reply, {"role": "assistant", "content": "so 8"}])
    message, found = chat.calls(before, [*turn, tokenizer.eos_token_id], TOOLS)
    assert not found and message["content"].split("<")[0] == "so 8"


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_whose_calls_are_not_read_back_is_refused(name):
    with pytest.raises(UsageError, match="writes tool calls in a way that is not known: '<"):
        chat_of(name)


def test_a_template_that_only_shows_how_values_are_written_is_read_as_it_shows():
    tagged = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
    headers, call = CHATML, tagged.format("{{ f.name }}", "{{ f.arguments or '' }}")
    example = tagged.format("one", "<parameter=p>\nv\n</parameter>\n")
    for shown in (example, ""):
        tokenizer = byte_tokenizer("{#" + shown + "#}" + template(headers, call), "<|im_end|>")
        if not shown:
            with pytest.raises(UsageError, match="writes tool calls in a way that is not known"):
                ToolChat(tokenizer, None, [tokenizer.eos_token_id])
            continue
        chat = ToolChat(tokenizer, None, [tokenizer.eos_token_id])
        turn = tokenizer(example, add_special_tokens=False)["input_ids"]
        before, _ = drawn(tokenizer, [USER, turn_of([("add", {})])])
        assert chat.calls(before, turn, TOOLS)[1] == [Call("one", {"p": "v"})]


def read(name, text):
    """What a chat reads from a turn with this text."""
    tokenizer, chat = chat_of(name)
    before = tokenizer.apply_chat_template(
        [USER], tools=TOOLS, return_dict=False, add_generation_prompt=True
    )
    turn = tokenizer(text, add_special_tokens=False)["input_ids"]
    return chat.calls(before, [*turn, tokenizer.eos_token_id], TOOLS)


def test_the_text_around_calls_is_kept():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    message, found = read("Hermes", f"first {call} then\n\n {call}{call}bye")
    assert found == [Call("add", {})] * 3
    assert message["content"].split() == ["first", "then", "bye"]


CODE = "  def f():\n      return 1\n"
WHOLE = (
    "<tool_call>\n<function=add>\n<parameter=string>\n{}\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize("value", [CODE, "", "\n", " ", "a</parameter>b", "</function>"])
def test_text_between_tags_keeps_its_white_space(value):
    _, found = read("qwen3_5_nothink", WHOLE.format(value))
    assert found == [Call("add", {"string": value})]


@pytest.mark.parametrize(
    "text",
    [
        WHOLE.replace("\n</parameter>", ""),
        WHOLE.replace("</function>\n</tool_call>", ""),
        WHOLE.replace("<function", "x<function"),
        WHOLE + "<tool_call><function=add><parameter=string>y",
        WHOLE.format("{}<tool_call>\n<function=add>\n</function>\n</tool_call>"),
    ],
)
def test_a_call_between_tags_that_is_not_whole_is_text(text):
    message, found = read("qwen3_5_nothink", text)
    assert not found and message["content"] == text


def test_an_empty_list_of_calls_is_text():
    message, found = read("a list", "<tool_call>[]</tool_call>")
    assert not found and message["content"] == "<tool_call>[]</tool_call>"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [('"{\\"a\\": [1]}"', {"a": [1]}), ("[1]", [1]), ("3", 3), ('"x"', "x"), ("null", {})],
)
def test_arguments_of_a_call_are_an_object_or_its_json(arguments, found):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read("Hermes", text)[1] == [Call("add", found)]


OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<x:tool_call>\s*",
            "close": "</x:tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}


def with_own(name, own):
    headers, call = REFUSED[name]
    tokenizer = byte_tokenizer(template(headers, call), headers[1].strip())
    tokenizer.response_template = own
    return tokenizer, ToolChat(tokenizer, None, [tokenizer.eos_token_id])


def test_an_own_response_template_reads_what_no_known_one_does():
    tokenizer, chat = with_own("another mark", OWN)
    calls = [Call("add", {"string": " x\n"}), Call("look_up", {"array": [1]})]
    before, turn = drawn(tokenizer, [USER, turn_of(calls, content="so")])
    message, found = chat.calls(before, turn, TOOLS)
    assert found == calls
    assert {**message, "tool_calls": 0} == {"role": "assistant", "content": "so", "tool_calls": 0}
    message, found = chat.calls(before, turn[:-5], TOOLS)
    assert not found and message["content"].startswith("so<x:tool_call>")


@pytest.mark.parametrize(
    ("own", "match"),
    [
        ({**OWN, "start_anchor": "<|assistant|>"}, "is not known"),
        ({**OWN, "fields": {"content": {}}}, "no field `tool_calls`"),
        ({**OWN, "fields": {**OWN["fields"], "tool_calls": {"open": "<x>"}}}, "is not known"),
        ({"fields": {}}, "fields must be a non-empty dict"),
    ],
)
def test_an_own_response_template_that_does_not_is_refused(own, match):
    with pytest.raises(UsageError, match=match):
        with_own("another mark", own)


def test_replies_are_named_by_the_ids_of_their_calls():
    """In the order of the answers, which is another one where a tool is async."""
    tokenizer, chat = chat_of("gemma4")
    calls = [("add", {}), ("look_up", {}), ("add", {})]
    before, turn = drawn(tokenizer, [USER, turn_of(calls)])
    message, _ = chat.calls(before, turn, TOOLS)
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == 3
    answers = [("look_up", "one", False), ("add", "two", False), ("add", "three", True)]
    replies = chat.replies(message, answers)
    assert [reply["tool_call_id"] for reply in replies] == [ids[1], ids[0], ids[2]]
    text = tokenizer.decode(chat.reply(replies, 999))
    assert [part.partition("{")[0] for part in text.split("response:")[1:]] == [
        "look_up",
        "add",
        "add",
    ]
    message, _ = read("Hermes", '<tool_call>{"name": "add"}</tool_call>')
    assert "id" not in message["tool_calls"][0]
    assert "tool_call_id" not in chat.replies(message, answers[1:2])[0]
