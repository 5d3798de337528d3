"""Replacements for reasoning-gym's verifiers that run text, and checks of a row's columns.

Each verifier takes an answer and the row's entry, and gives the scores of the data set's own.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from lit_rlsched.rewards.formulas import work_out

Entry = dict[str, Any]
"""`answer`, `metadata` and `question` of a row."""

FRACTION = r"[-+0-9., /]{0,200}(?:[eE][-+]?[0-9]{1,3})?\s*"
"""`Fraction` builds a number with as many digits as its exponent says."""
LOGIC = r"(?!.*[A-Z]\s*[A-Z])[A-Z()\u00ac\u2227\u2228\u2192\u2194\s]*"
"""Letters and the symbols for not, and, or, implies, if and only if."""
NO_LONG_NUMBERS = r"(?!.*\d{2}).*"
"""A move is repeated as often as the number after it says."""


def countdown(answer: str, entry: Entry) -> float:
    target, numbers = entry["metadata"]["target"], entry["metadata"]["numbers"]
    value = float(work_out(answer))
    if _whole_numbers(answer) != sorted(numbers):
        return 0.05
    return 1.0 if abs(value - target) <= 1e-6 + 1e-5 * abs(target) else 0.05


def puzzle24(answer: str, entry: Entry) -> float:
    # the library's accepts any four numbers, even those of another puzzle, and 24.9 for 24
    solved = work_out(answer) == 24
    all_used = _whole_numbers(answer) == sorted(entry["metadata"]["numbers"])
    return 1.0 if solved and all_used else 0.01


def _whole_numbers(text: str) -> list[int]:
    return sorted(int(number) for number in re.findall(r"\b[0-9]+\b", text))


def bitwise_arithmetic(answer: str, entry: Entry) -> float:
    return float(work_out(entry["metadata"]["problem"]) == int(answer, 0))


def number_sorting(answer: str, entry: Entry) -> float:
    given, gold = listed_numbers(answer), listed_numbers(entry["answer"])
    descending = entry["metadata"]["direction"] != "ascending"
    if len(given) != len(gold) or given != sorted(given, reverse=descending):
        return 0.0
    return float(all(abs(a - b) <= 1 for a, b in zip(given, gold, strict=True)))


def n_queens(answer: str, entry: Entry) -> float:
    return _as_text_or_list(answer, entry["metadata"]["valid_answers"], _grid, as_list=0.5)


def binary_matrix(answer: str, entry: Entry) -> float:
    return _as_text_or_list(answer, [entry["answer"]], _grid)


def spiral_matrix(answer: str, entry: Entry) -> float:
    return _as_text_or_list(answer, [entry["answer"].strip()], _words)


def string_insertion(answer: str, entry: Entry) -> float:
    return _as_text_or_list(answer, [entry["answer"]], "".join)


def _as_text_or_list(
    answer: str, golds: list[str], join: Callable[[list[Any]], str], as_list: float = 0.1
) -> float:
    """Return 1 for a gold answer, and `as_list` for one that is written as a list."""
    if answer in golds:
        return 1.0
    return as_list if join(listed(answer)) in golds else 0.0


def _words(cells: list[Any]) -> str:
    return " ".join(map(str, cells))


def _grid(rows: list[list[Any]]) -> str:
    return "\n".join(map(_words, rows))


def game_of_life_halting(answer: str, entry: Entry) -> float:
    return float(answer.strip().lower() == entry["answer"].strip().lower())


def listed(text: str) -> list[Any]:
    """Read a list in Python's or JSON's notation."""
    found = json.loads(text.translate({ord("'"): '"', ord("("): "[", ord(")"): "]"}))
    if not isinstance(found, list):
        raise ValueError(f"{text[:80]!r} is not a list")
    return found


def listed_numbers(text: str) -> list[float]:
    return [float(number) for number in listed(text)]


# Checks of columns. Each raises an error where a column is not what the verifier expects.


def check_numbers(*names: str) -> Callable[[Entry], None]:
    def check(entry: Entry) -> None:
        for name in names:
            value = entry["metadata"][name]
            for number in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(number, int) or abs(number) > 1e9:
                    raise ValueError(f"`metadata.{name}` has {number!r:.80}")

    return check


def check_hanoi(entry: Entry) -> None:
    for name in ("num_disks", "num_pegs"):
        _check_size(entry, name, most=100)


def check_cube(entry: Entry) -> None:
    _check_size(entry, "cube_size", most=20)
    moves = entry["metadata"]["scramble_moves"]
    if len(moves) > 2000 or not re.fullmatch(NO_LONG_NUMBERS, moves, re.DOTALL):
        raise ValueError(f"`metadata.scramble_moves={moves!r:.80}` are not moves")


def _check_size(entry: Entry, name: str, most: int) -> None:
    if not 1 <= (size := entry["metadata"][name]) <= most:
        raise ValueError(f"`metadata.{name}={size!r:.80}` is not from 1 to {most}")


def check_lock(entry: Entry) -> None:
    facts = entry["metadata"]
    values = [facts["initial_value"], *(button["value"] for button in facts["buttons"])]
    if any(abs(value) > 1000 for value in values):
        raise ValueError(f"`metadata` has values above 1000: {values!r:.80}")


def check_premises(entry: Entry) -> None:
    facts = entry["metadata"]
    if len(facts["variables"]) > 10:
        raise ValueError(f"`metadata.variables={facts['variables']!r:.80}`: more than 10")
    if set(re.findall("[A-Z]", "".join(facts["premises"]))) - set(facts["variables"]):
        raise ValueError("`metadata.premises` has letters that `metadata.variables` does not list")
    for premise in facts["premises"]:
        if len(premise) > 500 or not re.fullmatch(LOGIC, premise, re.DOTALL):
            raise ValueError(f"`metadata.premises` has {premise!r:.80}, which is not a formula")


def check_fraction(entry: Entry) -> None:
    if not re.fullmatch(FRACTION, entry["answer"]):
        raise ValueError(f"`answer={entry['answer']!r:.80}` is not a number")


def check_grid(entry: Entry) -> None:
    """Turn the lists of JSON and Parquet into tuples, with which the library compares."""
    facts = entry["metadata"]
    facts["output"] = tuple(tuple(row) for row in facts["output"])
