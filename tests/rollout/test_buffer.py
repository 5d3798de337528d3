import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.rollout.buffer import RolloutBuffer, pack, unpack
from lit_rlsched.rollout.types import Completion, Event, Group, Prompt, Sampling

floats = st.floats(-1e3, 0, allow_nan=False)


@st.composite
def completions(draw, index, scored):
    n = draw(st.integers(0, 6))
    split = draw(st.integers(0, n))
    done = Completion(
        index=index,
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)),
        logprobs=draw(st.lists(floats, min_size=n, max_size=n)),
        version_spans=[(v, k) for v, k in ((1, split), (2, n - split)) if k],
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        scores=draw(st.none() | st.lists(st.none() | floats, min_size=2, max_size=2)),
        advantage=draw(floats),
        dropped=draw(st.sampled_from([None, "nonfinite_logprob"])),
    )
    if scored:
        done.old_logprobs = draw(st.lists(floats, min_size=n, max_size=n))
    return done


@st.composite
def pools(draw):
    scored = draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 3), max_size=4))
    return [
        Group(
            f"{g}@0",
            Prompt(str(g), f"prompt {g}", (g,)),
            Sampling(8, temperature=0.7),
            [draw(completions(i, scored)) for i in range(size)],
        )
        for g, size in enumerate(sizes)
    ]


@given(pools())
def test_pack_and_unpack(groups):
    prompts = {g.prompt.uid: g.prompt for g in groups}
    file = io.BytesIO()
    torch.save(pack(groups), file)
    file.seek(0)
    assert unpack(torch.load(file, weights_only=True), prompts.__getitem__) == groups


def test_the_pool_survives_a_checkpoint():
    prompt = Prompt("a", "text", (1, 2))
    pool = RolloutBuffer()
    pool.add(Group("a@0", prompt, Sampling(4), [Completion(0, [5], [-0.5], [(3, 1)])]))
    other = RolloutBuffer()
    other.load_state_dict(pool.state_dict(), {"a": prompt}.__getitem__)
    assert list(other) == list(pool)
    other.settle(list(other), [])
    assert len(other) == 0


def test_a_completion_keeps_the_version_of_each_token():
    completion = Completion(0)
    completion.take(Event("x", [1, 2], [-1.0, -2.0]), version=4)
    completion.take(Event("x", [3], [-3.0]), version=4)
    completion.take(Event("x", [6], [-4.0], "stop"), version=5)
    assert completion.version_spans == [(4, 3), (5, 1)]
    assert completion.finish_reason == "stop"
