"""Calls and replies in chat templates, against TRL."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
from character_tokenizer import make_tokenizer
from tool_families import of_family, tokenizer_of
from worlds import with_tools

from lit_rlsched.environments.chat import Call, ToolChat
from lit_rlsched.environments.protocol import Environments, ToolSettings
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rollout.turns import Turns
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Event, Group, Prompt, Sample, Sampling

trl = pytest.importorskip("trl")
utils = pytest.importorskip("trl.chat_template_utils")
CALLS = {
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": "x"}}\n</tool_call>',
    "qwen3_5": "ok\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n"
    "<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "add", "parameters": {"a": 3, "b": "x"}}',
    "gemma4": '<|tool_call>call:add{a:3,b:<|"|>x<|"|>}<tool_call|>',
}
NAMES = ["qwen2_5", "qwen3", "qwen3_training", "qwen3_5_think", "llama3_1", "llama3_2", "gemma4"]


def add(a: int, b: str) -> str:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return f"{a}{b}"


def theirs_of(tokenizer):
    """What TRL's trainer has of itself where it makes the tokens of replies."""
    training = None
    if not utils.is_chat_template_prefix_preserving(tokenizer):
        training = utils.get_training_chat_template(tokenizer)
    return SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=training,
        chat_template_kwargs={},
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", ["42", " a <b>\nc\n", "", "{'error': 'Tool x not found.'}"])
def test_replies_are_the_tokens_that_trl_appends(name, content):
    tokenizer = tokenizer_of(name)
    chat = ToolChat(tokenizer, None, [tokenizer.eos_token_id])
    theirs = theirs_of(tokenizer)
    one = {"role": "tool", "name": "add", "content": content}
    several = [one, {**one, "content": "7"}]
    if not name.startswith("gemma4"):  # TRL gives all replies of a turn the first name
        several[1]["name"] = "sub"
    for messages in ([one], several):
        assert chat.reply(messages, 512) == trl.GRPOTrainer._get_tool_suffix_ids(theirs, messages)


LISTS = [
    ["first", "second"],
    [7, 8],
    [{"title": "Oslo", "text": "capital"}],
    [],
    [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}],
]
PRINTING = {"qwen2_5": LISTS, "llama3_1": LISTS, "llama3_2": LISTS}
"""Templates that show any list; TRL gives others the same lists, and they show none of it."""
SHOWN = PRINTING | {"qwen3_5_think": LISTS[4:], "gemma4": LISTS[4:]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", LISTS, ids=str)
def test_a_list_is_what_trl_makes_of_it_or_a_text(name, content):
    """The model is told all of it by any template."""
    tokenizer = tokenizer_of(name)
    chat = ToolChat(tokenizer, None, [tokenizer.eos_token_id])
    one = {"role": "tool", "name": "add", "content": content}
    ids = chat.reply([one], 512)
    if content in SHOWN.get(name, ()):
        assert ids == trl.GRPOTrainer._get_tool_suffix_ids(theirs_of(tokenizer), [one])
    else:
        joined = "two parts" if content == LISTS[4] else str(content)
        assert ids == chat.reply([{**one, "content": joined}], 512)
    text, parts = tokenizer.decode(ids), [*LISTS[0], "7", "8", "Oslo", "capital", "two ", "parts"]
    assert all(part in text for part in parts if part in str(content))
    # rewards see it as the model does, but for the quotes of JSON
    assert chat.text_of(content).replace("'", '"') in text.replace("'", '"')


@pytest.mark.parametrize("name", [n for n in NAMES if n != "qwen3_training"])
@pytest.mark.parametrize("cut", [False, True])
def test_calls_are_those_that_trl_parses(name, cut):
    tokenizer = tokenizer_of(name)
    schemas = Environments([add]).of({}).schemas
    chat = ToolChat(tokenizer, None, [tokenizer.eos_token_id])
    text = of_family(name, CALLS)
    text = text[: len(text) // 2] if cut else text + tokenizer.eos_token
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    message, calls = chat.calls(prompt, ids, schemas)
    theirs = utils.parse_response(
        utils.add_response_schema(tokenizer), ids, prefix=prompt, tools=list(schemas)
    )
    if cut and "qwen3_5" in name:  # TRL calls a tool without the argument that was being written
        assert not calls and message == {"role": "assistant", "content": text}
        return
    for call in message.get("tool_calls", ()):
        call.pop("id", None)  # which Gemma 4 reads
    assert message == theirs
    parsed = [each["function"] for each in theirs.get("tool_calls", ())]
    assert (calls or []) == [Call(each["name"], each["arguments"]) for each in parsed]
    assert cut or calls == [Call("add", {"a": 3, "b": "x"})]


def call(**arguments):
    return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


SCRIPTS = {
    "one call": [call(a=3, b="x"), "done"],
    "no call": ["nothing to do"],
    "unknown tool": [call(a=1, b="y").replace("add", "sing"), "well"],
    "bad arguments": [call(c=1), call(a=1, b="z"), "so"],
    "two calls": [call(a=1, b="p") + "\n" + call(a=2, b="q"), "both"],
    "too long a reply": [call(a=3, b="x" * 300), "never"],
    "too many turns": [call(a=i, b="x") for i in range(6)],
    "broken call": ["<tool_call>\n{broken", "never"],
}


def trl_loop(tokenizer, scripts, prompts, limit, iterations):
    """TRL's loop over completions that are given, turn by turn."""
    ids = [[tokenizer(turn + tokenizer.eos_token)["input_ids"] for turn in s] for s in scripts]
    turn = dict.fromkeys(range(len(scripts)), 0)
    prompt_ids = [
        tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False, tools=[add])
        for p in prompts
    ]
    asked = {tuple(given): i for i, given in enumerate(prompt_ids)}

    def generate(given, *_, **__):
        drawn = []
        for one in given:
            index = next(i for begin, i in asked.items() if tuple(one[: len(begin)]) == begin)
            turn[index] += 1
            drawn.append([*ids[index][turn[index]]])
        return drawn, [[-1.0] * len(one) for one in drawn]

    trainer = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=None,
        chat_template_kwargs={},
        max_tool_calling_iterations=iterations,
        max_completion_length=limit,
        environment_factories=None,
        tools=[add],
        _sync_tool_dicts=[{"add": add}] * len(scripts),
        _async_tool_dicts=[{}] * len(scripts),
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        _generate_single_turn=generate,
    )
    trainer._get_tool_suffix_ids = partial(trl.GRPOTrainer._get_tool_suffix_ids, trainer)
    first = [[*one[0]] for one in ids]
    messages = [
        [utils.parse_response(tokenizer, one, prefix=p, tools=[add])]
        for one, p in zip(first, prompt_ids, strict=True)
    ]
    logprobs = [[-1.0] * len(one) for one in first]
    mask, messages, drawn, logprobs, calls, failures, _ = trl.GRPOTrainer._tool_call_loop(
        trainer, [[*p] for p in prompts], prompt_ids, first, messages, logprobs, None, {}
    )
    return prompt_ids, mask, messages, drawn, logprobs, calls, failures


def our_loop(tokenizer, scripts, prompts, prompt_ids, limit, iterations):
    """The same turns here, with real workers."""
    environments = Environments([add])
    scheduler = EnvironmentScheduler(environments)
    chat = ToolChat(tokenizer, None, [tokenizer.eos_token_id])
    tools = ToolSettings(environments, iterations)
    turns = Turns(tools, chat, scheduler, 0, lambda *_: {})
    completions, left = [], {}
    for i, script in enumerate(scripts):
        prompt = Prompt(f"{i}", prompts[i], tuple(prompt_ids[i]))
        completions.append(Completion(0))
        group = Group(f"{i}@0", prompt, Sampling(limit), completions[-1:])
        left[f"{i}@0/0"] = [*script]
        turns.begin(Sample(group, completions[-1]))
    while turns.pending:
        turns.wait(10.0)
        for sample, becomes in turns.poll():
            if becomes == "decodes":
                ids = tokenizer(left[sample.id].pop(0) + tokenizer.eos_token)["input_ids"]
                room = limit - len(sample.completion.token_ids)
                reason = "stop" if len(ids) <= room else "length"
                event = Event(sample.id, ids[:room], [-1.0] * len(ids[:room]), reason)
                sample.completion.take(event, version=0)
                turns.ended(sample, 0)
    turns.close()
    return completions, turns.counts


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
@pytest.mark.parametrize("iterations", [3, 1])
def test_turns_are_those_of_trl(name, iterations):
    tokenizer = utils.add_response_schema(tokenizer_of(name))
    scripts, limit = list(SCRIPTS.values()), 600
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(len(scripts))]
    prompt_ids, mask, messages, drawn, logprobs, calls, failures = trl_loop(
        tokenizer, scripts, prompts, limit, iterations
    )
    ours, counts = our_loop(tokenizer, scripts, prompts, prompt_ids, limit, iterations)
    for i, completion in enumerate(ours):
        assert [*completion.token_ids] == drawn[i], list(SCRIPTS)[i]
        assert completion.mask() == mask[i]
        assert [*completion.logprobs] == logprobs[i]
        assert completion.messages == messages[i]
    assert (counts["calls"], counts["failures"]) == (calls, failures)


def test_templates_that_cannot_have_tools_are_refused_by_name():
    tokenizer = make_tokenizer()
    with pytest.raises(UsageError, match="leaves out the name of a tool call"):
        ToolChat(tokenizer, None, [1])
    tokenizer = with_tools(make_tokenizer())
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(UsageError, match="changes earlier turns when a reply follows"):
        ToolChat(tokenizer, None, [1])
    tokenizer = with_tools(make_tokenizer())
    tokenizer.response_template = None
    with pytest.raises(UsageError, match="writes tool calls in a way that is not known"):
        ToolChat(tokenizer, None, [1])


def untyped(a):
    """Add."""


def undescribed(a: int):
    pass


class NoReset:
    def look(self):
        """Look."""


@pytest.mark.parametrize(
    ("tools", "factory", "match"),
    [
        ([untyped], None, "how to call the tool `untyped`"),
        ([undescribed], None, "how to call the tool `undescribed`"),
        ([add, add], None, "two functions of one name"),
        ([3], None, "not a function"),
        (["worlds.lock"], None, "`tools=worlds.lock`"),
        (None, NoReset, "NoReset has no method `reset`"),
        (None, NoReset(), "not callable"),
        (None, {}, "empty dict"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_by_name(tools, factory, match):
    with pytest.raises(UsageError, match=match):
        Environments(tools, factory)


def test_a_row_names_its_environment():
    environments = Environments(None, {"one": "worlds.Troubled", "two": "worlds.Troubled"})
    assert environments.of({"environment": "two"}).name == "two"
    with pytest.raises(UsageError, match=r"`environment` is 'tow', .* \['one', 'two'\]"):
        environments.of({"environment": "tow"})
