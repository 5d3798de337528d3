import io
from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.types import Completion, Draft, Event, Group, Prompt, Sampling

floats = st.floats(-1e3, 0, allow_nan=False)
extras = st.sampled_from([{}, {"n": 1}, {"answer": [None, "x", 0.5], "nested": {"y": True}}])
logs = st.sampled_from([{}, {"spread": [0.5]}, {"": [], "b": [-1.0, 2.5]}])


@st.composite
def completions(draw, index, scored):
    n = draw(st.integers(0, 6))
    split = draw(st.integers(0, n))
    done = Completion(
        index=index,
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)),
        logprobs=draw(st.lists(floats, min_size=n, max_size=n)),
        segments=[(v, k) for v, k in ((1, split), (2, n - split)) if k],
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        scores=draw(st.none() | st.lists(st.none() | floats, min_size=2, max_size=2)),
        advantage=draw(floats),
        attempts=draw(st.integers(0, 9)),
        extra=draw(extras),
        logged=draw(logs),
        messages=draw(st.sampled_from([[], [{"role": "tool", "content": "\ud83d", "n": None}]])),
        observation=draw(st.sampled_from(["", "TASK"])),
        waited=draw(st.integers(0, 9)),
        environment_state=draw(st.sampled_from(["", "gASVAA=="])),
        dropped=draw(st.sampled_from([None, "nonfinite_logprob"])),
    )
    if scored:
        done.old_logprobs = array("d", draw(st.lists(floats, min_size=n, max_size=n)))
    return done


@st.composite
def pools(draw):
    scored = draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 3), max_size=4))
    return [
        Group(
            f"{g}@0",
            Prompt(str(g), f"prompt {g}", (g,)),
            Sampling(8, 0.7, 0.9, 7, 0.01),
            [draw(completions(i, scored)) for i in range(size)],
        )
        for g, size in enumerate(sizes)
    ]


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(pools())
def test_pack_and_unpack(groups):
    prompts = {g.prompt.uid: g.prompt for g in groups}
    assert unpack(saved(pack(groups)), prompts.__getitem__) == groups


def test_dropped_completions_without_old_logprobs_get_zeros():
    kept = Completion(0, [5, 6], [-1.0, -2.0], [(0, 2)], old_logprobs=[-1.5, -2.5])
    dropped = Completion(1, [7], [float("inf")], [(0, 1)], dropped="nonfinite_logprob")
    (group,) = unpack(
        saved(pack([Group("a@0", Prompt("a", "", (1,)), Sampling(4), [kept, dropped])])),
        lambda uid: Prompt(uid, "", (1,)),
    )
    assert [list(c.old_logprobs) for c in group.completions] == [[-1.5, -2.5], [0.0]]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=64)), max_size=9)))
def test_a_completion_holds_12_bytes_a_token_and_every_value_exactly(events):
    completion = Completion(0)
    for new in events:
        completion.take(Event("x", [t for t, _ in new], [p for _, p in new]), version=0)
    tokens = [token for new in events for token in new]
    assert list(completion.token_ids) == [t for t, _ in tokens]
    assert list(map(repr, completion.logprobs)) == [repr(p) for _, p in tokens]
    assert completion.token_ids.itemsize + completion.logprobs.itemsize == 12
    twin = completion.copy()
    twin.take(Event("x", [1], [-1.0]), version=0)
    assert len(completion.token_ids) == len(tokens) == len(twin.token_ids) - 1


def test_a_completion_keeps_the_version_of_each_token():
    completion = Completion(0)
    completion.take(Event("x", [1, 2], [-1.0, -2.0]), version=4)
    completion.take(Event("x", [3], [-3.0]), version=4)
    completion.take(Event("x", [6], [-4.0], "stop"), version=5)
    assert completion.segments == [(4, 3), (5, 1)]
    assert completion.finish_reason == "stop"


def partial_pool():
    """One that is half drawn after two attempts, its sibling done and scored, and a blank group."""
    prompts = {name: Prompt(name, f"prompt {name}", (1, 2)) for name in "abc"}
    half = Completion(0, [5, 6, 7], [-0.5, -0.25, -2.0], [(3, 1), (5, 2)], attempts=2)
    done = Completion(
        1,
        [8, 1],
        [-1.5, -0.125],
        [(5, 2)],
        "stop",
        scores=[1.0, None],
        extra={"answer": [1, None, "x"], "nested": {"y": 0.5}},
        logged={"spread": [0.5, 0.25]},
        attempts=1,
    )
    dropped = Completion(1, [9] * 4, [-1.0] * 4, [(4, 4)], "length", dropped="nonfinite_logprob")
    blank = [Completion(0), Completion(1, attempts=4)]
    pool = Pool(Sampling(4), 2)
    for name, completions in (("a", [half, done]), ("b", blank), ("c", [dropped])):
        pool.add(Group(f"{name}@0", prompts[name], Sampling(4, 0.5, 0.9, 7, 0.01), completions))
    return pool, prompts


def test_what_is_left_keeps_its_place():
    pool, prompts = partial_pool()
    pool.add(Group("d@1", prompts["a"], Sampling(4), [Completion(0)]))
    a, b, c, d = (group.copy() for group in pool)
    b.completions = b.completions[1:]
    pool.commit(RoundResult([a, b, c], [a, c], [b], [], []), FullRound(2))
    assert [g.id for g in pool] == ["b@0", "d@1"]
    assert next(iter(pool)) is b and list(pool)[1] == d
    pool.add(a)
    assert [g.id for g in pool] == ["b@0", "d@1", "a@0"]
    pool.commit(RoundResult([b, d, a], [d], [a, b], [], []), FullRound(2))  # in whatever order
    assert [g.id for g in pool] == ["b@0", "a@0"]


def test_a_copy_goes_on_alone():
    pool, _ = partial_pool()
    for group in [group.copy() for group in pool]:
        for completion in group.completions:
            completion.take(Event("", [2, 2], [-3.0, -3.0], "length"), version=9)
        group.completions.pop().restart()
    assert list(pool) == list(partial_pool()[0])


def test_a_restart_forgets_all_but_the_attempts():
    pool, _ = partial_pool()
    for group in pool:
        for completion in group.completions:
            tries = completion.attempts + (len(completion.token_ids) > 0)
            completion.restart()
            assert completion == Completion(completion.index, attempts=tries)


def test_a_pool_begun_anew_tells_what_it_throws_away():
    pool, _ = partial_pool()
    tokens = sum(len(c.token_ids) for c in pool.completions)
    assert pool.leave_run() == tokens > 0
    assert pool.leave_run() == 0
    assert all(c == Completion(c.index) for c in pool.completions)


def test_what_is_put_off_keeps_its_tokens_as_a_draft():
    done = Completion(1, [8, 1], [-1.5, -0.125], [(5, 2)], "stop", scores=[1.0], text="text")
    done.put_off()
    assert done == Completion(
        1, draft=Draft(array("i", [8, 1]), array("d", [-1.5, -0.125]), [(5, 2)])
    )
    copied = done.copy()
    copied.restart()  # a draft is never drawn on from
    assert copied == Completion(1) and done.draft is not None
