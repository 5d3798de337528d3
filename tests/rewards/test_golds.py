r"""Gold answers are read as a whole: `7\sqrt{11}` is not 7."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lit_rlsched.rewards import RewardScheduler, golds
from lit_rlsched.rewards.functions import math_verify_reward
from lit_rlsched.settings import UsageError


def score(completion: str, gold: Any) -> float | None:
    return math_verify_reward([completion], answer=[gold])[0]


def readable(gold: Any) -> bool:
    try:
        math_verify_reward.check_row({"answer": gold})
    except ValueError:
        return False
    return True


# primes, so that no fraction, root or power has the value of a number in it
PRIMES = st.sampled_from([2, 3, 5, 7, 11, 13, 23, 101, 1009]).map(str)


def filled(*forms: str) -> st.SearchStrategy[str]:
    """Draw a form and put different numbers into it, for `#`."""

    def fill(form: str, numbers: list[str]) -> str:
        for number in numbers[: form.count("#")]:
            form = form.replace("#", number, 1)
        return form

    numbers = st.lists(PRIMES, min_size=6, max_size=6, unique=True)
    return st.builds(fill, st.sampled_from(forms), numbers)


TERMS = filled(
    *(r"#", r"\frac{#}{#}", r"\sqrt{#}", r"#\sqrt{#}", r"\frac{#\pi}{#}", r"#\pi", r"#x", r"\pi"),
    *(r"\sqrt[3]{#}", r"#^{#}", r"x^2", r"(#x + #)^2", r"\frac{\sqrt{#}}{#}", r"# \times 10^4"),
)
SUMS = st.lists(TERMS, min_size=1, max_size=3).map(" + ".join)
WHOLE = st.one_of(
    SUMS,
    st.builds(
        lambda form, terms: form.format(*terms),
        st.sampled_from(
            [
                *(r"-{0}", "({0}, {1})", r"\left( {0}, {1}, {2} \right)", "[-{0}, {1})"),
                *("{0}, {1}",),
                *(r"\{{ {0}, {1}, {2} \}}", r"\begin{{pmatrix}} {0} \\ {1} \end{{pmatrix}}"),
                *(r"\begin{{pmatrix}} {0} & {1} \\ {2} & {0} \end{{pmatrix}}",),
                *(r"{0} \text{{ or }} {1}",),
                *(r"(-\infty, -{0}] \cup [{1}, \infty)", "y = {0}", r"x \le {0}"),
                *(r"\frac{{{0}}}{{{1}}}",),
            ]
        ),
        st.lists(TERMS, min_size=3, max_size=3, unique=True),
    ),
    filled("#,234", "#.25", r"#\frac{1}{#}", "(A)", "B", "#:#", r"\log_2 #", "#!", "|#x|"),
)
WRAPS = st.sampled_from(
    [
        "{}",
        "${}$",
        r"\({}\)",
        r"\boxed{{{}}}",
        "so ${}$ fits.\n#### {}",
        r"It is $\boxed{{{}}}$.",
        " {} ",
    ]
)


@given(answer=WHOLE, wrap=WRAPS)
def test_the_whole_gold_scores_and_no_number_in_it_does(answer: str, wrap: str) -> None:
    gold = wrap.format(*[answer] * wrap.count("{}"))
    assert readable(gold)
    assert score(rf"so it is \boxed{{{answer}}}", gold) == 1
    numbers = {*re.findall(r"\d+(?:\.\d+)?", answer), *re.findall(r"\d", answer)} - {answer}
    assume(not re.fullmatch(rf"y = ({'|'.join(numbers)})", answer))  # a variable is left out
    assume(answer != "2!")  # is 2
    plain = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", answer)
    if re.fullmatch(r"[\d/ +]+", plain):  # 3/2 + 3/2 is 3
        numbers -= {str(sum(map(Fraction, plain.split(" + "))))}
    assert not [number for number in numbers if score(rf"\boxed{{{number}}}", gold)]


JUNK = st.lists(
    st.one_of(
        PRIMES,
        st.sampled_from(
            [
                *(" ", " ", "+", "-", ",", ", ", r"\sqrt{2}", r"\frac{3}{7}", r"\pi", "x"),
                *("(", ")"),
                *("^", r"\cdot ", "[", "]", r"\infty", r"\text{ and }", "!", r"\,", ";", ":", "/"),
                *("|", "<", ".", r"\ldots", "_2", "_", "e", "{", "}", r"\%", "*", "&", r"\\", "$"),
                *(" dollars", " cm", "???", "#", "\n", r"\boxed{", r"\quad ", "½", "√"),
                *("\N{MINUS SIGN}", "="),
            ]
        ),
    ),
    min_size=1,
    max_size=6,
).map("".join)


@given(gold=JUNK)
def test_of_any_text_the_whole_counts_or_it_is_refused(gold: str) -> None:
    if not readable(gold):
        return
    assert score(rf"\boxed{{{gold}}}", gold) == 1
    value = golds.read_gold(gold)[0]
    for number in {*re.findall(r"\d+(?:\.\d+)?", gold)}:
        if score(rf"\boxed{{{number}}}", gold):  # then it is the value: `$7`, `7%`, `x=7`, `3-3+7`
            found = float(getattr(value, "rhs", value).doit())
            assert found in (float(number), float(number) / 100), number


@given(filled("#", "-#.25", "1,234", r"\frac{#}{#}", "#/#", r"\sqrt{#}", r"#\sqrt{#}", r"#\pi"))
def test_what_is_known_to_be_readable_is_read(answer: str) -> None:
    assert golds._SIMPLE.fullmatch(answer)
    assert golds.read_gold(answer)


@given(
    st.one_of(
        st.integers(-(10**12), 10**12),
        st.floats(-1e20, 1e20),
        st.sampled_from([2e-05, 3.5e-12, 1e16, -4e22]),
        st.decimals(-1000, 1000, places=9),
        st.fractions(),
        st.floats(-1000, 1000, width=32).map(np.float32),
        st.integers(-100, 100).map(np.int64),
    )
)
def test_a_gold_that_is_a_number_has_its_own_value(gold: Any) -> None:
    text = str(gold)
    exact = Fraction(text)
    assert readable(gold)
    assert score(rf"\boxed{{{text}}}", gold) == 1
    assert score(rf"\boxed{{{text}}}", text) == 1
    plain = f"{Decimal(text):f}" if "/" not in text else text
    assert score(rf"\boxed{{{plain}}}", gold) == 1
    for other in re.findall(r"\d+", text):
        if Fraction(other) != exact:
            assert score(rf"\boxed{{{other}}}", gold) == 0


@pytest.mark.parametrize(
    ("gold", "completion", "wanted"),
    [
        (2e-05, r"\boxed{0.00002}", 1),
        (2e-05, r"\boxed{2 \times 10^{-5}}", 1),
        (2e-05, r"\boxed{2}", 0),
        (2e-08, r"\boxed{0}", 0),
        ("2e-08", r"\boxed{0.00000003}", 0),
        (7.0, r"\boxed{7}", 1),
        (np.float32(0.1), r"\boxed{\frac{1}{10}}", 1),
        ("0.333333", r"\boxed{\frac{1}{3}}", 1),
        ("-5", r"\boxed{5}", 0),
        ("\N{MINUS SIGN}5", r"\boxed{-5}", 1),
        ("1,234", r"\boxed{1234}", 1),
        (r"10,\!000", r"\boxed{10000}", 1),
        ("#### 1,234", r"\boxed{1,234}", 1),
        ("#### -1,234.50", r"\boxed{-1234.5}", 1),
        (r"\$18", r"\boxed{18}", 1),
        ("5 cm", r"\boxed{5\text{ cm}}", 1),
        (r"50\%", r"\boxed{50}", 1),
        (r"50\%", r"\boxed{\frac{1}{2}}", 1),
        (r"90^\circ", r"\boxed{90}", 1),
        ("$3$ and $4$", r"\boxed{3, 4}", 1),
        ("$3$ and $4$", r"\boxed{4}", 0),
        (r"so \boxed{3} or \boxed{4}", r"\boxed{4}", 0),
        ("Friday", r"\boxed{\text{Friday}}", 1),
        ("Friday", r"\boxed{\text{Monday}}", 0),
        ("Yes", r"\boxed{yes}", 1),
        (r"\text{Yes}", r"\boxed{Yes}", 1),
        ("Yes", r"\boxed{No}", 0),
        ("No solution", r"\boxed{\text{no solution}}", 1),
        ("B", r"\boxed{\text{(B)}}", 1),
        ("(B)", "It is clear.\nAnswer: B", 1),
        (r"\text{(B)}", "The answer is (B).", 0),  # only a letter that stands alone
        ("B", "Answer: C", 0),
        ("B", "B is wrong, so the answer is C.", 0),
        ("42", "The answer is 42.", 1),
    ],
)
def test_forms_of_golds(gold: Any, completion: str, wanted: float) -> None:
    assert readable(gold)
    assert score(completion, gold) == wanted


UNREADABLE = [
    *(None, True, np.bool_(True), [1, 2], ["4"], {"a": 1}, (1,), np.array(3.0), b"3"),
    *(float("nan"), float("inf"), Decimal("NaN"), "1e5000", "", "  ", "####", "so ####", "$$"),
    *("???", "7 ???", "½", "90°", "18 dollars", "The answer is $x+1$.", "The answer is 4.", "4pi"),
    *("7 8", "1 1/2", "12_8", "12_{8}", "(12)_8", "5/0", r"\frac{1}{", "(3", "2}+{3"),
    *(r"7\unknown{2}",),
    *("11,11", "7;7", r"\{3,3\}", "[5,5]", "(5,2]", r"so \boxed{3", r"0.\overline{3}"),
    *("7 & 8", "7,", "9" * 2000),
]


@pytest.mark.parametrize("gold", UNREADABLE, ids=repr)
def test_a_gold_that_cannot_be_read_is_refused_with_its_row(gold: Any) -> None:
    scheduler = RewardScheduler([math_verify_reward])
    rows = [("a", {"solution": "4"}), ("b", {"answer": gold, "solution": "4"})]
    with pytest.raises(UsageError, match="`math_verify_reward` refuses the row `b`: the gold answ"):
        scheduler.check_rows(rows)
    failures: list[str] = []
    given = {"log_failure": lambda kind, why: failures.append(kind)}
    assert math_verify_reward([r"\boxed{4}"], answer=[gold], **given) == [None]
    assert failures == ["unparsed"]


def test_a_run_is_refused_before_the_engine_starts(fit: Any, sums: list) -> None:
    rows = [*sums[:5], {"prompt": "8+8=", "answer": "16 or so"}]
    with pytest.raises(
        ValueError, match=r"refuses the row `5 of train_data .*'16 or so'.*word `so`"
    ):
        fit(train_data=rows, reward_funcs=[math_verify_reward], engine=None)
