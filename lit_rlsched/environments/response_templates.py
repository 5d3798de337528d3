"""How models write tool calls, for Transformers' response parsing: each syntax, and what is added.

The chat template itself tells which syntax is its own: the one that reads back what it renders.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHTS = ["<think>", "<|channel>thought\n"]


class Reader(NamedTuple):
    """A response template, as Transformers has loaded it, and what a call begins with."""

    template: Any
    begin: Any


def load(template: Mapping[str, Any], whole: str | None = None) -> Reader:
    """Load a response template so that no text is lost and no call is read that is not whole.

    Text before, between and behind calls is joined; Transformers keeps the last part. A call begins
    where its end follows; Transformers also reads one that the end of the turn cuts off.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    given = load_response_template({**template})
    if "tool_calls" not in given.fields or given.fields["tool_calls"].open_re is None:
        raise ValueError("it has no field `tool_calls` that says how a call begins")
    fields = {name: {**field} for name, field in template["fields"].items()}
    for field in fields.values():
        if field.get("content", "text") == "text" and not {"repeats", "transform"} & {*field}:
            field |= {"repeats": True, "join": "\n"}
    calls = fields["tool_calls"]
    begin, close = given.fields["tool_calls"].open_re, given.fields["tool_calls"].close_re
    if close is not None:
        calls.pop("open", None)
        whole = whole or rf"[\s\S]*?(?:{close.pattern})"
        calls["open_pattern"] = rf"(?:{begin.pattern})(?={whole})"
    return Reader(load_response_template({**template, "fields": fields}), begin)


def known(starts: Sequence[str], ends: Sequence[str]) -> Iterator[Reader]:
    """Yield a response template for each syntax."""
    start = [re.split("|".join(map(re.escape, _THOUGHTS)), each)[0] for each in starts]
    end = "|".join(map(re.escape, ends)) or "(?!)"
    for calls in _syntaxes(end):
        whole = calls.pop("whole", None)
        fields = {
            "reasoning_content": {
                "open": _THOUGHTS,
                "close_pattern": rf"(?:</think>|<channel\|>|{end})\s*",
            },
            "tool_calls": {"repeats": True, **calls},
            "content": {"close_pattern": rf"(?:{end})\s*"},
        }
        template = {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": fields}
        yield load(template, whole)


def _syntaxes(end: str) -> Iterator[dict[str, Any]]:
    as_json = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
    # Qwen 2.5 and 3, Granite 4, Hermes: an object or a list of them
    yield {"open_pattern": r"<tool_call>", "close_pattern": r"</tool_call>\s*", **as_json}
    # Qwen 3.5 and later, Nemotron 3
    yield _tagged(
        r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        r"<parameter=(?P<key>[^>\n]+)>\n?",
        r"\n?</parameter>",
    )
    # GLM 4.5
    yield _tagged(
        r"<tool_call>\s*(?P<name>[^\s<]+)",
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
        r"</arg_value>",
    )
    # Gemma 4
    yield {
        "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{]+)",
        "close_pattern": r"<tool_call\|>\s*",
        "content": "json",
        "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
        "transform": _NAMED,
    }
    # Llama 3: an object without a mark
    yield {
        "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"(?:parameters|arguments)":\s*',
        "close_pattern": rf'\}}\s*(?:{end}|(?=\{{"name":))\s*',
        "content": "json",
        "transform": _NAMED,
    }


def _tagged(begin: str, key: str, value_end: str) -> dict[str, Any]:
    """Calls whose arguments stand between tags. One is read only if all of it is well-formed."""
    end = r"\s*(?:</function>\s*)?</tool_call>"
    value = rf"(?P<value>(?:(?!</?tool_call>).)*?){value_end}"
    argument = rf"{key}{value}(?=\s*(?:<parameter=|<arg_key>|\Z)|{end})"
    return {
        "open_pattern": begin,
        "whole": rf"(?>\s*{argument})*+{end}",
        "close_pattern": rf"{end}\s*",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": argument,
            "value_parser": {"name": "text", "args": {"strip": False}},
        },
        "transform": _NAMED,
    }


def id_of(number: int) -> str:
    """Return an id of nine letters and digits, as Mistral's template wants them."""
    return f"c{number:08d}"


F, G = ("f", id_of(0)), ("g", id_of(1))
VALUES: dict[str, Any] = {
    "text": ' a "b"\n  c\'s \\ é, {d: [1]}\n',
    "integer": 7,
    "number": -2.5,
    "boolean": True,
    "array": [1, "x y", {"z": False}],
    "object": {"k": ["v"], "w": {}},
}
"""Arguments of each type, by its name. No null: early templates of Gemma 4 write it as `None`."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "dummy",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string" if key == "text" else key, "description": "dummy"}
                    for key in parameters
                },
                "required": [],
            },
        },
    }
    for name, parameters in (("f", VALUES), ("g", {}))
]


def as_call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """Return a call as a message has it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **call} if call_id else call


def as_turn(*calls: tuple[str, Any]) -> dict[str, Any]:
    """Return a turn that calls tools with arguments."""
    tool_calls = [as_call(*call, id_of(i)) for i, call in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def dummy_chat(*calls: tuple[str, str | None]) -> list[dict[str, Any]]:
    """Return a chat whose last turn calls tools, given by name and id.

    The turn has a thought, as some templates show an empty one in the last turn only.
    """
    tool_calls = [as_call(name, {}, call_id) for name, call_id in calls]
    thought = {"content": "", "reasoning_content": "dummy"}
    return [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", **thought, "tool_calls": tool_calls},
    ]


def dummy_replies(*calls: tuple[str, str | None]) -> list[dict[str, Any]]:
    """Return the replies to calls, given by name and id."""
    return [
        {"role": "tool", "name": name, "content": "dummy", **({"tool_call_id": at} if at else {})}
        for name, at in calls
    ]


def functions_in(parsed: Any) -> Iterator[Mapping[str, Any]]:
    """Yield name and arguments of parsed calls: flat, nested as OpenAI does, or lists of them."""
    if parsed == []:
        raise ValueError("a list without a call")
    for call in [parsed] if isinstance(parsed, Mapping) else parsed:
        if "function" in call:
            its = {"id": call["id"]} if "id" in call else {}
            yield from ({**its, **each} for each in functions_in(call["function"]))
        elif isinstance(call.get("name"), str):
            yield call
        else:
            raise ValueError("a call without a name")


def arguments_of(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call; OpenAI's form has an object as a JSON string."""
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            as_json = json.loads(arguments)
        except ValueError:
            return arguments
        return as_json if isinstance(as_json, dict) else arguments
    return {} if arguments is None else arguments
