"""What a model writes is data: calls of any depth, size and characters."""

import json
import pickle

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tool_families import tokenizer_of
from worlds import look, wait_and_look

from lit_rlsched.environments.chat import ToolChat
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.text import as_text
from lit_rlsched.types import Completion, Group, Prompt, Sampling
from lit_rlsched.workers.pool import packed_row


def nested(levels, begin="[", end="]"):
    return begin * levels + ("1" if begin == '{"a": ' else "") + end * levels


ODD = {
    "nan": "NaN",
    "infinity": "-Infinity",
    "beyond floats": "1e999",
    "many digits": "1" * 4000,
    "too many digits": "1" * 5000,
    "half a pair": '"\\ud800"',
    "lists, 90 deep": nested(90),
    "lists, 101 deep": nested(101),
    "lists, 900 deep": nested(900),
    "dicts, 300 deep": nested(300, '{"a": ', "}"),
    "brackets": "[" * 5000,
    "wide": "[" + ", ".join(["1"] * 3000) + "]",
    "long": json.dumps("x" * 10_000),
}
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
).map(json.dumps)
names = st.sampled_from(["look", "wait_and_look", "sing", "self", "", "\ud800", "<|im_end|>"])
keys = st.sampled_from(["key", "self", "name", "function", "timeout", "\ud800", "a b", ""])
calls = st.tuples(names, keys, st.sampled_from([*ODD.values()]) | json_values)


def written(call):
    name, key, value = call
    start = f'{{"name": {json.dumps(name)}, "arguments": {{{json.dumps(key)}: {value}}}}}'
    return f"<tool_call>\n{start}\n</tool_call>"


@pytest.fixture(scope="module")
def scheduler():
    scheduler = EnvironmentScheduler(Environments([look, wait_and_look]))
    yield scheduler
    scheduler.shut_down()


TOKENIZER = tokenizer_of("qwen2_5")


@given(st.lists(calls, min_size=1, max_size=3))
@example([("look", "key", value) for value in ODD.values()])
@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
def test_any_call_is_answered_and_kept(scheduler, written_calls):
    chat = ToolChat(TOKENIZER, None, [TOKENIZER.eos_token_id])
    schemas = scheduler.environments.of({}).schemas
    messages = []
    for call in written_calls:
        turn = TOKENIZER(written(call) + TOKENIZER.eos_token)["input_ids"]
        message, read = chat.calls([], turn, schemas)
        messages.append(message)
        if read:
            scheduler.open("a", None, {})
            scheduler.call("a", read) if _answer(scheduler).failure is None else None
            answer = _answer(scheduler)
            assert answer.failure is None and len(answer.result) == len(read)
            replies = [{"role": "tool", "name": n, "content": c} for n, c, _ in answer.result]
            assert chat.reply(replies, 10**6)
            messages += replies
            scheduler.close("a")
    prompt = Prompt("p", [{"role": "user", "content": "?"}], (1,))
    completion = Completion(0, messages=messages)
    group = Group("p@0", prompt, Sampling(9), [completion])
    (again,) = unpack(pack([group]), lambda uid: prompt)[0].completions
    assert json.dumps(again.messages) == json.dumps(messages)
    row = pickle.loads(packed_row("?", messages, [1], {}, None))
    assert json.dumps(row["completions"]) == json.dumps(messages)
    as_text(messages).encode()


def _answer(scheduler):
    while not (answers := scheduler.poll()):
        scheduler.wait(1.0)
    return answers[0]
