"""Environments of an OpenEnv server, in TRL's protocol: its action is their tool.

OpenEnv's own client (0.10) needs an older mcp than vLLM does, and cannot be installed beside it.
"""

import json
import re
from collections.abc import Mapping
from http.client import HTTPException
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from lit_rlsched.settings import UsageError
from lit_rlsched.text import hide_keys

_OWN = ("metadata", "done", "reward")
"""Fields of each action and observation that are not the environment's."""
MAX_MESSAGE = 64 << 20
"""Bytes of an answer."""
SECONDS = 10.0
"""Longest wait for the schema of a server."""


class OpenEnv:
    """The session of a completion at a server; `openenv` makes subclasses with a tool."""

    url = ""
    _socket: Any = None
    _total, _done, _lost = 0.0, False, False

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """Begin an episode; the server gets the columns of the row that its `reset` names."""
        from websockets.exceptions import ConnectionClosed
        from websockets.sync.client import connect

        self._total, self._done, self._lost = 0.0, False, False
        used = self._socket is not None
        address = f"ws{self.url.removeprefix('http').rstrip('/')}/ws"
        self._socket = self._socket or connect(address, max_size=MAX_MESSAGE)
        try:
            return _text(self._ask("reset", {"seed": seed, **row})["observation"])
        except (ConnectionClosed, OSError):
            if not used:
                raise
            return self.reset(seed, **row)  # the server may have started anew meanwhile
        except RuntimeError:
            self._leave()
            raise

    def _step(self, action: Mapping[str, Any]) -> str:
        """Act, and return the observation."""
        if self._done:
            raise ValueError("The episode is over.")
        if self._socket is None:
            raise RuntimeError("The connection was lost.")
        try:
            answer = self._ask("step", action)
        except Exception:
            # a refused action is a reply; an episode whose connection is lost has no reward
            self._lost = self._socket is None
            raise
        self._total += answer.get("reward") or 0.0
        self._done = bool(answer.get("done"))
        return _text(answer["observation"])

    def _ask(self, what: str, data: Mapping[str, Any]) -> Any:
        """Send a message and return the answer's data; raises if the server has refused it."""
        message = json.dumps({"type": what, "data": data}, allow_nan=False)  # NaN is no JSON
        try:
            self._socket.send(message)
            answer = json.loads(self._socket.recv())
        except Exception:
            self._leave()
            raise
        if answer.get("type") == "error":
            raise RuntimeError(answer.get("data", {}).get("message", "The server has failed."))
        return answer["data"]

    def _leave(self) -> None:
        """End the server's session."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def get_reward(self) -> float:
        """Return the sum of the episode's rewards."""
        if self._lost:
            raise RuntimeError(f"The connection to {hide_keys(self.url)} was lost in an episode.")
        return self._total


def openenv(url: str, tool: str = "step") -> type[OpenEnv]:
    """Return a class for `environment_factory` whose tool is the action of an OpenEnv server.

    A completion has a session of the server. The tool's arguments are the fields of the action, and
    the model is told all that the server's schema says of them, such as the allowed values. The
    reply is the observation: its text, if it has one field with a text, else JSON. The reward is
    the sum of the episode's rewards. A call after its end is answered with an error.

    Example::

        RolloutDataModule(rows, environment_factory=openenv("http://127.0.0.1:8000", "guess"))
    """
    shown = hide_keys(url)
    if find_spec("websockets") is None:
        raise UsageError(
            f"`environment_factory={shown}` needs a package: `pip install 'lit-rlsched[openenv]'`."
        )
    try:
        with urlopen(f"{url.rstrip('/')}/schema", timeout=SECONDS) as answer:
            action = json.load(answer)["action"]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        # which shows a password as a wrong port
        why = type(error).__name__ if isinstance(error, HTTPException) else error
        raise UsageError(
            f"`environment_factory={shown}`: no OpenEnv server answers at {shown}/schema "
            f"({why}). Start it, or correct the address."
        ) from None
    # classes of several servers are told apart by their names
    name = re.sub(r"\W+", "_", f"{tool}_{urlsplit(url).netloc.rpartition('@')[2]}")
    made = type(name, (OpenEnv,), {"url": url, tool: _tool(shown, tool, action)})
    made.__module__ = __name__
    return made


def _tool(url: str, name: str, action: Mapping[str, Any]) -> Any:
    """Return a method with the fields of an action as its arguments."""
    action = _whole(action, action.get("$defs", {}))
    given = action.get("properties", {}).items()
    fields = {field: _of_template(field, schema) for field, schema in given if field not in _OWN}
    odd = [
        f"the field `{field}` of the action is a {schema.get('type') or 'union'}"
        for field, schema in fields.items()
        if not isinstance(schema.get("type"), str)
    ]
    if "properties" not in action and action.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
        odd.append("the action is a union")
    if odd:
        raise UsageError(
            f"`environment_factory={url}`: {odd[0]}. Write a subclass of `OpenEnv` with a method "
            "for each kind of action, which calls `_step`."
        )
    without = [field for field, schema in fields.items() if "default" not in schema]
    required = [field for field in action.get("required", without) if field in fields]

    def method(self: OpenEnv, /, **arguments: Any) -> str:
        unknown, missing = arguments.keys() - fields.keys(), {*required} - arguments.keys()
        if unknown or missing:
            raise TypeError(f"{name}() has the arguments {[*fields]} and requires {required}.")
        return self._step(arguments)

    method.__name__ = method.__qualname__ = name
    what = str(action.get("description") or "Act in the environment.").split("\n\n")[0]
    method.openenv_schema = {  # type: ignore[attr-defined]
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join(what.split()),
            "parameters": {"type": "object", "properties": fields, "required": required},
        },
    }
    return method


def _of_template(field: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a field as `transformers.utils.get_json_schema` would write it.

    A value that may be null is `nullable`, as chat templates read the `type`.
    """
    forms = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(forms) == 1:
        schema = {**schema, **forms[0], "nullable": True}
        del schema["anyOf"]
    said = schema.get("description") or schema.get("title") or field
    more = {key: value for key, value in schema.items() if key not in ("type", "title")}
    kind = {"type": schema["type"]} if "type" in schema else {}
    return {**kind, **more, "description": " ".join(str(said).split())}


def _whole(schema: Any, kinds: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """Return a schema with what it refers to in the place of `$ref`; a kind within itself stays."""
    if isinstance(schema, list):
        return [_whole(one, kinds, inside) for one in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: _whole(one, kinds, inside) for key, one in schema.items() if key != "$defs"}
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name not in kinds or name in inside:
        return parts
    del parts["$ref"]
    return {**_whole(kinds[name], kinds, (*inside, name)), **parts}


def _text(observation: Any) -> str:
    """Return an observation as a text: its field, if that is one text, else JSON."""
    fields = observation if isinstance(observation, Mapping) else {"text": observation}
    fields = {name: value for name, value in fields.items() if name not in _OWN}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(fields) == len(texts) == 1 else json.dumps(fields, ensure_ascii=False)
