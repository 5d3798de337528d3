"""Scores of answers to reasoning-gym data sets, without running any text.

Some of these data sets pass the answer, or columns of the row, to `eval` or to SymPy's parser,
which runs it. Every verifier of version 0.1.25 was read, with all that it calls; `REVIEWED` says
how an answer to each data set is checked instead. Other data sets are refused.
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

from lit_rlsched.rewards import verifiers
from lit_rlsched.rewards.formulas import work_out
from lit_rlsched.rewards.verifiers import FRACTION, LOGIC, NO_LONG_NUMBERS, Entry
from lit_rlsched.settings import UsageError

VERSION = "0.1.25"
"""Version of reasoning-gym that was reviewed."""
MAX_COLUMN_CHARACTERS = 300_000
"""Maximum size of a row's columns, written as JSON."""


@dataclass(frozen=True, slots=True)
class Review:
    """How an answer to one data set is checked.

    Attributes:
        pattern: Regular expression that the whole answer must match. None: any text, as the data
            set's verifier only compares it or converts it to plain values.
        longest: Maximum number of characters in an answer.
        columns: Raises if the row's columns are not what the verifier expects.
        score: Verifier that replaces the data set's own, which runs text.
        missing: Score of a missing or unreadable answer, in place of `score`.
    """

    pattern: str | None = None
    longest: int = 20_000
    columns: Callable[[Entry], object] | None = None
    score: Callable[[str, Entry], float] | None = None
    missing: float = 0.0

    def admits(self, answer: str) -> bool:
        """Return whether the verifier may see the answer."""
        if len(answer) > self.longest:
            return False
        return self.pattern is None or bool(re.fullmatch(self.pattern, answer, re.DOTALL))


_COMPARED_AS_TEXT = """
    ab acre aiw arc_1d base_conversion basic_arithmetic bf binary_alternation caesar_cipher
    circuit_logic color_cube_rotation count_bits count_primes course_schedule dice emoji_mystery
    family_relationships figlet_font gcd isomorphic_strings knights_knaves largest_island lcm
    leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix
    maze modulo_grid needle_haystack number_filtering number_sequence palindrome_generation
    path_star ransom_note rotate_matrix rotten_oranges self_reference sentence_reordering
    simple_equations simple_geometry spell_backward string_manipulation string_splitting
    string_synthesis syllogism tsumego word_ladder word_sequence_reversal word_sorting
    zebra_puzzles
"""
_READ_BY_INT_FLOAT_OR_DECIMAL = """
    advanced_geometry calendar_arithmetic chain_sum complex_arithmetic cryptarithm
    decimal_arithmetic decimal_chain_sum fraction_simplification gsm_symbolic number_format
    polynomial_equations power_function prime_factorization products rectangle_count
    time_intervals
"""
_READ_CELL_BY_CELL = "futoshiki kakurasu mini_sudoku pool_matrix sudoku survo"
_READ_BY_JSON = """
    game_of_life graph_color group_anagrams jugs knight_swap palindrome_partitioning
"""
_READ_MOVE_BY_MOVE = "shortest_path sokoban"

_NEED_NO_ANSWER = """
    bitwise_arithmetic boxnet countdown graph_color n_queens propositional_logic puzzle24
    rubiks_cube rush_hour
"""

_FORMULA = r"[-+*/0-9a-zA-Z.() \t\r\n]*"
_GRID = Review(columns=verifiers.check_grid)

REVIEWED: dict[str, Review] = {
    **dict.fromkeys(_COMPARED_AS_TEXT.split(), Review()),
    **dict.fromkeys(_READ_BY_INT_FLOAT_OR_DECIMAL.split(), Review()),
    **dict.fromkeys(_READ_CELL_BY_CELL.split(), Review()),
    **dict.fromkeys(_READ_BY_JSON.split(), Review()),
    **dict.fromkeys(_READ_MOVE_BY_MOVE.split(), Review()),
    # their verifiers are used, with limits
    "arc_agi": _GRID,
    "boxnet": Review(longest=4000),
    "codeio": Review(longest=1000),  # compared by edit distance
    "coin_flip": Review(FRACTION, columns=verifiers.check_fraction),
    "propositional_logic": Review(LOGIC, longest=500, columns=verifiers.check_premises),
    "quantum_lock": Review(columns=verifiers.check_lock),
    "rearc": _GRID,
    "rubiks_cube": Review(NO_LONG_NUMBERS, longest=2000, columns=verifiers.check_cube),
    "rush_hour": Review(NO_LONG_NUMBERS, longest=2000),
    "tower_of_hanoi": Review(columns=verifiers.check_hanoi),
    # theirs gives 1 to every answer
    "game_of_life_halting": Review(score=verifiers.game_of_life_halting),
    # theirs call `eval`
    "binary_matrix": Review(r"[][(),'\"0-9\s]*", score=verifiers.binary_matrix),
    "bitwise_arithmetic": Review(
        r"[-+]?[0-9a-fA-FxXoObB_]*",
        columns=lambda entry: work_out(entry["metadata"]["problem"]),
        score=verifiers.bitwise_arithmetic,
    ),
    "n_queens": Review(r"[][(),'\"Q_\s]*", score=verifiers.n_queens),
    "number_sorting": Review(
        r"[][,'\"0-9.eE+\-\s]*",
        columns=lambda entry: verifiers.listed_numbers(entry["answer"]),
        score=verifiers.number_sorting,
    ),
    "spiral_matrix": Review(r"[][(),'\"0-9\s-]*", score=verifiers.spiral_matrix),
    "string_insertion": Review(r"[][(),'\"A-Z\s]*", score=verifiers.string_insertion),
    # theirs call SymPy's parser
    "countdown": Review(
        _FORMULA,
        columns=verifiers.check_numbers("numbers", "target"),
        score=verifiers.countdown,
        missing=0.01,
    ),
    "puzzle24": Review(
        _FORMULA,
        columns=verifiers.check_numbers("numbers"),
        score=verifiers.puzzle24,
        missing=0.01,
    ),
}
"""Data set -> how an answer to it is checked.

Left out are `composite`, which is made of others, and three whose answers only SymPy can compare:
integrals and products of polynomials.
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
    verifier: Callable[..., float] = import_reasoning_gym().get_score_answer_fn(task)
    return verifier


def checked_entry(task: object, metadata: object, answer: object, question: object) -> Entry:
    """Return a row's columns once their types and sizes are checked, whoever made the row."""
    if not isinstance(task, str) or task not in REVIEWED:
        raise UsageError(
            f"`task={task!r:.80}`: `reasoning_gym_reward` scores only data sets whose verifier was "
            "reviewed, as some run the answer as Python. Use one of "
            "`lit_rlsched.rewards.answers.REVIEWED`, or a reward function of your own."
        )
    check_columns = REVIEWED[task].columns
    try:
        facts = json.loads(metadata) if isinstance(metadata, str) else metadata
        if not isinstance(answer, str) and (
            answer is not None or task not in _NEED_NO_ANSWER.split()
        ):
            raise UsageError(f"`answer={answer!r:.80}` is not text, to which answers are compared")
        if not isinstance(facts, Mapping):
            raise UsageError(f"`metadata={facts!r:.80}` is not a dict")
        entry = {"answer": answer, "metadata": dict(facts), "question": question}
        _check_plain(entry)
        if check_columns is not None:
            check_columns(entry)
    except Exception as error:  # a column of another type may raise anything in the check
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"`task={task!r}`: the columns do not fit this data set: {why}. Give `answer` "
            "and `metadata` as reasoning-gym makes them (`ReasoningGym` does), or drop the row."
        ) from None
    return entry


def _check_plain(entry: Entry) -> None:
    if len(json.dumps(entry, ensure_ascii=False)) > MAX_COLUMN_CHARACTERS:
        raise UsageError(f"more than {MAX_COLUMN_CHARACTERS} characters as JSON")


def score_entry(task: str, answer: str | None, entry: Entry) -> float:
    """Return the score of an answer. One that cannot be read scores like a missing one."""
    review = REVIEWED[task]
    if answer is not None and not review.admits(answer):
        answer = None
    if review.score is None:
        return _score_with_library(verifier_of(task), answer, entry)
    if not answer:
        return review.missing
    try:
        return review.score(answer, entry)
    except (ValueError, ArithmeticError, TypeError, RecursionError):
        return review.missing


def _score_with_library(verify: Callable[..., float], answer: str | None, entry: Entry) -> float:
    # some verifiers print or warn about what they cannot read
    with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
        try:
            return float(verify(answer, entry))
        except Exception:
            # raises if the fault is the row's: its own answer cannot be scored either
            verify(entry["answer"] or "", entry)
            return 0.0
