"""Verifiers of ours, for reasoning-gym data sets whose own evaluate text, and checks of columns.

Each takes the answer and the row's entry, and gives the scores that the data set's own gives.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from lit_rlsched.rewards.algebra import POLYNOMIALS, is_integral, slopes
from lit_rlsched.rewards.formulas import ARITHMETIC, BITWISE, work_out

Entry = dict[str, Any]
"""`answer` and `metadata` of a row, and its `question`."""

FRACTION = r"[-+0-9., /]{0,200}(?:[eE][-+]?[0-9]{1,3})?\s*"
"""`Fraction` makes numbers of as many digits as an exponent says."""
LOGIC = r"(?!.*[A-Z]\s*[A-Z])[A-Z()\u00ac\u2227\u2228\u2192\u2194\s]*"
"""Letters and not, and, or, implies, if and only if."""
NO_LONG_NUMBERS = r"(?!.*\d{2}).*"
"""A move is repeated as often as the number after it says."""


def countdown(answer: str, entry: Entry) -> float:
    target, numbers = entry["metadata"]["target"], entry["metadata"]["numbers"]
    value = float(work_out(answer, ARITHMETIC))
    if _whole_numbers(answer) != sorted(numbers):
        return 0.05
    return 1.0 if abs(value - target) <= 1e-6 + 1e-5 * abs(target) else 0.05


def puzzle24(answer: str, entry: Entry) -> float:
    # theirs takes any four numbers, those of another puzzle too, and 24.9 for 24
    solved = work_out(answer, ARITHMETIC) == 24
    all_used = _whole_numbers(answer) == sorted(entry["metadata"]["numbers"])
    return 1.0 if solved and all_used else 0.01


def _whole_numbers(text: str) -> list[int]:
    return sorted(int(number) for number in re.findall(r"\b[0-9]+\b", text))


def integration(answer: str, entry: Entry) -> float:
    facts = entry["metadata"]
    return float(is_integral(answer, facts["integrand"], facts["variable"]))


def polynomial_multiplication(answer: str, entry: Entry) -> float:
    gold = work_out(entry["answer"], POLYNOMIALS)
    return float(work_out(answer, POLYNOMIALS) == gold)


def bitwise_arithmetic(answer: str, entry: Entry) -> float:
    return float(work_out(entry["metadata"]["problem"], BITWISE) == int(answer, 0))


def number_sorting(answer: str, entry: Entry) -> float:
    given = [float(number) for number in listed(answer)]
    gold = [float(number) for number in listed(entry["answer"])]
    descending = entry["metadata"]["direction"] != "ascending"
    if len(given) != len(gold) or given != sorted(given, reverse=descending):
        return 0.0
    return float(all(abs(a - b) <= 1 for a, b in zip(given, gold, strict=True)))


def binary_matrix(answer: str, entry: Entry) -> float:
    if answer == entry["answer"]:
        return 1.0
    rows = [" ".join(str(cell) for cell in row) for row in listed(answer)]
    return 0.1 if "\n".join(rows) == entry["answer"] else 0.0


def spiral_matrix(answer: str, entry: Entry) -> float:
    if answer == entry["answer"].strip():
        return 1.0
    cells = " ".join(str(cell) for cell in listed(answer))
    return 0.1 if cells == entry["answer"].strip() else 0.0


def string_insertion(answer: str, entry: Entry) -> float:
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if "".join(listed(answer)) == entry["answer"] else 0.0


def n_queens(answer: str, entry: Entry) -> float:
    boards = entry["metadata"]["valid_answers"]
    if answer in boards:
        return 1.0
    return 0.5 if "\n".join(" ".join(row) for row in listed(answer)) in boards else 0.0


def game_of_life_halting(answer: str, entry: Entry) -> float:
    # theirs gives 1 to every answer that is not empty
    return float(answer.strip().lower() == entry["answer"].strip().lower())


def listed(text: str) -> list[Any]:
    """A list as Python or JSON writes it."""
    found = json.loads(text.translate({ord("'"): '"', ord("("): "[", ord(")"): "]"}))
    if not isinstance(found, list):
        raise ValueError(f"{text[:80]!r} is not a list")
    return found


# What columns must be.


def check_integrand(entry: Entry) -> None:
    facts = entry["metadata"]
    if not re.fullmatch("[A-Za-z]", facts["variable"]):
        raise ValueError(f"`metadata.variable={facts['variable']!r:.80}` is not a letter")
    slopes(facts["integrand"], facts["variable"])


def check_numbers(*names: str) -> Callable[[Entry], None]:
    def check(entry: Entry) -> None:
        for name in names:
            value = entry["metadata"][name]
            for number in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(number, int) or abs(number) > 1e9:
                    raise ValueError(f"`metadata.{name}` has {number!r:.80}")

    return check


def check_sizes(entry: Entry, *names: str, most: int) -> None:
    for name in names:
        if not 1 <= entry["metadata"][name] <= most:
            value = entry["metadata"][name]
            raise ValueError(f"`metadata.{name}={value!r:.80}` is not from 1 to {most}")


def check_cube(entry: Entry) -> None:
    check_sizes(entry, "cube_size", most=20)
    moves = entry["metadata"]["scramble_moves"]
    if len(moves) > 2000 or not re.fullmatch(NO_LONG_NUMBERS, moves, re.DOTALL):
        raise ValueError(f"`metadata.scramble_moves={moves!r:.80}` are not moves")


def check_lock(entry: Entry) -> None:
    facts = entry["metadata"]
    values = [facts["initial_value"], *(button["value"] for button in facts["buttons"])]
    if any(abs(value) > 1000 for value in values):
        raise ValueError(f"`metadata` has values of more than 1000: {values!r:.80}")


def check_premises(entry: Entry) -> None:
    facts = entry["metadata"]
    if len(facts["variables"]) > 10:
        raise ValueError(f"`metadata.variables={facts['variables']!r:.80}`: 10 are the most")
    if set(re.findall("[A-Z]", "".join(facts["premises"]))) - set(facts["variables"]):
        raise ValueError("`metadata.premises` have letters that `metadata.variables` has not")
    for premise in facts["premises"]:
        if len(premise) > 500 or not re.fullmatch(LOGIC, premise, re.DOTALL):
            raise ValueError(f"`metadata.premises` has {premise!r:.80}, which is no formula")


def check_fraction(entry: Entry) -> None:
    if not re.fullmatch(FRACTION, entry["answer"]):
        raise ValueError(f"`answer={entry['answer']!r:.80}` is not a number")


def check_grid(entry: Entry) -> None:
    # compared with tuples; JSON and Parquet have lists
    facts = entry["metadata"]
    facts["output"] = tuple(tuple(row) for row in facts["output"])
