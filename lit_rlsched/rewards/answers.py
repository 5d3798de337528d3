"""Which reasoning-gym data sets may be scored: those whose verifier runs no text.

Some of these data sets pass the answer, or columns of the row, to `eval` or to SymPy's parser,
which runs it. Every verifier of version 0.1.25 was read, with all that it calls; `REVIEWED` has
those that only compare and convert, some of them within limits. Other data sets are refused.
"""

import contextlib
import functools
import importlib.metadata
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_rlsched.settings import UsageError

VERSION = "0.1.25"
"""Version of reasoning-gym that was reviewed."""
MAX_COLUMN_CHARACTERS = 300_000
"""Maximum size of a row's columns, written as JSON."""
Entry = dict[str, Any]
"""`answer`, `metadata` and `question` of a row."""

FRACTION = r"[-+0-9., /]{0,200}(?:[eE][-+]?[0-9]{1,3})?\s*"
"""`Fraction` builds a number with as many digits as its exponent says."""
LOGIC = r"(?!.*[A-Z]\s*[A-Z])[A-Z()\u00ac\u2227\u2228\u2192\u2194\s]*"
"""Letters and the symbols for not, and, or, implies, if and only if."""
NO_LONG_NUMBERS = r"(?!.*\d{2}).*"
"""A move is repeated as often as the number after it says."""


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


@dataclass(frozen=True, slots=True)
class Review:
    """What the verifier of one data set may see.

    Attributes:
        pattern: Regular expression that the whole answer must match. None: any text, as the
            verifier only compares it or converts it to plain values.
        longest: Maximum number of characters in an answer.
        columns: Raises if the row's columns are not what the verifier expects.
        needs_answer: Whether the row must have an `answer` to which others are compared.
    """

    pattern: str | None = None
    longest: int = 20_000
    columns: Callable[[Entry], object] | None = None
    needs_answer: bool = True

    def admits(self, answer: str) -> bool:
        """Return whether the verifier may see the answer."""
        if len(answer) > self.longest:
            return False
        return self.pattern is None or bool(re.fullmatch(self.pattern, answer, re.DOTALL))


_COMPARED_OR_CONVERTED = """
    ab acre advanced_geometry aiw arc_1d base_conversion basic_arithmetic bf
    binary_alternation caesar_cipher calendar_arithmetic chain_sum circuit_logic
    color_cube_rotation complex_arithmetic count_bits count_primes course_schedule cryptarithm
    decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font
    fraction_simplification futoshiki game_of_life gcd group_anagrams gsm_symbolic
    isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm
    leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix
    maze mini_sudoku modulo_grid needle_haystack number_filtering number_format
    number_sequence palindrome_generation palindrome_partitioning path_star
    polynomial_equations pool_matrix power_function prime_factorization products ransom_note
    rectangle_count rotate_matrix rotten_oranges self_reference sentence_reordering
    shortest_path simple_equations simple_geometry sokoban spell_backward string_manipulation
    string_splitting string_synthesis sudoku survo syllogism time_intervals tsumego
    word_ladder word_sequence_reversal word_sorting zebra_puzzles
"""
"""Compared as text, or read by `int`, `float`, `Decimal`, JSON or cell by cell."""
_GRID = Review(columns=check_grid)

REVIEWED: dict[str, Review] = {
    **dict.fromkeys(_COMPARED_OR_CONVERTED.split(), Review()),
    # within limits
    "arc_agi": _GRID,
    "boxnet": Review(longest=4000, needs_answer=False),
    "codeio": Review(longest=1000),  # compared by edit distance
    "coin_flip": Review(FRACTION, columns=check_fraction),
    "graph_color": Review(needs_answer=False),
    "propositional_logic": Review(LOGIC, 500, check_premises, needs_answer=False),
    "quantum_lock": Review(columns=check_lock),
    "rearc": _GRID,
    "rubiks_cube": Review(NO_LONG_NUMBERS, 2000, check_cube, needs_answer=False),
    "rush_hour": Review(NO_LONG_NUMBERS, longest=2000, needs_answer=False),
    "tower_of_hanoi": Review(columns=check_hanoi),
}
"""Data set -> what its verifier may see.

Left out are those whose verifier runs text (`binary_matrix`, `bitwise_arithmetic`, `countdown`,
`n_queens`, `number_sorting`, `puzzle24`, `spiral_matrix`, `string_insertion`, integrals, products
of polynomials), `game_of_life_halting`, which gives 1 to any answer, and `composite`.
"""


@functools.cache
def import_reasoning_gym() -> Any:
    """Import the library in the version that was reviewed."""
    installed = importlib.metadata.version("reasoning-gym")
    if installed != VERSION:
        raise UsageError(
            f"reasoning-gym {installed} is installed, and its verifiers were reviewed in "
            f"{VERSION}: another version may run what a model answers. Install "
            f"reasoning-gym=={VERSION}."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of data sets it is built on
        import reasoning_gym
    return reasoning_gym


@functools.cache
def verifier_of(task: str) -> Callable[..., float]:
    """Return `score_answer` of the data set."""
    return import_reasoning_gym().get_score_answer_fn(task)


def review_of(task: object) -> Review:
    """Return how a data set is scored; refuse one that is not on the list."""
    if isinstance(task, str) and task in REVIEWED:
        return REVIEWED[task]
    raise UsageError(
        f"`task={task!r:.80}`: `reasoning_gym_reward` scores only data sets whose verifier was "
        "reviewed, as some run the answer as Python. Use one of "
        f"{', '.join(sorted(REVIEWED))}; for `countdown` use `countdown_reward`; or use a reward "
        "function of your own."
    )


def checked_entry(
    task: str, review: Review, metadata: object, answer: object = None, question: object = None
) -> Entry:
    """Return a row's columns once their types and sizes are checked, whoever made the row."""
    try:
        facts = json.loads(metadata) if isinstance(metadata, str) else metadata
        if not isinstance(answer, str) and (answer is not None or review.needs_answer):
            raise UsageError(f"`answer={answer!r:.80}` is not text, to which answers are compared")
        if not isinstance(facts, Mapping):
            raise UsageError(f"`metadata={facts!r:.80}` is not a dict")
        entry = {"answer": answer, "metadata": dict(facts), "question": question}
        if len(json.dumps(entry, ensure_ascii=False)) > MAX_COLUMN_CHARACTERS:
            raise UsageError(f"more than {MAX_COLUMN_CHARACTERS} characters as JSON")
        if review.columns is not None:
            review.columns(entry)
    except Exception as error:  # a column of another type may raise anything in the check
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"`task={task!r}`: the columns do not fit this data set: {why}. Give `answer` "
            "and `metadata` as reasoning-gym makes them (`ReasoningGym` does), or drop the row."
        ) from None
    return entry


def score_entry(task: str, answer: str | None, entry: Entry) -> float:
    """Return the score of an answer. One that may not be seen scores like a missing one."""
    if answer is not None and not REVIEWED[task].admits(answer):
        answer = None
    verify = verifier_of(task)
    # some verifiers print or warn about what they cannot read
    with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
        try:
            return float(verify(answer, entry))
        except Exception:
            # raises if the fault is the row's: its own answer cannot be scored either
            verify(entry["answer"] or "", entry)
            return 0.0
