"""TRL's protocol of tools and environments: what a completion may call, and with what names."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rlsched.environments.openenv import openenv
from lit_rlsched.rewards.checks import imported
from lit_rlsched.settings import UsageError, did_you_mean

Tool = Callable[..., Any]
Reward = Callable[..., Any]
COLUMN = "environment"
"""Column that names the environment of a row, if there are several."""
_OWN = ("reset", "get_reward")
"""Public methods that are no tools."""
_STATE = ("state_dict", "load_state_dict")
"""Nor are these, if there are both."""


@dataclass(frozen=True)
class Environment:
    """What the completions of a row may call: tools, and the methods of an object of their own.

    Attributes:
        name: Value of the column `environment`; None if all rows have the same.
        factory: Makes the object; None if there are tools alone.
        schemas: JSON schema of each tool, for the chat template.
        methods: Names of the tools that are methods of the object.
        seeded: Whether `reset` has an argument `seed`.
        has_state: Whether objects have `state_dict` and `load_state_dict`.
        takes_prompt: Whether `reset` has an argument `prompt`.
        cacheable: Whether replies depend on the arguments of `reset` and on the calls alone.
    """

    name: str | None
    factory: Callable[[], Any] | None
    schemas: tuple[dict[str, Any], ...]
    methods: tuple[str, ...] = ()
    seeded: bool = False
    has_state: bool = False
    takes_prompt: bool = False
    cacheable: bool = True


def own_reward(kind: type) -> Reward:
    """Return a reward function that asks environments of one class for their reward, as TRL's."""
    name = kind.__module__, kind.__name__  # pickled by value, a class is another one

    def of_kind(environment: Any) -> bool:
        return (type(environment).__module__, type(environment).__name__) == name

    def get_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
        return [each.get_reward() if of_kind(each) else None for each in environments]

    async def get_reward_later(environments: Sequence[Any], **_: Any) -> list[float | None]:
        return [await each.get_reward() if of_kind(each) else None for each in environments]

    waits = inspect.iscoroutinefunction(kind.get_reward)  # type: ignore[attr-defined]
    reward: Reward = get_reward_later if waits else get_reward
    reward.__name__ = kind.__name__
    return reward


class Environments:
    """The tools and environments of a run.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: First number.
        ...         b: Second number.
        ...     '''
        ...     return a + b
        >>> [tool["function"]["name"] for tool in Environments([add]).of({}).schemas]
        ['add']
    """

    def __init__(self, tools: Sequence[Tool | str] | None = None, factory: Any = None) -> None:
        functions = [imported(tool, "tools", "my_tools.add") for tool in tools or ()]
        for tool in functions:
            if not inspect.isroutine(tool):
                raise UsageError(
                    f"`tools` has {tool!r}, which is not a function. Give functions with types and "
                    "a docstring, or their import paths."
                )
        names = [str(tool.__name__) for tool in functions]
        self.tools: dict[str, Tool] = dict(zip(names, functions, strict=True))
        if len(self.tools) < len(names):
            raise UsageError(
                f"`tools` has two functions of one name: {sorted(names)}. Calls go by the name: "
                "rename one."
            )
        schemas = tuple(_schema(tool, f"the tool `{name}`") for name, tool in self.tools.items())
        self.several = isinstance(factory, Mapping)
        self._kinds: list[type] = []
        factories = factory if self.several else {None: factory}
        if self.several and not factories:
            raise UsageError("`environment_factory` is an empty dict. Give at least one class.")
        self.by_name = {
            name: self._environment(name, each, schemas) for name, each in factories.items()
        }
        self.has_objects = bool(self._kinds)
        """Whether each completion has an object, and not tools alone."""
        self.cacheable_tools = {n for n, f in self.tools.items() if getattr(f, "cacheable", False)}
        """Functions whose reply depends on the arguments of the call alone."""
        caches = (made.cacheable for made in self.by_name.values() if made.factory is not None)
        self.caches = bool(self.cacheable_tools) or any(caches)
        """Whether replies are kept."""

    def _environment(
        self, name: str | None, factory: Any, schemas: tuple[dict[str, Any], ...]
    ) -> Environment:
        if factory is None:
            return Environment(name, None, schemas)
        what = "environment_factory" + (f"[{name!r}]" if self.several else "")
        if isinstance(factory, str) and factory.startswith(("http://", "https://")):
            factory = openenv(factory)
        factory = imported(factory, what, "my_tools.Game")
        if not callable(factory):
            raise UsageError(
                f"`{what}={factory!r}` is not callable. Give a class, not an object of it, or a "
                "function that makes one."
            )
        try:
            kind = factory if inspect.isclass(factory) else type(factory())
        except Exception as error:
            raise UsageError(f"`{what}()` raised {type(error).__name__}: {error}.") from error
        self._kinds.append(kind)
        members = dict(inspect.getmembers(kind, inspect.isfunction))  # as TRL: no properties
        if "reset" not in members:
            raise UsageError(
                f"`{what}`: {kind.__name__} has no method `reset`. It begins each completion: it "
                "gets the columns of the row, and returns None or a text for the prompt's end."
            )
        keeps = all(name in members for name in _STATE)
        own_names = _OWN + _STATE * keeps
        methods = [m for m in members if m not in own_names and not m.startswith("_")]
        if twice := sorted({*methods} & {*self.tools}):
            raise UsageError(
                f"`{twice[0]}` is a tool and a method of {kind.__name__}. Calls go by the name: "
                "rename one."
            )
        named = inspect.signature(members["reset"]).parameters
        own = tuple(_schema(members[m], f"`{kind.__name__}.{m}`") for m in methods)
        return Environment(
            name,
            factory,
            schemas + own,
            tuple(methods),
            "seed" in named,
            keeps,
            "prompt" in named,
            bool(getattr(kind, "cacheable", False)),
        )

    @property
    def rewards(self) -> list[Reward]:
        """Reward functions for the classes with a `get_reward`, each once, as in TRL."""
        return [
            own_reward(kind) for kind in dict.fromkeys(self._kinds) if hasattr(kind, "get_reward")
        ]

    def of(self, columns: Mapping[str, Any]) -> Environment:
        """Return the environment of a row."""
        if not self.several:
            return self.by_name[None]
        name = columns.get(COLUMN)
        if name not in self.by_name:
            known = sorted(map(str, self.by_name))
            raise UsageError(
                f"the column `{COLUMN}` is {name!r}, and `environment_factory` has {known}."
                f"{did_you_mean(str(name), known)}"
            )
        return self.by_name[name]


def _schema(tool: Tool, what: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:  # that of OpenEnv's server says more than types
        schema: dict[str, Any] = getattr(tool, "openenv_schema", None) or get_json_schema(tool)
    except Exception as error:  # its own kinds of errors are no part of its interface
        raise UsageError(
            f"The model cannot be told how to call {what}: {error} Give every argument a type, and "
            "the function a Google-style docstring that describes it and each argument."
        ) from None
    return schema


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """What completions may call, and how it is run."""

    environments: Environments
    max_tool_calling_iterations: int | None = None
    workers: int = 1
    timeout: float = 60.0
    """Seconds that a tool may take."""
    max_sessions: int | None = None
    tool_steps: int | None = None
