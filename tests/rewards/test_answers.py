"""Answers are data: nothing that a model or a row wrote is run, in a real reward worker."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from audited import Audited, AuditedEval
from harness import collect, score, submit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_rlsched.rewards import RewardScheduler, ScoredJob
from lit_rlsched.rewards.answers import (
    REVIEWED,
    checked_entry,
    import_reasoning_gym,
    score_entry,
)
from lit_rlsched.rewards.functions import countdown_reward, work_out
from lit_rlsched.settings import UsageError

TOUCHED = Path("/tmp/touched-by-an-answer")
TOUCH = f"open({str(TOUCHED)!r}, 'w')"
ESCAPES = [
    TOUCH,
    f"sin({TOUCH!r})",
    "sin(\"__import__%c'os'%c%csystem%c'touch X'%c\" % (40,41,46,40,41))",
    f"[[{TOUCH}]]",
    f"['{TOUCH}']",
    f"__import__('pathlib').Path({str(TOUCHED)!r}).touch()",
    f"(lambda: {TOUCH})()",
    f"[f for f in ().__class__.__base__.__subclasses__()][0]({TOUCH})",
    f"exec#\n({TOUCH!r})",
    f"\uff45xec({TOUCH!r})",
    f"Symbol({TOUCH!r})",
    f"S({TOUCH!r})",
    f"sympify({TOUCH!r})",
    f"x.subs({TOUCH!r})",
    f"Integral(x, {TOUCH!r})",
    f"0x10 + {TOUCH}",
    f"{{'a': {TOUCH}}}",
    f"f'{{{TOUCH}}}'",
    f"1 if {TOUCH} else 2",
    "9**9**9",
    "9**9**9**9**9",
    "1e999999999",
    "1" * 5000,
    "2**-999999999999",
    "1 << 999999999999",
    "(" * 5000,
    "[" * 5000,
    "-" * 5000 + "1",
    "R999999999",
    "A+999999999999",
    "x" * 30_000,
    "exp(exp(exp(exp(exp(9)))))",
    "\u2228".join(f"a{n}" for n in range(40)),
    "cos\t.__globals__",
    "os.system('true')",
    "\x00",
    "\ud800",
    "!!python/object/apply:os.system ['true']",
    "cos\nsystem\n(S'true'\ntR.",
]
QUICK = ["coin_flip", "rubiks_cube", "propositional_logic", "chain_sum", "game_of_life"]
FEW_AND_ALL = [QUICK, pytest.param(sorted(REVIEWED), marks=pytest.mark.slow)]


def entries(task: str, count: int = 1) -> list[dict[str, Any]]:
    import reasoning_gym

    data = reasoning_gym.create_dataset(task, size=count, seed=1)
    return [data[index] for index in range(count)]


def gold_of(task: str, entry: Mapping[str, Any]) -> str | None:
    """An answer that is right, for all data sets but two."""
    facts = entry["metadata"]
    if task == "graph_color":
        return json.dumps(facts["possible_answer"])
    return entry["answer"] or facts.get("example_correct_answer") or facts.get("example_answer")


def columns_of(task: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"task": task, **{name: entry[name] for name in ("answer", "metadata", "question")}}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    TOUCHED.unlink(missing_ok=True)
    return {}


@pytest.fixture(scope="module")
def audited() -> Iterator[RewardScheduler]:
    with RewardScheduler([Audited()], timeout=60) as scheduler:
        yield scheduler


def check_silent(
    scheduler: RewardScheduler, tasks: list[str], answers: list[str], rows: dict[str, Any]
) -> None:
    """Score all answers to all tasks; nothing of it may be heard of."""
    for task in tasks:
        if task not in rows:
            rows[task] = columns_of(task, entries(task)[0])
            submit(scheduler, (task, "the data set's files are read"), "", columns=rows[task])
        for number, answer in enumerate(answers):
            completion = f"<answer>{answer}</answer>"
            submit(scheduler, (task, number), completion, columns=rows[task])
    check_jobs(collect(scheduler, 300))


def check_jobs(jobs: dict[Any, ScoredJob]) -> None:
    for key, job in jobs.items():
        assert job.extra.get("events", []) == [], key
    failures = {key: job.failures for key, job in jobs.items() if job.failures != [None]}
    assert not failures
    assert not TOUCHED.exists()


def test_no_known_escape_is_run_as_a_countdown() -> None:
    facts = {"numbers": [3, 5, 7], "target": 9}
    with RewardScheduler([Audited(countdown_reward)], timeout=60) as scheduler:
        for answer in ["", *ESCAPES]:
            submit(scheduler, answer, f"<answer>{answer}</answer>", columns={"metadata": facts})
        jobs = collect(scheduler, 60)
    check_jobs(jobs)
    assert all(job.scores == [0.0] for job in jobs.values())


def test_the_hook_hears_what_is_evaluated() -> None:
    jobs, _ = score([AuditedEval()], ["1 + 1"])
    assert [event.split()[0] for event in jobs["1 + 1"].extra["events"]] == ["compile", "exec"]


@pytest.mark.parametrize("tasks", FEW_AND_ALL, ids=len)
def test_no_known_escape_is_run(audited, rows, tasks) -> None:
    check_silent(audited, tasks, ESCAPES, rows)


NAMES = ["sin", "exp", "eval", "__import__", "os", "lambda", "%c", "0x1f", "1e9", "**", "<<"]
PIECES = st.sampled_from([*NAMES, "\n", *" ()[]'\",.*/+-\\#07xC"])
STRINGS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=40).map("".join))


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(st.lists(STRINGS, min_size=20, max_size=20))
def test_no_random_answer_is_run_in_a_few_data_sets(audited, rows, answers: list[str]) -> None:
    check_silent(audited, QUICK, answers, rows)


def spoiled(value: Any, with_: Any) -> Iterator[Any]:
    """Copies of a value, each with one leaf replaced; the first few of a list stand for all."""
    if isinstance(value, Mapping):
        for name in value:
            for leaf in spoiled(value[name], with_):
                yield {**value, name: leaf}
    elif isinstance(value, list | tuple):
        for index in range(min(2, len(value))):
            for leaf in spoiled(value[index], with_):
                yield [*value[:index], leaf, *value[index + 1 :]]
    else:
        yield with_


def check_columns(scheduler: RewardScheduler, tasks: list[str], escapes: list[Any]) -> None:
    """Put each escape into each place of a row: the row is scored, or costs its own completion."""
    for task in tasks:
        entry = entries(task)[0]
        good = columns_of(task, entry)
        completion = f"<answer>{gold_of(task, entry)}</answer>"
        submit(scheduler, (task, "the data set's files are read"), completion, columns=good)
        for number, escape in enumerate(escapes):
            columns = {name: good[name] for name in ("answer", "metadata")}
            for place, bad in enumerate(spoiled(columns, escape)):
                submit(scheduler, (task, number, place), completion, columns=good | bad)
    jobs = collect(scheduler, 300)
    for key, job in jobs.items():
        assert job.extra.get("events", []) == [], key
        assert job.failures[0] is None or job.failures[0].startswith("raised: "), (key, job)
    assert not TOUCHED.exists()


COLUMN_ESCAPES = [TOUCH, f"(0x1 << 0x1) + {TOUCH}", f"['1', {TOUCH}]", "9**9**9", 10**15]


@pytest.mark.parametrize("tasks", FEW_AND_ALL, ids=len)
def test_no_column_is_run(audited, tasks) -> None:
    few = COLUMN_ESCAPES[:3]
    check_columns(audited, tasks, few if tasks is QUICK else COLUMN_ESCAPES + ESCAPES[:8])


def test_a_version_that_nobody_reviewed_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.26")
    import_reasoning_gym.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"reasoning-gym 0\.1\.26 is installed"):
            import_reasoning_gym()
    finally:
        import_reasoning_gym.cache_clear()


def test_every_data_set_was_reviewed_but_those_that_are_left_out() -> None:
    from reasoning_gym.factory import DATASETS

    run_text = {
        *("binary_matrix", "bitwise_arithmetic", "countdown", "n_queens", "number_sorting"),
        *("puzzle24", "spiral_matrix", "string_insertion", "polynomial_multiplication"),
        *("simple_integration", "intermediate_integration"),
    }
    assert set(DATASETS) == {*REVIEWED, *run_text, "composite", "game_of_life_halting"}


@pytest.mark.parametrize("tasks", FEW_AND_ALL, ids=len)
def test_the_row_s_own_answer_scores_one(tasks: Collection[str]) -> None:
    for task in tasks:
        entry = entries(task)[0]
        gold = gold_of(task, entry)
        for metadata in (entry["metadata"], json.dumps(entry["metadata"])):
            own = metadata, entry["answer"], entry["question"]
            checked = checked_entry(task, REVIEWED[task], *own)
            assert gold is None or score_entry(task, gold, checked) == 1.0, task


def test_characters_are_counted_and_not_their_escapes() -> None:
    checked_entry("gcd", REVIEWED["gcd"], {}, "\u6570" * 250_000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1+2*3", 7), ("(1+2)*3", 9), ("8/2/2", 2), ("7-5-3", -1), ("-3 + +5", 2)),
        *(("2*-3", -6), (" 1.5 * .5*4. ", 3), ("-(2+3)*(4-6)/5", 2), ("10/4", 2.5)),
    ],
)
def test_a_formula_has_python_s_value(text: str, value: float) -> None:
    assert work_out(text) == value == eval(text)


@pytest.mark.parametrize(
    "text", ["", "2**3", "2**x", "1/(2-2)", "x", "sqrt(4)", "1j", "1e9", "0x1", "1 2", "(1", "1)"]
)
def test_what_is_no_formula_or_has_no_value_is_refused(text: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        work_out(text)
