"""Calls and replies in chat templates, against TRL."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from character_tokenizer import make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from worlds import with_tools

from lit_rlsched.environments.chat import Call, ToolChat
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.settings import UsageError

trl = pytest.importorskip("trl")
utils = pytest.importorskip("trl.chat_template_utils")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
END = {"qwen": "<|im_end|>", "llama": "<|eot_id|>", "gemma4": "<|tool_response>"}
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


def tokenizer_of(name):
    """A byte tokenizer with the template and the end token of a family."""
    end = next(end for family, end in END.items() if name.startswith(family))
    special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|turn>", "<turn|>", "<|tool_response>"]
    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special, *headers])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
    )


def of_family(name, table):
    return table[max((f for f in table if name.startswith(f)), key=len)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", ["42", " a <b>\nc\n", "", "{'error': 'Tool x not found.'}"])
def test_replies_are_the_tokens_that_trl_appends(name, content):
    tokenizer = tokenizer_of(name)
    chat = ToolChat(tokenizer, None, [tokenizer.eos_token_id])
    training = None
    if not utils.is_chat_template_prefix_preserving(tokenizer):
        training = utils.get_training_chat_template(tokenizer)
    theirs = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=training,
        chat_template_kwargs={},
    )
    one = {"role": "tool", "name": "add", "content": content}
    for messages in ([one], [one, {**one, "name": "sub", "content": "7"}]):
        assert chat.reply(messages, 512) == trl.GRPOTrainer._get_tool_suffix_ids(theirs, messages)


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
    assert message == theirs
    parsed = [each["function"] for each in theirs.get("tool_calls", ())]
    assert calls == [Call(each["name"], each["arguments"]) for each in parsed]
    assert cut or calls == [Call("add", {"a": 3, "b": "x"})]


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
