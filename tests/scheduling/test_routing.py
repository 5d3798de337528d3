"""Which engine gets which group, and which waiting requests move."""

from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.routing import moves, promised_tokens, route
from lit_rlsched.types import Request, Sampling


def request(name: str, prefix: int = 0, expected: float | None = None) -> Request:
    return Request(name, (5,), 0, Sampling(100), (6,) * prefix, expected=expected)


def test_promised_tokens() -> None:
    assert promised_tokens(request("a/0")) == 100
    assert promised_tokens(request("a/0", prefix=30)) == 70
    assert promised_tokens(request("a/0", prefix=30, expected=12.5)) == 12.5
    probing = Request("a/0", (5,), 0, Sampling(100), pause_at=16)
    assert promised_tokens(probing) == 100, "it goes on after its pause"


def test_a_route_by_hand() -> None:
    assert route({"a": 5, "b": 3, "c": 1, "d": 1, "e": 9}, [0, 0]) == {
        "a": 0,
        "b": 1,
        "c": 1,
        "d": 1,
        "e": 0,  # a tie: 5 each
    }
    assert route({"a": 1, "b": 1}, [4, 2.5, 3]) == {"a": 1, "b": 2}
    assert route({}, [0]) == {}


@given(
    st.lists(st.floats(1, 1000), max_size=30),
    st.lists(st.floats(0, 1000), min_size=1, max_size=4),
)
def test_no_engine_gets_a_group_when_another_has_less(tokens: list, loads: list) -> None:
    groups = {str(i): n for i, n in enumerate(tokens)}
    homes = route(groups, loads)
    assert list(homes) == list(groups)
    now = list(loads)
    for group, home in homes.items():
        assert now[home] == min(now) and now.index(min(now)) == home
        now[home] += groups[group]
    # no load exceeds another by more than its last group, unless it began so
    if tokens:
        for home in set(homes.values()):
            assert now[home] - max(tokens) <= min(now) + 1e-9


def test_moves_by_hand() -> None:
    a = [request(f"a/{i}") for i in range(3)]
    b = [request(f"b/{i}") for i in range(2)]
    # five wait, one of them finds a slot; engine 1 has three free, engine 2 one
    assert moves([[*a, *b], [], []], [-4, 3, 1]) == {"b/1": 1, "b/0": 1, "a/2": 1, "a/1": 2}
    assert moves([[*a, *b], [], []], [-1, 3, 1]) == {"b/1": 1}
    assert moves([[], [], []], [-4, 3, 1]) == {}, "those that wait have begun"
    assert moves([[*a], [*b]], [-3, -2]) == {}
    assert moves([[*a], [*b], []], [-3, -2, 1]) == {"a/2": 2}, "the one with the most gives"
    c = [request("c/0"), request("d/0")]
    assert moves([c, [*b], []], [-2, -2, 2]) == {"d/0": 2, "b/1": 2}, "after each group anew"
    assert moves([[*a], [*b], []], [-3, -2, 9]) == {
        "a/2": 2,
        "a/1": 2,
        "a/0": 2,
        "b/1": 2,
        "b/0": 2,
    }


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 3), st.integers(0, 6)),
        min_size=1,
        max_size=4,
    )
)
def test_nobody_waits_beside_a_free_slot(engines: list) -> None:
    """Each engine: the groups of requests that may move, more that may not, and free slots."""
    waiting = [
        [request(f"{i}.{group}/{n}") for n, group in enumerate(sorted(groups))]
        for i, (groups, _, _) in enumerate(engines)
    ]
    free = [slots - len(groups) - begun for groups, begun, slots in engines]
    moved = moves(waiting, free)
    at = {r.id: i for i, requests in enumerate(waiting) for r in requests}
    for name, to in moved.items():
        assert free[at[name]] < 0 < free[to]
    after = list(free)
    for name, to in moved.items():
        after[at[name]] += 1
        after[to] -= 1
    for i, requests in enumerate(waiting):
        left = [r for r in requests if r.id not in moved]
        assert not (left and after[i] < 0 and max(after) > 0)
        assert after[i] >= min(free[i], 0) and (after[i] >= 0 or free[i] < 0)
