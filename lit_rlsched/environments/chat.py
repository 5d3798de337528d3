"""Tool calls and replies in a chat template: tokens are parsed and appended, never made again."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lit_rlsched.data.messages import tool_arguments
from lit_rlsched.environments.response_templates import (
    TOOLS,
    VALUES,
    F,
    G,
    Reader,
    arguments_of,
    as_call,
    as_turn,
    dummy_chat,
    dummy_replies,
    functions_in,
    id_of,
    known,
    load,
)
from lit_rlsched.settings import ENDS, UsageError
from lit_rlsched.text import are_text, content_text, is_deep, printable

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
    """

    def __init__(
        self, tokenizer: Any, settings: Mapping[str, Any] | None, end_tokens: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings or {}
        self._ends = {*end_tokens}
        self._end_tokens = self._ends | {tokenizer.eos_token_id}
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._name = f"The chat template of `{getattr(tokenizer, 'name_or_path', '')}`"
        self._check_renders_tools()
        self._several_calls = self._check_appends()
        self._reads_ids = self._several_calls and self._renders_ids()
        self._reader = self._find_reader()

    def calls(
        self, before: Sequence[int], turn: Sequence[int], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], list[Call] | None]:
        """Return the message of a turn and the calls in it; None if it cannot be parsed.

        A call whose JSON is cut, or is nested too deeply for what reads it later, is text.
        """
        try:
            message, calls = self._parsed(self._reader, before, turn, schemas)
            if is_deep([message, calls]):
                raise ValueError("nested too deeply")
            return message, calls
        except Exception:  # a model writes what no parser expects
            text = self._decode(turn, skip_special_tokens=True)
            return {"role": "assistant", "content": text}, None

    def _parsed(
        self,
        reader: Reader,
        before: Sequence[int],
        turn: Sequence[int],
        schemas: Sequence[Mapping[str, Any]],
    ) -> tuple[dict[str, Any], list[Call]]:
        """Return the message of a turn and the calls in it; raises if a call is not whole."""
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
        functions = [*functions_in(message.pop("tool_calls", ()))]
        calls = [Call(str(function["name"]), arguments_of(function)) for function in functions]
        if calls:
            message["tool_calls"] = [as_call(*call) for call in calls]
        if self._reads_ids:
            for at, (made, function) in enumerate(
                zip(message.get("tool_calls", ()), functions, strict=True), len(before)
            ):
                given = function.get("id")  # as the model has written it
                made["id"] = given if isinstance(given, str) else id_of(at)
        return message, calls

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def ends(self, token: int) -> bool:
        """Return whether a token ends a turn where it is drawn."""
        return token in self._ends

    def replies(
        self, message: Mapping[str, Any], answers: Sequence[tuple[str, Any, bool]]
    ) -> list[dict[str, Any]]:
        """Return the messages of replies, each with the id of its call if that has one."""
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
        """Return the tokens of replies, and of the beginning of the next turn."""
        messages = copies = [{**each} for each in messages]
        for message in copies:
            if not isinstance(content := message["content"], str):
                whole = self._shows_parts if are_text(content) else self._shows_lists
                message["content"] = content if whole else content_text(content)
        if sum(len(str(message["content"])) for message in messages) > room * self._longest_token:
            return None
        # some templates take the name of a reply from its call, which they find by its id
        replies = [{"tool_call_id": id_of(i), **message} for i, message in enumerate(messages)]
        calls = [(reply["name"], reply["tool_call_id"]) for reply in replies]
        dummy = dummy_chat(*(calls if self._several_calls else calls[:1]))
        before = self._to_end(self._ids(dummy, row))
        ids = self._ids([*dummy, *replies], row, add_generation_prompt=True)
        if ids[: len(before)] != before:
            raise ValueError(f"the template changes the call of {dummy[-1]['tool_calls']}")
        return ids[len(before) :] if len(ids) - len(before) <= room else None

    def text_of(self, content: str | list[Any]) -> str:
        """Return the content of a reply as text, as near to what the template makes of it."""
        return str(content) if self._shows_lists else content_text(content)

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
        chat = [*dummy_chat(F), {**dummy_replies(F)[0], "content": content}]
        try:
            text = self._tokenizer.decode(self._ids(chat))
        except Exception:  # what a template raises has many types
            return False
        return all(mark in text for mark in marks)

    def opening(
        self, prompt: Sequence[Mapping[str, Any]], schemas: Sequence[Any], row: Mapping[str, Any]
    ) -> list[int]:
        """Return the tokens of a prompt, to whose last message an observation was added."""
        given = tool_arguments({**row, "prompt": prompt}, self._settings, schemas)
        return self._render(prompt, given)

    def _ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        row: Mapping[str, Any] = _NO_COLUMNS,
        **more: Any,
    ) -> list[int]:
        """Return the tokens of a chat, without tools or a next turn unless `more` has them."""
        given = tool_arguments({**row, "prompt": messages}, self._settings, ())
        given = {name: value for name, value in given.items() if name not in (*ENDS, "tools")}
        return self._render(messages, {**given, "add_generation_prompt": False, **more})

    def _render(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, **given
        )

    def _to_end(self, ids: list[int]) -> list[int]:
        """Return the tokens of a chat up to the end of its last turn, as a completion ends."""
        # not the end of the user's turn
        ends = [i for i in range(self._user_turn, len(ids)) if ids[i] in self._end_tokens]
        return ids[: ends[-1] + 1] if ends else ids

    @cached_property
    def _user_turn(self) -> int:
        """Number of tokens of the dummy's first message."""
        return len(self._ids(dummy_chat()[:1]))

    def _check_renders_tools(self) -> None:
        text = ""
        parts = ("tool_a8f3", "key_b9d4", "value_d6e7", "reply_c4f9")
        name, key, value, content = parts
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [as_call(name, {key: value})]},
            {"role": "tool", "name": name, "content": content},
        ]
        why = "leaves out"
        try:
            text = self._tokenizer.decode(self._ids(chat))
        except Exception as error:  # what a template raises has many types
            why = f"fails ({type(error).__name__}: {error}) at"
        words = zip(parts, ("name", "argument", "argument", "reply"), strict=True)
        if missing := [word for part, word in words if part not in text]:
            raise UsageError(
                f"{self._name} {why} the {missing[0]} of a tool call. Use a model that was trained "
                "for tools, or set a `chat_template` that renders `tool_calls` and messages of the "
                "role `tool`."
            )

    def _check_appends(self) -> bool:
        """Return whether a turn may have several calls; refuse a change of earlier turns."""
        one, two, several = dummy_chat(F), dummy_chat(F, G), True
        later = [*one, *dummy_replies(F), one[1]]
        cases = {
            "a reply": (one, [*one, *dummy_replies(F)]),
            "the replies of two tools": (two, [*two, *dummy_replies(F, G)]),
            "a second turn": (later, [*later, *dummy_replies(F)]),
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
        calls, without = (F, G), [(name, None) for name, _ in (F, G)]
        with_ids = self._ids([*dummy_chat(*calls), *dummy_replies(*calls)])
        try:
            return with_ids != self._ids([*dummy_chat(*without), *dummy_replies(*without)])
        except Exception:  # it needs them
            return True

    def _find_reader(self) -> Reader:
        """Return what reads the calls that the template renders; refuse one that nothing reads."""
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
            message, calls = self._parsed(reader, example.before, example.turn, TOOLS)
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
            return any(map(arguments_of, functions_in(message.get("tool_calls", ()))))
        except Exception:
            return False

    def _examples(self) -> Iterator[_Example]:
        """Yield turns as the template renders them: the first has no call."""
        user = dummy_chat()[0]
        header = self._ids([user], add_generation_prompt=True)[self._user_turn :]
        one = [user, as_turn(("f", VALUES))]
        chats: list[tuple[list[dict[str, Any]], list[tuple[str, Any]]]] = [
            ([*one, *dummy_replies(F), {"role": "assistant", "content": "8"}], []),
            (one, [("f", VALUES)]),
            ([*one, *dummy_replies(F), as_turn(("g", {}))], [("g", {})]),
        ]
        if self._several_calls:
            calls = [("f", VALUES), ("g", {}), ("f", VALUES)]
            chats.append(([user, as_turn(*calls)], calls))
        for chat, calls in chats:
            whole = self._ids(chat, tools=TOOLS)
            prompt = self._ids(chat[:-1], add_generation_prompt=True, tools=TOOLS)
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
        for chat in (dummy_chat()[:1], [*dummy_chat(F), *dummy_replies(F)]):
            text = self._decode(self._ids(chat, add_generation_prompt=True))
            added = text.removeprefix(self._decode(self._ids(chat)))
            # where the template adds nothing, the end of the message before
            starts.append(added if added.strip() else text.rpartition(chat[-1]["content"])[2])
        return starts
