"""Tool calls and replies in a chat template: tokens are parsed and appended, never made again."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lit_rlsched.data.messages import tool_arguments
from lit_rlsched.environments.response_templates import Reader, known, load
from lit_rlsched.settings import UsageError
from lit_rlsched.text import are_text, content_text, is_deep, printable

_ENDS = ("add_generation_prompt", "continue_final_message", "tools")
_NO_COLUMNS: Mapping[str, Any] = {}


class Call(NamedTuple):
    """A call that a completion makes: the tool's name and its arguments."""

    name: str
    arguments: Any


class _Example(NamedTuple):
    """A turn as the template renders it, the tokens before it, and what has to be read from it."""

    before: list[int]
    turn: list[int]
    calls: list[tuple[str, str]]
    """Names of tools, and arguments as JSON."""
    text: str


class ToolChat:
    """Reads tool calls from drawn tokens, and makes the tokens of replies.

    Only replies go through the template, as in TRL (`GRPOTrainer._get_tool_suffix_ids`): the tokens
    of a turn are those that follow its end token where the template renders the reply. What was
    drawn stays as it was drawn, whatever the template would make of it.

    Args:
        tokenizer: Tokenizer with a chat template. Its `response_template` says how calls are
            written. Without one, or if it does not read what the chat template renders, the known
            one that does is taken.
        settings: Arguments for `apply_chat_template`.
        end_tokens: Ids of the tokens that end a turn.

    Raises:
        UsageError: the template has no tools, changes earlier turns, or writes calls in a way that
            nothing reads.
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
        self._several_calls = self._check_appends()
        self._reads_ids = self._several_calls and self._renders_ids()
        self._reader = self._find_reader()

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
            message, calls = self._parsed(self._reader, before, turn, schemas)
            if is_deep([message, calls]):
                raise ValueError("nested too deeply")
            return message, calls
        except Exception:  # a model writes what no parser expects
            self.unparsed += 1
            text = self._decode(turn, skip_special_tokens=True)
            return {"role": "assistant", "content": text}, []

    def _parsed(
        self,
        reader: Reader,
        before: Sequence[int],
        turn: Sequence[int],
        schemas: Sequence[Mapping[str, Any]],
    ) -> tuple[dict[str, Any], list[Call]]:
        """Return the message of a turn and the calls in it.

        Raises:
            ValueError: a call is not whole. Others are possible.
        """
        parsed = self._tokenizer.parse_response(
            self._decode(turn), reader.template, prefix=self._decode(before), tools=list(schemas)
        )
        message: dict[str, Any] = {"role": "assistant", **printable(parsed)}
        content = str(message.get("content") or "").strip()
        if turn and turn[-1] in self._end_tokens:
            content = content.removesuffix(self._decode(turn[-1:]))
        if reader.begin.search(content):
            raise ValueError("a call that is not whole")
        message["content"] = content
        functions = [*_functions(message.pop("tool_calls", ()))]
        calls = [Call(str(function["name"]), _arguments(function)) for function in functions]
        if calls:
            message["tool_calls"] = [_calling(*call) for call in calls]
        if self._reads_ids:
            for at, (made, function) in enumerate(
                zip(message.get("tool_calls", ()), functions, strict=True), len(before)
            ):
                given = function.get("id")  # as the model has written it
                made["id"] = given if isinstance(given, str) else _id(at)
        return message, calls

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def ends(self, token: int) -> bool:
        """Return whether a token ends a turn where it is drawn."""
        return token in self._ends

    def replies(
        self, message: Mapping[str, Any], answers: Sequence[tuple[str, Any, bool]]
    ) -> list[dict[str, Any]]:
        """Return the messages of replies, each with the id of its call if that has one.

        Args:
            message: Message of the turn with the calls.
            answers: Name and reply of each call, and whether it failed. Those of one tool are in
                the order of its calls.
        """
        ids: dict[str, list[str]] = {}
        for call in message.get("tool_calls", ()):
            if "id" in call:
                ids.setdefault(call["function"]["name"], []).append(call["id"])
        messages = []
        for name, content, _ in answers:
            its = {"tool_call_id": ids[name].pop(0)} if ids.get(name) else {}
            messages.append({"role": "tool", "name": name, **its, "content": content})
        return messages

    def reply(
        self, messages: Sequence[Mapping[str, Any]], room: int, row: Mapping[str, Any] = _NO_COLUMNS
    ) -> list[int] | None:
        """Return the tokens of replies, and of the beginning of the next turn.

        Args:
            messages: Messages with `role` (`tool`), `name` and `content`, perhaps `tool_call_id`.
                A content is a text or a list, which the template gets as it is, or as a text if it
                would leave a list out.
            room: Maximum number of tokens; None is returned if there are more.
            row: Columns of the row, which may have arguments for the template.

        Raises:
            ValueError: the template cannot render this reply.
        """
        messages = [{**each, "content": self._readable(each["content"])} for each in messages]
        if sum(len(str(message["content"])) for message in messages) > room * self._longest_token:
            return None
        # some templates take the name of a reply from its call, which they find by its id
        replies = [{"tool_call_id": _id(i), **message} for i, message in enumerate(messages)]
        calls = [(reply["name"], reply["tool_call_id"]) for reply in replies]
        dummy = _dummy(*(calls if self._several_calls else calls[:1]))
        before = self._to_end(self._ids(dummy, row))
        ids = self._ids([*dummy, *replies], row, add_generation_prompt=True)
        if ids[: len(before)] != before:
            raise ValueError(f"the template changes the call of {dummy[-1]['tool_calls']}")
        return ids[len(before) :] if len(ids) - len(before) <= room else None

    def text_of(self, content: str | list[Any]) -> str:
        """Return the content of a reply as text, as near to what the template makes of it."""
        return str(content) if self._shows_lists else content_text(content)

    def _readable(self, content: str | list[Any]) -> str | list[Any]:
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
        chat = [*_dummy(_F), {**_replies(_F)[0], "content": content}]
        try:
            text = self._tokenizer.decode(self._ids(chat))
        except Exception:  # what a template raises has many types
            return False
        return all(mark in text for mark in marks)

    def opening(
        self,
        prompt: Sequence[Mapping[str, Any]],
        schemas: Sequence[Any],
        row: Mapping[str, Any],
    ) -> list[int]:
        """Return the tokens of a prompt, to whose last message an observation was added."""
        given = tool_arguments({**row, "prompt": prompt}, self._settings, schemas)
        return self._render(prompt, given)

    def _ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        row: Mapping[str, Any] = _NO_COLUMNS,
        add_generation_prompt: bool = False,
        **tools: Any,
    ) -> list[int]:
        """Return the tokens of a chat, without tools unless they are given."""
        given = tool_arguments({**row, "prompt": messages}, self._settings, ())
        given = {name: value for name, value in given.items() if name not in _ENDS}
        given["add_generation_prompt"] = add_generation_prompt
        return self._render(messages, {**given, **tools})

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

    def _check_appends(self) -> bool:
        """Return whether a turn may have several calls.

        Raises:
            UsageError: earlier turns are rendered in another way once others follow.
        """
        one, two, several = _dummy(_F), _dummy(_F, _G), True
        later = [*one, *_replies(_F), one[1]]
        cases = {
            "a reply": (one, [*one, *_replies(_F)]),
            "the replies of two tools": (two, [*two, *_replies(_F, _G)]),
            "a second turn": (later, [*later, *_replies(_F)]),
        }
        for what, (chat, more) in cases.items():
            try:
                before, after = self._to_end(self._ids(chat)), self._ids(more)
            except Exception as error:
                if chat is two:  # Llama 3 has one call a turn
                    several = False
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
        return several

    def _renders_ids(self) -> bool:
        """Return whether the template reads the ids of calls and replies."""
        calls, without = (_F, _G), [(name, None) for name, _ in (_F, _G)]
        with_ids = self._ids([*_dummy(*calls), *_replies(*calls)])
        try:
            return with_ids != self._ids([*_dummy(*without), *_replies(*without)])
        except Exception:  # it needs them
            return True

    def _find_reader(self) -> Reader:
        """Return what reads the calls that the template renders.

        Raises:
            UsageError: nothing does.
        """
        own = getattr(self._tokenizer, "response_template", None)
        try:
            examples = [*self._examples()]
            readers = [load(own)] if own else []
            readers += known(self._starts(), [self._decode([each]) for each in self._end_tokens])
        except Exception as error:
            raise UsageError(
                f"{self._name}, or the tokenizer's `response_template`, fails at a chat with tools "
                f"({type(error).__name__}: {error}). Set another one."
            ) from None
        later, call, bare, *_ = examples
        for reader in readers:
            if all(self._reads(reader, example) for example in examples):
                return reader
        # what a user sets may be for another syntax, or for words alone
        if own and self._reads(readers[0], later) and self._reads(readers[0], call, some=True):
            return readers[0]
        for reader in readers:  # values in a form of the template's own, and an example of a call
            if self._reads(reader, later) and self._reads(reader, bare) and self._shown(reader):
                return reader
        raise UsageError(
            f"{self._name} writes tool calls in a way that is not known: "
            f"{self._decode(call.turn)!r} is not read as the call that it is. Set the tokenizer's "
            "`response_template`, which says how to parse them (Transformers: response parsing)."
        )

    def _reads(self, reader: Reader, example: _Example, some: bool = False) -> bool:
        """Return whether the calls of an example are read as they are, or `some` call."""
        try:
            message, calls = self._parsed(reader, example.before, example.turn, _TOOLS)
        except Exception:
            return False
        found = [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]
        if some:
            return bool(found)
        return found == example.calls and message["content"].startswith(example.text)

    def _shown(self, reader: Reader) -> bool:
        """Return whether the source of the template has a call with arguments."""
        source = self._tokenizer.get_chat_template(self._settings.get("chat_template"))
        try:
            message = self._tokenizer.parse_response(source, reader.template, prefix="")
            return any(map(_arguments, _functions(message.get("tool_calls", ()))))
        except Exception:
            return False

    def _examples(self) -> Iterator[_Example]:
        """Yield turns as the template renders them: the first has no call."""
        user = _dummy()[0]
        header = self._ids([user], add_generation_prompt=True)[self._user_turn :]
        one = [user, _turn(("f", _VALUES))]
        chats: list[tuple[list[dict[str, Any]], list[tuple[str, Any]]]] = [
            ([*one, *_replies(_F), {"role": "assistant", "content": "8"}], []),
            (one, [("f", _VALUES)]),
            ([*one, *_replies(_F), _turn(("g", {}))], [("g", {})]),
        ]
        if self._several_calls:
            calls = [("f", _VALUES), ("g", {}), ("f", _VALUES)]
            chats.append(([user, _turn(*calls)], calls))
        for chat, calls in chats:
            whole = self._ids(chat, tools=_TOOLS)
            prompt = self._ids(chat[:-1], add_generation_prompt=True, tools=_TOOLS)
            same = [a == b for a, b in zip(whole, prompt, strict=False)]
            start = [*same, False].index(False)
            if whole[start : start + len(header)] == header:  # as DiffusionGemma, behind a reply
                start += len(header)
            ends = [i for i in range(start, len(whole)) if whole[i] in self._end_tokens]
            turn = whole[start : ends[-1] + 1] if ends else whole[start:]
            wanted = [(name, json.dumps(given, sort_keys=True)) for name, given in calls]
            yield _Example(whole[:start], turn, wanted, chat[-1]["content"])

    def _starts(self) -> list[str]:
        """Return what stands before a turn of the assistant, behind a user's turn and a reply."""
        starts = []
        for chat in (_dummy()[:1], [*_dummy(_F), *_replies(_F)]):
            text = self._decode(self._ids(chat, add_generation_prompt=True))
            added = text.removeprefix(self._decode(self._ids(chat)))
            # where the template adds nothing, the end of the message before
            starts.append(added if added.strip() else text.rpartition(chat[-1]["content"])[2])
        return starts


def _id(number: int) -> str:
    """Return an id of nine letters and digits, as Mistral's template wants them."""
    return f"c{number:08d}"


_F, _G = ("f", _id(0)), ("g", _id(1))
_VALUES: dict[str, Any] = {
    "text": ' a "b"\n  c\'s \\ é, {d: [1]}\n',
    "integer": 7,
    "number": -2.5,
    "boolean": True,
    "array": [1, "x y", {"z": False}],
    "object": {"k": ["v"], "w": {}},
}
"""Arguments of each type, by its name. No null: early templates of Gemma 4 write it as `None`."""
_TOOLS = [
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
    for name, parameters in (("f", _VALUES), ("g", {}))
]


def _calling(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """Return a call as a message has it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **call} if call_id else call


def _turn(*calls: tuple[str, Any]) -> dict[str, Any]:
    """Return a turn that calls tools with arguments."""
    tool_calls = [_calling(*call, _id(i)) for i, call in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _dummy(*calls: tuple[str, str | None]) -> list[dict[str, Any]]:
    """Return a chat whose last turn calls tools, given by name and id.

    The turn has a thought, as some templates show an empty one in the last turn only.
    """
    tool_calls = [_calling(name, {}, call_id) for name, call_id in calls]
    thought = {"content": "", "reasoning_content": "dummy"}
    return [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", **thought, "tool_calls": tool_calls},
    ]


def _replies(*calls: tuple[str, str | None]) -> list[dict[str, Any]]:
    """Return the replies to calls, given by name and id."""
    return [
        {"role": "tool", "name": name, "content": "dummy", **({"tool_call_id": at} if at else {})}
        for name, at in calls
    ]


def _functions(parsed: Any) -> Iterator[Mapping[str, Any]]:
    """Yield name and arguments of parsed calls: flat, nested as in OpenAI's form, or lists of them.

    Raises:
        ValueError: one has no name, or a list has no call.
    """
    for call in [parsed] if isinstance(parsed, Mapping) else [{}] if parsed == [] else parsed:
        if "function" in call:
            its = {"id": call["id"]} if "id" in call else {}
            yield from ({**its, **each} for each in _functions(call["function"]))
        elif isinstance(call.get("name"), str):
            yield call
        else:
            raise ValueError("a call without a name")


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call; OpenAI's form has an object as a JSON string."""
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            as_json = json.loads(arguments)
        except ValueError:
            return arguments
        return as_json if isinstance(as_json, dict) else arguments
    return {} if arguments is None else arguments
