"""How an answer to each reasoning-gym data set is checked: as data, never as code.

Some of these data sets hand the answer, and columns of the row, to `eval` or to SymPy's parser,
which calls it. Every one of version 0.1.25 was read, with all it calls; `REVIEWED` says what
becomes of an answer. One that is not there is refused.
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

from lit_rlsched.rewards import verifiers as ours
from lit_rlsched.rewards.algebra import POLYNOMIALS
from lit_rlsched.rewards.formulas import BITWISE, work_out
from lit_rlsched.rewards.verifiers import FRACTION, LOGIC, NO_LONG_NUMBERS, Entry, listed

VERSION = "0.1.25"
"""Of reasoning-gym: the one that was reviewed."""
LONGEST = 20_000
"""Characters of an answer, where the table says nothing else."""
MOST_COLUMNS = 100_000
"""Values in `metadata`, those of lists in it included."""
LONGEST_COLUMN = 200_000


@dataclass(frozen=True, slots=True)
class Review:
    """What becomes of an answer to one data set."""

    reads: str
    """In words."""
    pattern: str = ""
    """What the whole answer must match; empty: anything, for nothing but text is made of it."""
    longest: int = LONGEST
    columns: Callable[[Entry], object] | None = None
    """Raises where the row's columns are not what is expected."""
    score: Callable[[str, Entry], float] | None = None
    """Ours, in place of the data set's own, which evaluates text."""
    missing: float = 0.0
    """What ours gives where there is no answer, or one that cannot be read."""

    def admits(self, answer: str) -> bool:
        """Whether the verifier may see the answer."""
        if len(answer) > self.longest:
            return False
        return not self.pattern or re.fullmatch(self.pattern, answer, re.DOTALL) is not None


TEXT = Review("compared as text: whole, in words, in characters or by position")
NUMBERS = Review("read by int, float or Decimal; also compared as text")
GRID = Review("read cell by cell, each a digit or a letter")
JSON = Review("read by json.loads, and compared")
MOVES = Review("read move by move, each compared with the moves there are")
FORMULA = r"[-+*/0-9a-zA-Z.() \t\r\n]*"

REVIEWED: dict[str, Review] = {
    "ab": TEXT,
    "acre": TEXT,
    "advanced_geometry": NUMBERS,
    "aiw": TEXT,
    "arc_1d": TEXT,
    "arc_agi": Review(GRID.reads, columns=ours.check_grid),
    "base_conversion": TEXT,
    "basic_arithmetic": TEXT,
    "bf": TEXT,
    "binary_alternation": TEXT,
    "binary_matrix": Review(
        "compared as text, or as a JSON list of lists of numbers (theirs: eval)",
        r"[][(),'\"0-9\s]*",
        score=ours.binary_matrix,
    ),
    "bitwise_arithmetic": Review(
        "read by int; `metadata.problem` by our reader of formulas (theirs: eval)",
        r"[-+]?[0-9a-fA-FxXoObB_]*",
        columns=lambda entry: work_out(entry["metadata"]["problem"], BITWISE),
        score=ours.bitwise_arithmetic,
    ),
    "boxnet": Review(JSON.reads, longest=4000),
    "caesar_cipher": TEXT,
    "calendar_arithmetic": NUMBERS,
    "chain_sum": NUMBERS,
    "circuit_logic": TEXT,
    "codeio": Review(JSON.reads + " by edit distance", longest=1000),
    "coin_flip": Review(
        "read by Fraction, whose exponents are numbers of that many digits",
        FRACTION,
        columns=ours.check_fraction,
    ),
    "color_cube_rotation": TEXT,
    "complex_arithmetic": NUMBERS,
    "count_bits": TEXT,
    "count_primes": TEXT,
    "countdown": Review(
        "read by our reader of formulas (theirs: SymPy's parser)",
        FORMULA,
        columns=ours.check_numbers("numbers", "target"),
        score=ours.countdown,
        missing=0.01,
    ),
    "course_schedule": TEXT,
    "cryptarithm": NUMBERS,
    "decimal_arithmetic": NUMBERS,
    "decimal_chain_sum": NUMBERS,
    "dice": TEXT,
    "emoji_mystery": TEXT,
    "family_relationships": TEXT,
    "figlet_font": TEXT,
    "fraction_simplification": NUMBERS,
    "futoshiki": GRID,
    "game_of_life": JSON,
    "game_of_life_halting": Review(TEXT.reads, score=ours.game_of_life_halting),
    "gcd": TEXT,
    "graph_color": JSON,
    "group_anagrams": JSON,
    "gsm_symbolic": NUMBERS,
    "intermediate_integration": Review(
        "differentiated by our reader of formulas (theirs: SymPy's parser)",
        FORMULA,
        columns=ours.check_integrand,
        score=ours.integration,
    ),
    "isomorphic_strings": TEXT,
    "jugs": Review("read by json.loads, then move by move"),
    "kakurasu": GRID,
    "knight_swap": Review("read by json.loads, then move by move"),
    "knights_knaves": TEXT,
    "largest_island": TEXT,
    "lcm": TEXT,
    "leg_counting": TEXT,
    "letter_counting": TEXT,
    "letter_jumble": TEXT,
    "list_functions": TEXT,
    "mahjong_puzzle": TEXT,
    "manipulate_matrix": TEXT,
    "maze": TEXT,
    "mini_sudoku": GRID,
    "modulo_grid": TEXT,
    "n_queens": Review(
        "compared as text, or as a JSON list of lists of characters (theirs: eval)",
        r"[][(),'\"Q_\s]*",
        score=ours.n_queens,
    ),
    "needle_haystack": TEXT,
    "number_filtering": TEXT,
    "number_format": NUMBERS,
    "number_sequence": TEXT,
    "number_sorting": Review(
        "read by json.loads, `answer` too (theirs: eval)",
        r"[][,'\"0-9.eE+\-\s]*",
        columns=lambda entry: [float(number) for number in listed(entry["answer"])],
        score=ours.number_sorting,
    ),
    "palindrome_generation": TEXT,
    "palindrome_partitioning": JSON,
    "path_star": TEXT,
    "polynomial_equations": NUMBERS,
    "polynomial_multiplication": Review(
        "read by our reader of formulas, `answer` too (theirs: SymPy's parser)",
        FORMULA,
        columns=lambda entry: work_out(entry["answer"], POLYNOMIALS),
        score=ours.polynomial_multiplication,
    ),
    "pool_matrix": GRID,
    "power_function": NUMBERS,
    "prime_factorization": NUMBERS,
    "products": NUMBERS,
    "propositional_logic": Review(
        "read by the data set's own parser; all values of its variables are tried",
        LOGIC,
        longest=500,
        columns=ours.check_premises,
    ),
    "puzzle24": Review(
        "read by our reader of formulas (theirs: SymPy's parser)",
        FORMULA,
        columns=ours.check_numbers("numbers"),
        score=ours.puzzle24,
        missing=0.01,
    ),
    "quantum_lock": Review(MOVES.reads, columns=ours.check_lock),
    "ransom_note": TEXT,
    "rearc": Review(GRID.reads, columns=ours.check_grid),
    "rectangle_count": NUMBERS,
    "rotate_matrix": TEXT,
    "rotten_oranges": TEXT,
    "rubiks_cube": Review(MOVES.reads, NO_LONG_NUMBERS, longest=2000, columns=ours.check_cube),
    "rush_hour": Review(MOVES.reads, NO_LONG_NUMBERS, longest=2000),
    "self_reference": TEXT,
    "sentence_reordering": TEXT,
    "shortest_path": MOVES,
    "simple_equations": TEXT,
    "simple_geometry": TEXT,
    "simple_integration": Review(
        "differentiated by our reader of formulas (theirs: SymPy's parser)",
        FORMULA,
        columns=ours.check_integrand,
        score=ours.integration,
    ),
    "sokoban": MOVES,
    "spell_backward": TEXT,
    "spiral_matrix": Review(
        "compared as text, or as a JSON list of numbers (theirs: eval)",
        r"[][(),'\"0-9\s-]*",
        score=ours.spiral_matrix,
    ),
    "string_insertion": Review(
        "compared as text, or as a JSON list of characters (theirs: eval)",
        r"[][(),'\"A-Z\s]*",
        score=ours.string_insertion,
    ),
    "string_manipulation": TEXT,
    "string_splitting": TEXT,
    "string_synthesis": TEXT,
    "sudoku": GRID,
    "survo": GRID,
    "syllogism": TEXT,
    "time_intervals": NUMBERS,
    "tower_of_hanoi": Review(
        MOVES.reads,
        columns=lambda entry: ours.check_sizes(entry, "num_disks", "num_pegs", most=100),
    ),
    "tsumego": TEXT,
    "word_ladder": TEXT,
    "word_sequence_reversal": TEXT,
    "word_sorting": TEXT,
    "zebra_puzzles": TEXT,
}
"""Data set -> how an answer to it is checked. `composite` is not there: it is made of others."""


@functools.cache
def import_reasoning_gym() -> Any:
    """The library, at the version that was reviewed.

    Raises:
        ImportError: another one is installed.
    """
    installed = importlib.metadata.version("reasoning-gym")
    if installed != VERSION:
        raise ImportError(
            f"reasoning-gym {installed} is installed, and its verifiers were reviewed in "
            f"{VERSION}: another may run what a model answers. Install reasoning-gym=={VERSION}."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of data sets it is built on
        import reasoning_gym
    return reasoning_gym


@functools.cache
def verifier_of(task: str) -> Callable[..., float]:
    """`score_answer` of the data set."""
    verifier: Callable[..., float] = import_reasoning_gym().get_score_answer_fn(task)
    return verifier


def reviewed(task: object) -> Review:
    """How a data set's answers are checked.

    Raises:
        ValueError: nobody has looked.
    """
    if not isinstance(task, str) or task not in REVIEWED:
        raise ValueError(
            f"`task={task!r:.80}`: `reasoning_gym_reward` scores data sets whose verifier was "
            "reviewed, for some run the answer as Python, and this is none of them. Use one of "
            "`lit_rlsched.rewards.answers.REVIEWED`, or a reward function of your own."
        )
    return REVIEWED[task]


def checked_entry(task: object, metadata: object, answer: object, question: object) -> Entry:
    """The row's columns, as data of the expected kind and size. None is trusted, whoever made it.

    Raises:
        ValueError: the data set was not reviewed, or a column is not what it must be.
    """
    review = reviewed(task)
    try:
        facts = json.loads(metadata) if isinstance(metadata, str) else metadata
        if not isinstance(facts, Mapping):
            raise ValueError(f"`metadata={facts!r:.80}` is not a dict")
        entry = {"answer": answer, "metadata": dict(facts), "question": question}
        _check_plain(entry)
        if review.columns is not None:
            review.columns(entry)
    except Exception as error:  # whatever a column of another kind makes of the check
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"`task={task!r}`: the columns are not those of such an entry: {why}. Give `answer` "
            "and `metadata` as reasoning-gym makes them (`ReasoningGym` does), or drop the row."
        ) from None
    return entry


def _check_plain(column: object) -> None:
    waiting, seen, characters = [column], 0, 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str):
            characters += len(value)
        elif isinstance(value, int):
            characters += value.bit_length() // 4
        elif not (value is None or isinstance(value, float)):
            raise ValueError(f"a {type(value).__name__} is no plain data")
        if seen > MOST_COLUMNS or characters > LONGEST_COLUMN:
            raise ValueError(f"more than {MOST_COLUMNS} values or {LONGEST_COLUMN} characters")


def score_entry(task: str, answer: str | None, entry: Entry) -> float:
    """The score of an answer; one that cannot be read has that of a missing one.

    Args:
        task: Name of the data set.
        answer: What the model answers.
        entry: From `checked_entry`.
    """
    review = reviewed(task)
    if answer is not None and not review.admits(answer):
        answer = None
    if review.score is None:
        return _score_theirs(verifier_of(task), answer, entry)
    if not answer:
        return review.missing
    try:
        return review.score(answer, entry)
    except (ValueError, ArithmeticError, TypeError, RecursionError):
        return review.missing


def _score_theirs(verify: Callable[..., float], answer: str | None, entry: Entry) -> float:
    # some print or warn of what they cannot read
    with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
        try:
            return float(verify(answer, entry))
        except Exception:
            # if the row's own answer cannot be scored either, it is the row: say so
            verify(entry["answer"] or "", entry)
            return 0.0
