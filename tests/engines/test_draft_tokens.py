"""Draft tokens change how many decode steps an engine needs, and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_rlsched.engines import ProcessEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.transformers import TransformersEngine
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.types import Request, Sampling

pytestmark = pytest.mark.usefixtures("all_guesses")

Drawn = dict[str, tuple[list[int], list[float], str | None]]
RULES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 9},
    {"min_p": 0.05},
    {"temperature": 0.3},
]
EOS = (1, *range(10, 13))


class Oracle:
    """Knows the completions; makes mistakes where its class attribute says so."""

    texts: ClassVar[list[list[int]]] = []
    wrong: ClassVar[Callable[[int], bool]] = staticmethod(lambda at: False)

    def propose(
        self, text: Sequence[int], siblings: Sequence[Sequence[int]], most: int
    ) -> list[int]:
        start = list(text)
        known = next((t for t in self.texts if t[: len(start)] == start), start)
        more = [*known[len(start) :], *([5] * most)][:most]  # goes on behind the end
        return [t ^ 1 if self.wrong(len(start) + i) else t for i, t in enumerate(more)]


class Junk:
    def propose(
        self, text: Sequence[int], siblings: Sequence[Sequence[int]], most: int
    ) -> list[int]:
        return [(7 * len(text) + i) % 60 for i in range(most)]


class Nothing:
    def propose(
        self, text: Sequence[int], siblings: Sequence[Sequence[int]], most: int
    ) -> list[int]:
        return []


class Ends:
    """Guesses that every completion ends."""

    def propose(
        self, text: Sequence[int], siblings: Sequence[Sequence[int]], most: int
    ) -> list[int]:
        return [EOS[len(text) % len(EOS)]] * most


DRAFTERS = [None, *(f"{__name__}.{drafter.__name__}" for drafter in (Oracle, Junk, Nothing, Ends))]


def jobs(count: int = 16) -> list[Request]:
    """Groups of 4 on prompts of 1 to 16 tokens, with all kinds of sampling and of limits."""
    return [
        Request(
            f"g{i // 4}/{i % 4}",
            [4 + (3 * n + 5 * (i // 4)) % 62 for n in range(1 + 5 * (i // 4 % 4))],
            1000 + i,
            Sampling(2 + 17 * i % 38, **RULES[i % len(RULES)]),
        )
        for i in range(count)
    ]


def start(
    policy: PreTrainedModel, drafting: Drafting | None = None, **spec: object
) -> RolloutEngine:
    engine = TransformersEngine()
    settings = {"slots": 16, "max_model_len": 64, "eos_token_ids": EOS, "drafting": drafting}
    engine.start(EngineSpec("", policy=policy, **{**settings, **spec}))  # type: ignore[arg-type]
    return engine


def run(
    engine: RolloutEngine,
    waiting: Sequence[Request],
    slots: int = 16,
    pause: Callable[[Request], int | None] = lambda request: None,
    aborts: Iterator[int] | None = None,
) -> Drawn:
    """Keep the slots full until everything has finished; requests that paused come back."""
    drawn: Drawn = {request.id: ([], [], None) for request in waiting}
    whole = {request.id: request for request in waiting}
    todo, running = list(waiting), list[str]()

    def resumed(name: str) -> Request:
        return replace(whole[name], prefix_ids=drawn[name][0])

    while todo or running:
        new = [
            replace(request, pause_at=pause(request)) for request in todo[: slots - len(running)]
        ]
        del todo[: len(new)]
        engine.submit(new)
        running += [request.id for request in new]
        for event in engine.step():
            tokens, logprobs, _ = drawn[event.request_id]
            tokens += event.token_ids
            logprobs += event.logprobs
            assert len(event.token_ids) == len(event.logprobs) > 0
            if event.finish_reason:
                running.remove(event.request_id)
                most = whole[event.request_id].sampling.max_completion_length
                if event.finish_reason == "length" and len(tokens) < most:
                    todo.append(resumed(event.request_id))
                else:
                    drawn[event.request_id] = tokens, logprobs, event.finish_reason
        if aborts is not None and running and (at := next(aborts)) is not None:
            name = running.pop(at % len(running))
            (partial,) = engine.abort([name]).values()
            before = len(whole[name].prefix_ids)
            assert (
                list(partial.token_ids) == drawn[name][0][-len(partial.token_ids) :] or not before
            )
            todo.append(resumed(name))
    return drawn


def assert_same(one: Drawn, other: Drawn, tolerance: float = 1e-9) -> None:
    """Compare what both have."""
    for name, (tokens, logprobs, reason) in other.items():
        assert one[name][0] == tokens, name
        assert one[name][2] == reason
        assert one[name][1] == pytest.approx(logprobs, abs=tolerance)


@pytest.fixture(scope="module")
def exact(exact_model: str) -> PreTrainedModel:
    """It computes in float64 all through."""
    return AutoModelForCausalLM.from_pretrained(exact_model, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def expected(exact: PreTrainedModel) -> Drawn:
    """What is drawn without draft tokens; the oracle learns it."""
    drawn = run(start(exact), jobs())
    Oracle.texts = [[*request.prompt_ids, *drawn[request.id][0]] for request in jobs()]
    assert {reason for *_, reason in drawn.values()} == {"stop", "length"}
    return drawn


settings = st.builds(
    Drafting, st.integers(1, 7), st.integers(1, 16), drafter=st.sampled_from(DRAFTERS)
)


@given(settings, st.integers(1, 16), st.integers(2, 5), st.data())
def test_drafts_change_no_token(
    exact: PreTrainedModel, expected: Drawn, drafting: Drafting, slots: int, every: int, data
) -> None:
    Oracle.wrong = staticmethod(lambda at: at % every == 0) if data.draw(st.booleans()) else never
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    pauses = data.draw(st.booleans())
    aborts = st.lists(st.none() | st.integers(0, 20), max_size=40)
    cut = iter([*data.draw(aborts), *[None] * 10_000])

    def pause(request: Request) -> int | None:
        drawn = len(request.prefix_ids)
        return drawn + lengths[drawn % len(lengths)] if pauses else None

    assert_same(expected, run(start(exact, drafting), jobs(), slots, pause, cut))


def never(at: int) -> bool:
    return False


def once(at: int) -> Callable[[Request], int | None]:
    """Pause every request when it has so many tokens."""
    return lambda request: at if len(request.prefix_ids) < at else None


@pytest.mark.mostly_slow("4-1", "1-1")
@pytest.mark.parametrize("drafter", range(len(DRAFTERS)))
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_pause_at_every_position(
    exact: PreTrainedModel, expected: Drawn, drafter: int, tokens: int
) -> None:
    Oracle.wrong = staticmethod(never)
    engine = start(exact, Drafting(tokens, 16, DRAFTERS[drafter]))
    batch = jobs()[8:]
    for at in range(1, 40):
        assert_same(expected, run(engine, batch, pause=once(at)))


def test_perfect_drafts_save_steps(exact: PreTrainedModel, expected: Drawn) -> None:
    Oracle.wrong = staticmethod(never)
    plain, engine = start(exact), start(exact, Drafting(4, 16, f"{__name__}.Oracle"))
    run(plain, jobs())
    assert_same(expected, run(engine, jobs()))
    longest = max(len(tokens) for tokens, *_ in expected.values())
    assert plain.stats().decode_steps == longest
    # the drafts of a prompt's first tokens are those of its first completion, so they may be wrong
    assert -(-longest // 5) <= engine.stats().decode_steps <= -(-longest // 5) + 3
    tokens = sum(len(tokens) for tokens, *_ in expected.values())
    assert engine.stats().proposed > engine.stats().accepted > tokens // 2
    assert plain.stats().proposed == plain.stats().accepted == 0


def test_no_draft_reaches_past_the_limit_or_a_pause(exact: PreTrainedModel) -> None:
    seen: list[tuple[int, int]] = []
    engine = start(exact, Drafting(7, 16, f"{__name__}.Junk"))
    forward = engine._forward  # type: ignore[attr-defined]

    def spy(ids, positions, mask=None, **how):
        if mask is not None:
            seen.append((int(positions.max()), ids.shape[1]))
        return forward(ids, positions, mask, **how)

    engine._forward = spy  # type: ignore[attr-defined]
    run(
        engine,
        [Request("g/0", [5] * 6, 3, Sampling(9), pause_at=5)],
        pause=once(5),
    )
    # the token before the last one that is drawn is the last to be fed
    assert max(end for end, _ in seen) == 6 + 9 - 2
    assert seen[0] == (6 - 1 + 4, 5)


def test_prompts_up_to_the_last_position_of_the_model(exact: PreTrainedModel) -> None:
    """Rows with shorter drafts are padded; the model knows no position beyond its context."""
    batch = [Request(f"g/{i}", [5 + i] * 250, i, Sampling(6 - i)) for i in range(3)]
    spec = {"max_model_len": 256, "eos_token_ids": (1,)}
    plain = run(start(exact, **spec), batch)
    assert_same(plain, run(start(exact, Drafting(7, 16, f"{__name__}.Junk"), **spec), batch))


FAMILIES = {
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)),
    "gemma2": lambda sizes: Gemma2ForCausalLM(
        Gemma2Config(**sizes, head_dim=16, attn_implementation="eager", sliding_window=64)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family: str) -> None:
    """Several query heads for each key head, and eager attention; norms compute in float32."""
    sizes = {
        "vocab_size": 67,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    policy = FAMILIES[family](sizes).double()
    plain = run(start(policy), jobs())
    Oracle.wrong = staticmethod(lambda at: at % 3 == 0)
    Oracle.texts = [[*request.prompt_ids, *plain[request.id][0]] for request in jobs()]
    for drafter in DRAFTERS:
        engine = start(policy, Drafting(4, 16, drafter))
        assert_same(plain, run(engine, jobs()), 1e-6)
    assert engine.stats().proposed > 0


def test_shared_prompts_are_copied_from_rows_that_drafted(
    exact: PreTrainedModel, expected: Drawn
) -> None:
    """Rejected draft tokens have left keys and values behind."""
    engine = start(exact, Drafting(4, 16, f"{__name__}.Junk"))
    late = iter([0, 1, 1, 1, *[None] * 100])
    assert_same(expected, run(engine, jobs(), 9, aborts=late))


@pytest.mark.parametrize("engines", [1, 2])
def test_in_processes_of_their_own(exact_model: str, engines: int) -> None:
    """The built-in drafter drafts there, and the trainer's side learns how much."""
    batch = [replace(r, sampling=replace(r.sampling, temperature=0.3)) for r in jobs()]
    drawn: list[Drawn] = []
    for drafting in (None, Drafting(4, 16)):
        inner: RolloutEngine = ProcessEngine(TransformersEngine())
        engine = EnginePool.of(inner, engines) if engines > 1 else inner
        assert engine.speculates
        spec = EngineSpec(exact_model, 16, 64, EOS, dtype=torch.float64, drafting=drafting)
        engine.start(spec)
        try:
            worker = engine.make_worker(Admission(8 // engines))
            worker.start_round(take_turns=False, ahead=True)
            worker.submit(batch)
            drawn.append({request.id: ([], [], None) for request in batch})
            while worker.busy:
                for event in worker.step():
                    tokens, logprobs, _ = drawn[-1][event.request_id]
                    tokens, logprobs = [*tokens, *event.token_ids], [*logprobs, *event.logprobs]
                    drawn[-1][event.request_id] = tokens, logprobs, event.finish_reason
            stats = engine.each(lambda one: one.stats())
        finally:
            engine.close()
    assert_same(*drawn)
    assert all(one.proposed > one.accepted > 0 for one in stats)
