"""Tool calls and replies in a chat template: tokens are parsed and appended, never made again."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lit_rlsched.data.messages import tool_arguments
from lit_rlsched.settings import UsageError
from lit_rlsched.text import are_text, content_text, is_deep, printable

_ENDS = ("add_generation_prompt", "continue_final_message", "tools")
_NO_COLUMNS: Mapping[str, Any] = {}


class Call(NamedTuple):
    """A call that a completion makes: the tool's name and its arguments."""

    name: str
    arguments: Any


class ToolChat:
    """Reads tool calls from drawn tokens, and makes the tokens of replies.

    Only replies go through the template, as in TRL (`GRPOTrainer._get_tool_suffix_ids`): the tokens
    of a turn are those that follow its end token where the template renders the reply. What was
    drawn stays as it was drawn, whatever the template would make of it.

    Args:
        tokenizer: Tokenizer with a chat template. Its `response_template` says how calls are
            written; without one, it is that of the template's family.
        settings: Arguments for `apply_chat_template`.
        end_tokens: Ids of the tokens that end a turn.

    Raises:
        UsageError: the template has no tools, changes earlier turns, or writes calls in a way that
            is not known.
    """

    def __init__(
        self, tokenizer: Any, settings: Mapping[str, Any] | None, end_tokens: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings or {}
        self._ends = {*end_tokens}
        self._end_tokens = self._ends | {tokenizer.eos_token_id}
        self.unparsed = 0
        """Turns that could not be parsed."""
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._name = f"The chat template of `{getattr(tokenizer, 'name_or_path', '')}`"
        self._check_renders_tools()
        self._check_appends()
        self._parse_by = getattr(tokenizer, "response_template", None) or self._known_template()

    def calls(
        self, before: Sequence[int], turn: Sequence[int], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], list[Call]]:
        """Return the message of a turn and the calls in it.

        What cannot be parsed, such as a call whose JSON is cut, or is nested too deeply for what
        reads it later, is a message of text.

        Args:
            before: Token ids of the prompt and of all turns before.
            turn: Token ids of the turn.
            schemas: JSON schemas of the tools; arguments get their types from them.
        """
        try:
            message = printable(
                self._tokenizer.parse_response(
                    list(turn), self._parse_by, prefix=list(before), tools=list(schemas)
                )
            )
            calls = [_call(each) for each in message.get("tool_calls") or ()]
            if is_deep([message, calls]):
                raise ValueError("nested too deeply")
        except Exception:  # a model writes what no parser expects
            self.unparsed += 1
            message, calls = None, []
        if message is None:
            text = self._tokenizer.decode(list(turn), skip_special_tokens=True)
            return {"role": "assistant", "content": text}, []
        end = self._tokenizer.eos_token or ""
        message["content"] = str(message.get("content") or "").removesuffix(end)
        return message, calls

    def ends(self, token: int) -> bool:
        """Return whether a token ends a turn where it is drawn."""
        return token in self._ends

    def reply(
        self, messages: Sequence[Mapping[str, Any]], room: int, row: Mapping[str, Any] = _NO_COLUMNS
    ) -> list[int] | None:
        """Return the tokens of replies, and of the beginning of the next turn.

        Args:
            messages: Messages with `role` (`tool`), `name` and `content`: a text, or a list, which
                the template gets as it is, or as a text if it would leave a list out.
            room: Maximum number of tokens; None is returned if there are more.
            row: Columns of the row, which may have arguments for the template.

        Raises:
            ValueError: the template cannot render this reply.
        """
        messages = [{**message, "content": self._shown(message["content"])} for message in messages]
        if sum(len(str(message["content"])) for message in messages) > room * self._longest_token:
            return None
        dummy = _dummy(messages[0]["name"])  # some templates begin a reply with the call's name
        before = self._to_end(self._ids(dummy, row))
        ids = self._ids([*dummy, *messages], row, add_generation_prompt=True)
        if ids[: len(before)] != before:
            raise ValueError(f"the template changes the call of {dummy[-1]['tool_calls']}")
        return ids[len(before) :] if len(ids) - len(before) <= room else None

    def text_of(self, content: str | list[Any]) -> str:
        """Return the content of a reply as text, as near to what the template makes of it."""
        return str(content) if self._shows_lists else content_text(content)

    def _shown(self, content: str | list[Any]) -> str | list[Any]:
        if isinstance(content, str):
            return content
        whole = self._shows_parts if are_text(content) else self._shows_lists
        return content if whole else content_text(content)

    @cached_property
    def _shows_parts(self) -> bool:
        """Whether the template renders text parts in a reply."""
        parts = [{"type": "text", "text": text} for text in ("part_a8f3", "part_b9d4")]
        return self._shows(parts, "part_a8f3", "part_b9d4")

    @cached_property
    def _shows_lists(self) -> bool:
        """Whether it renders all of any other list."""
        items = ["item_a8f3", 40917, {"text": "item_d6e7", "key_b9d4": "item_c4f9"}]
        return self._shows(items, "item_a8f3", "40917", "item_d6e7", "key_b9d4", "item_c4f9")

    def _shows(self, content: list[Any], *marks: str) -> bool:
        chat = [*_dummy("f"), {"role": "tool", "name": "f", "content": content}]
        try:
            text = self._tokenizer.decode(self._ids(chat))
        except Exception:  # what a template raises has many types
            return False
        return all(mark in text for mark in marks)

    def opening(
        self,
        prompt: Sequence[Mapping[str, Any]],
        observation: str | None,
        schemas: Sequence[Any],
        row: Mapping[str, Any],
    ) -> list[int]:
        """Return the tokens of a prompt to whose last message an observation is added."""
        messages = [*prompt]
        if observation is not None:
            last = messages[-1]
            messages[-1] = {**last, "content": str(last.get("content", "")) + observation}
        row = {**row, "prompt": messages}
        return self._render(messages, tool_arguments(row, self._settings, schemas))

    def _ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        row: Mapping[str, Any] = _NO_COLUMNS,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the tokens of a chat, without tools."""
        given = tool_arguments({**row, "prompt": messages}, self._settings, ())
        given = {name: value for name, value in given.items() if name not in _ENDS}
        return self._render(messages, {**given, "add_generation_prompt": add_generation_prompt})

    def _render(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, **given
        )
        return ids

    def _to_end(self, ids: list[int]) -> list[int]:
        """Return the tokens of a chat up to the end of its last turn, as a completion ends."""
        # not the end of the user's turn
        ends = [i for i in range(self._user_turn, len(ids)) if ids[i] in self._end_tokens]
        return ids[: ends[-1] + 1] if ends else ids

    @cached_property
    def _user_turn(self) -> int:
        """Number of tokens of the dummy's first message."""
        return len(self._ids(_dummy()[:1]))

    def _check_renders_tools(self) -> None:
        text = ""
        parts = ("tool_a8f3", "key_b9d4", "value_d6e7", "reply_c4f9")
        name, key, value, content = parts
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [_calling(name, {key: value})]},
            {"role": "tool", "name": name, "content": content},
        ]
        why = "leaves out"
        try:
            text = self._tokenizer.decode(self._ids(chat))
        except Exception as error:  # what a template raises has many types
            why = f"fails ({type(error).__name__}: {error}) at"
        if missing := [part for part in parts if part not in text]:
            what = dict(zip(parts, ("name", "argument", "argument", "reply"), strict=True))
            raise UsageError(
                f"{self._name} {why} the {what[missing[0]]} of a tool call. Use a model that was "
                "trained for tools, or set a `chat_template` that renders `tool_calls` and "
                "messages of the role `tool`."
            )

    def _check_appends(self) -> None:
        """Refuse a template that renders earlier turns in another way once others follow."""
        one, two = _dummy("f"), _dummy("f", "g")
        reply: list[dict[str, Any]] = [{"role": "tool", "name": "f", "content": "dummy"}]
        replies = [*reply, {"role": "tool", "name": "g", "content": "dummy"}]
        later: list[dict[str, Any]] = [*one, *reply, one[1]]
        cases = {
            "a reply": (one, [*one, *reply]),
            "the replies of two tools": (two, [*two, *replies]),
            "a second turn": (later, [*later, *reply]),
        }
        for what, (chat, more) in cases.items():
            try:
                before, after = self._to_end(self._ids(chat)), self._ids(more)
            except Exception as error:
                if chat is two:  # Llama 3 has one call a turn
                    continue
                raise UsageError(
                    f"{self._name} fails ({type(error).__name__}: {error}) at {what}. Use a model "
                    "that was trained for tools, or set another `chat_template`."
                ) from None
            if after[: len(before)] != before:
                raise UsageError(
                    f"{self._name} changes earlier turns when {what} follows. Tokens that were "
                    "drawn cannot change: set a `chat_template` that only appends, such as the "
                    "training template of the model's family."
                )

    def _known_template(self) -> dict[str, Any]:
        chat_template = str(self._settings.get("chat_template") or self._tokenizer.chat_template)
        for mark, template in RESPONSE_TEMPLATES.items():
            if mark in chat_template:
                return template
        raise UsageError(
            f"{self._name} writes tool calls in a way that is not known. Set the tokenizer's "
            "`response_template`, which says how to parse them (Transformers: response parsing)."
        )


def _calling(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _dummy(*names: str) -> list[dict[str, Any]]:
    """Return a chat whose last turn calls these tools.

    The turn has a thought, as some templates show an empty one in the last turn only.
    """
    calls = [_calling(name, {}) for name in names]
    thought = {"content": "", "reasoning_content": "dummy"}
    return [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", **thought, "tool_calls": calls},
    ]


def _call(call: Mapping[str, Any]) -> Call:
    """Return a parsed call; it may be nested, as in OpenAI's form, or flat.

    Raises:
        ValueError: it has no name.
    """
    function = call.get("function", call)
    if not isinstance(name := function.get("name"), str):
        raise ValueError("a call without a name")
    arguments = function.get("arguments")
    return Call(name, {} if arguments is None else arguments)


def _text(end: str, **begin: str) -> dict[str, str]:
    return {**begin, "close_pattern": end, "content": "text"}


def _family(
    begin: Mapping[str, str], end: str, calls: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Return a `response_template`: how a turn begins and ends, its calls and further fields."""
    fields = {**more, "tool_calls": {"repeats": True, **calls}, "content": _text(end)}
    return {"defaults": {"role": "assistant"}, **begin, "fields": fields}


_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_CHATML = {"start_anchor": "<|im_start|>assistant\n"}, r"<\|im_end\|>\s*"
_THOUGHT: dict[str, Any] = {"reasoning_content": _text(r"</think>\s*", open="<think>")}
RESPONSE_TEMPLATES: dict[str, dict[str, Any]] = {
    "<function=": _family(  # Qwen 3.5 and later
        *_CHATML,
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "text"},
            },
            "transform": _NAMED,
        },
        **_THOUGHT,
    ),
    "<tool_call>": _family(  # Qwen 2.5 and 3, Hermes
        *_CHATML,
        {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        **_THOUGHT,
    ),
    "<|tool_call>call:": _family(  # Gemma 4
        {"start_anchor_pattern": r"(?:<\|turn>model\n|<tool_response\|>)"},
        r"(?:<turn\|>|<\|tool_response>|<eos>)\s*|$",
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close_pattern": r"<tool_call\|>\s*",
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": _NAMED,
        },
        reasoning_content=_text(r"<channel\|>\s*", open="<|channel>thought\n"),
    ),
    "<|eot_id|>": _family(  # Llama 3
        {"start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n"},
        r"<\|eot_id\|>\s*",
        {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}<\|eot_id\|>\s*",
            "content": "json",
            "transform": _NAMED,
        },
    ),
}
"""Mark in a chat template -> how its family writes tool calls, as TRL 1.16 reads them."""
