"""Fails a test whose run logs a metric that `docs/reference/metrics.md` does not describe.

A test whose own module or reward function logs made-up names lists them: `@pytest.mark.logs("a")`.
"""

import functools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.MULTILINE)

made_up: frozenset[str] = frozenset()
"""Names that the running test may log."""


def described() -> list[tuple[str, list[str]]]:
    """Name, and the other cells, of each metric of the page."""
    return [(name, [c.strip() for c in rest.split("|")]) for name, rest in ROW.findall(text())]


@functools.cache
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def pattern(name: str) -> str:
    """A regular expression for a name with parts such as `<func>`."""
    return re.sub(r"<\w+>", "[^/]+", re.escape(name)).replace("val/", "(val|test)/", 1)


@functools.cache
def is_described(key: str) -> bool:
    return any(re.fullmatch(pattern(name), key) for name, _ in described())


def check(keys: Iterable[str]) -> None:
    """Fail for keys that the page does not describe."""
    if unknown := sorted(k for k in keys if k not in made_up and not is_described(k)):
        pytest.fail(
            f"The run logged {unknown}: describe it in docs/reference/metrics.md. If only this "
            'test logs it, mark the test with `@pytest.mark.logs("name")`.'
        )


def watch() -> None:
    """Check what the Trainer has logged at the end of each fit, validation and test."""
    module = sys.modules.get("lightning.pytorch.trainer.trainer")
    if module is None or hasattr(module.Trainer._run, "__wrapped__"):
        return
    run = module.Trainer._run

    @functools.wraps(run)
    def checked(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(trainer, *args, **kwargs)
        check(trainer.callback_metrics)
        return result

    module.Trainer._run = checked


def pytest_runtest_setup(item: pytest.Item) -> None:
    global made_up
    marks = item.iter_markers("logs")
    made_up = frozenset(name for mark in marks for name in mark.args)
    watch()


def pytest_runtest_call() -> None:
    watch()  # a fixture may have been the first to import Lightning
