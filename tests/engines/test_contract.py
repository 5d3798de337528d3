"""What every engine owes its caller; the same tests run against all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
from placements import on_ray
from transformers import PreTrainedModel

from examples.own_engine import PlainEngine
from lit_rlsched import engines
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.spec import EngineSpec, EngineStats
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Event, Request, Sampling

EOS = 1
SLOTS = 8
MAX_MODEL_LEN = 256
PROMPT = [4 + 7 * i % 60 for i in range(12)]
LONG_PROMPT = [4 + 11 * i % 61 for i in range(100)]

PLAIN = pytest.param("PlainEngine", marks=pytest.mark.slow)
DECODERS = [
    pytest.param(
        "VLLMEngine",
        marks=pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    ),
    "TransformersEngine",
    "ProcessEngine",
    pytest.param("RayEngine", marks=on_ray[:2]),
    PLAIN,
]
"""The engines that run a model; the simulation only draws lengths."""
ALL = [*DECODERS, "SimulatedEngine"]
CACHED = [decoder for decoder in DECODERS if decoder is not PLAIN]
"""Those with a key-value cache, which `update_weights` keeps."""
OWN = [decoder for decoder in DECODERS if "RayEngine" not in getattr(decoder, "values", ())]
"""Those that a test starts for itself: starts and syncs of actors have tests of their own."""


@dataclass
class Bench:
    engine: RolloutEngine
    policy: PreTrainedModel

    def sync(self, version: int) -> None:
        self.engine.sync_weights(self.policy.named_parameters(), version)


@dataclass
class Drawn:
    """All events of one request put together."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None

    def add(self, event: Event) -> None:
        assert self.finish_reason is None, "an event after the last one"
        assert len(event.token_ids) == len(event.logprobs)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason


@contextmanager
def bench(name: str, model: str, policy: PreTrainedModel, slots: int = SLOTS) -> Iterator[Bench]:
    if name in ("ProcessEngine", "RayEngine"):
        engine: RolloutEngine = getattr(engines, name)(engines.TransformersEngine())
    else:
        engine = PlainEngine() if name == "PlainEngine" else getattr(engines, name)()
    engine.start(EngineSpec(model, slots, MAX_MODEL_LEN, (EOS,), policy=policy))
    try:
        yield Bench(engine, policy)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def shared(
    request: pytest.FixtureRequest, tiny_model: str, make_policy: Callable[[str], PreTrainedModel]
) -> Iterator[Bench]:
    """One engine for all the tests that leave nothing behind but counters."""
    if request.param == "RayEngine":
        request.getfixturevalue("ray_cluster")
    with bench(request.param, tiny_model, make_policy(tiny_model)) as started:
        yield started


@pytest.fixture
def ready(shared: Bench) -> Iterator[Bench]:
    """The shared engine, empty before the test and after it."""
    assert idle(shared.engine.stats())
    yield shared
    shared.engine.abort([f"r{i}" for i in range(SLOTS)])
    assert idle(shared.engine.stats())


every_engine = pytest.mark.parametrize("shared", ALL, indirect=True)
every_decoder = pytest.mark.parametrize("shared", DECODERS, indirect=True)


def idle(stats: EngineStats) -> bool:
    return stats.running == stats.waiting == stats.kv_tokens == 0


def requests(count: int = 1, prompt: list[int] = PROMPT, **sampling: float) -> list[Request]:
    """`count` requests r0, r1 ... that differ in their seed alone."""
    sampling = {"max_completion_length": 40, **sampling}
    return [Request(f"r{i}", prompt, 100 + i, Sampling(**sampling)) for i in range(count)]  # type: ignore[arg-type]


def run(engine: RolloutEngine, batch: list[Request], steps: int = 1000) -> dict[str, Drawn]:
    """Submit and step until everything has finished, or for `steps` steps."""
    drawn = {request.id: Drawn([], []) for request in batch}
    engine.submit(batch)
    for _ in range(steps):
        for event in engine.step():
            drawn[event.request_id].add(event)
        if all(one.finish_reason for one in drawn.values()):
            break
    return drawn


def run_with_pauses(
    engine: RolloutEngine, batch: list[Request], every: list[int]
) -> dict[str, Drawn]:
    """As `run`, but request i pauses each `every[i]` tokens and is back before the next step."""
    drawn = {request.id: Drawn([], []) for request in batch}
    asked = {request.id: (request, n) for request, n in zip(batch, every, strict=True)}
    engine.submit([replace(request, pause_at=n) for request, n in asked.values()])
    pauses = 0
    while not all(one.finish_reason for one in drawn.values()):
        for event in engine.step():
            one, (request, n) = drawn[event.request_id], asked[event.request_id]
            one.add(event)
            most = request.sampling.max_completion_length
            if one.finish_reason == "length" and len(one.token_ids) < most:
                assert len(one.token_ids) % n == 0, "it pauses where it was asked to"
                one.finish_reason = None
                prefix = list(one.token_ids)
                engine.submit([replace(request, prefix_ids=prefix, pause_at=len(prefix) + n)])
                pauses += 1
    assert pauses
    return drawn


def run_with_aborts(engine: RolloutEngine, batch: list[Request], steps: int) -> dict[str, Drawn]:
    """As `run`, but all that runs is aborted each `steps` steps and submitted again."""
    drawn = {request.id: Drawn([], []) for request in batch}
    while going := [request for request in batch if not drawn[request.id].finish_reason]:
        parts = run(
            engine,
            [replace(r, prefix_ids=list(drawn[r.id].token_ids)) for r in going],
            steps,
        )
        partial = engine.abort([request.id for request in going])
        for name, part in parts.items():
            one = drawn[name]
            one.token_ids += partial[name].token_ids if name in partial else part.token_ids
            one.logprobs += partial[name].logprobs if name in partial else part.logprobs
            one.finish_reason = part.finish_reason
    return drawn


def check_same(drawn: dict[str, Drawn], expected: dict[str, Drawn]) -> None:
    """Equal but for the noise that other company, or another prefill, puts on log-probabilities."""
    for name, one in expected.items():
        assert drawn[name].token_ids == one.token_ids
        assert drawn[name].logprobs == pytest.approx(one.logprobs, abs=1e-5)
        assert drawn[name].finish_reason == one.finish_reason


@torch.no_grad()
def score(policy: PreTrainedModel, request: Request, token_ids: list[int]) -> list[float]:
    """Log-probabilities of drawn tokens under the distribution that the request asks for."""
    prompt, rules = [*request.prompt_ids, *request.prefix_ids], request.sampling
    logits = policy(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    logits = logits / (rules.temperature or 1.0)
    if rules.top_k:
        kth = logits.topk(rules.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if rules.min_p:
        probs = logits.softmax(-1)
        drop = probs < rules.min_p * probs.max(-1, keepdim=True).values
        logits = logits.masked_fill(drop, -torch.inf)
    if rules.top_p < 1:
        probs, order = logits.softmax(-1).sort(descending=True)
        drop = torch.zeros_like(logits, dtype=torch.bool)
        drop.scatter_(-1, order, probs.cumsum(-1) - probs >= rules.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    index = torch.tensor(token_ids)[:, None]
    return logits.log_softmax(-1).gather(-1, index)[:, 0].tolist()


def check_scores(policy: PreTrainedModel, batch: list[Request], drawn: dict[str, Drawn]) -> None:
    for request in batch:
        one = drawn[request.id]
        assert one.logprobs == pytest.approx(score(policy, request, one.token_ids), abs=1e-4)


def perturb(policy: PreTrainedModel) -> None:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(7)
        for parameter in policy.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)


# --- what is drawn


@every_engine
def test_draws_depend_on_the_seed_alone(ready: Bench) -> None:
    batch = requests(SLOTS)
    first, again = run(ready.engine, batch), run(ready.engine, batch)
    alone = run(ready.engine, batch[3:4])["r3"]
    assert first == again
    assert alone.token_ids == first["r3"].token_ids
    assert alone.logprobs == pytest.approx(first["r3"].logprobs, abs=1e-5)
    assert len({tuple(one.token_ids) for one in first.values()}) == SLOTS


@every_decoder
def test_company_and_order_do_not_change_a_draw(ready: Bench) -> None:
    batch = [replace(r, prompt_ids=LONG_PROMPT[: 5 + 9 * i]) for i, r in enumerate(requests(SLOTS))]
    together = run(ready.engine, batch)
    backwards = run(ready.engine, batch[::-1])
    for name, one in together.items():
        assert backwards[name].token_ids == one.token_ids
        assert backwards[name].logprobs == pytest.approx(one.logprobs, abs=1e-5)


@every_decoder
def test_greedy_takes_the_most_likely_token_whatever_the_seed(ready: Bench) -> None:
    drawn = run(ready.engine, requests(2, temperature=0.0))
    assert drawn["r0"].token_ids == drawn["r1"].token_ids
    tokens = torch.tensor([[*PROMPT, *drawn["r0"].token_ids]])
    with torch.no_grad():
        best = ready.policy(tokens).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert drawn["r0"].token_ids == best.tolist()


@every_decoder
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_policy(ready: Bench, sampling: dict[str, float]) -> None:
    batch = requests(SLOTS, **sampling)
    check_scores(ready.policy, batch, run(ready.engine, batch))


@every_decoder
def test_logprobs_of_a_batch_with_mixed_sampling(ready: Bench) -> None:
    batch = requests(4)
    rules = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}]
    batch = [replace(r, sampling=Sampling(40, **s)) for r, s in zip(batch, rules, strict=True)]  # type: ignore[arg-type]
    check_scores(ready.policy, batch, run(ready.engine, batch))


# --- when it ends


@every_engine
def test_eos_is_kept_as_the_last_token(ready: Bench) -> None:
    drawn = run(ready.engine, requests(SLOTS, max_completion_length=200))
    stopped = [one for one in drawn.values() if one.finish_reason == "stop"]
    assert stopped
    for one in stopped:
        assert one.token_ids.index(EOS) == len(one.token_ids) - 1
        assert len(one.logprobs) == len(one.token_ids)


@every_engine
def test_never_longer_than_the_limit(ready: Bench) -> None:
    batch = [replace(r, sampling=Sampling(1 + i)) for i, r in enumerate(requests(SLOTS))]
    for i, one in enumerate(run(ready.engine, batch).values()):
        assert one.finish_reason in ("stop", "length")
        assert len(one.token_ids) <= 1 + i
        assert (one.finish_reason == "length") == (EOS not in one.token_ids)
        assert one.finish_reason == "stop" or len(one.token_ids) == 1 + i


@every_engine
def test_it_lets_go_where_it_was_asked_to_pause(ready: Bench) -> None:
    whole = run(ready.engine, requests(SLOTS))
    batch = [replace(r, pause_at=5 * (1 + i)) for i, r in enumerate(requests(SLOTS))]
    for request, one in zip(batch, run(ready.engine, batch).values(), strict=True):
        full = whole[request.id]
        length = min(request.limit, len(full.token_ids))
        assert request.limit == min(request.pause_at or 0, 40), "one pauses at 40, the limit"
        assert one.token_ids == full.token_ids[:length]
        assert one.finish_reason == (
            "length" if length < len(full.token_ids) else full.finish_reason
        )
    assert idle(ready.engine.stats())


@every_engine
def test_an_end_in_the_pause_is_an_end(ready: Bench) -> None:
    whole = run(ready.engine, requests(SLOTS, max_completion_length=200))
    stopped = {name: len(one.token_ids) for name, one in whole.items() if EOS in one.token_ids}
    assert stopped
    batch = requests(SLOTS, max_completion_length=200)
    batch = [replace(r, pause_at=stopped[r.id]) for r in batch if r.id in stopped]
    assert {one.finish_reason for one in run(ready.engine, batch).values()} == {"stop"}


@every_engine
def test_a_request_may_fill_the_context_exactly(ready: Bench) -> None:
    batch = requests(SLOTS, LONG_PROMPT, max_completion_length=MAX_MODEL_LEN - len(LONG_PROMPT))
    for one in run(ready.engine, batch).values():
        full = len(one.token_ids) == MAX_MODEL_LEN - len(LONG_PROMPT)
        assert one.finish_reason == "stop" or full


@every_engine
def test_free_slots_are_refilled_and_never_overfilled(ready: Bench) -> None:
    lengths = [3, 20, 5, 9, 30, 2, 14, 7, 11, 4, 25, 6, 18, 8, 3, 10]
    waiting = [Request(f"q{i}", PROMPT, i, Sampling(length)) for i, length in enumerate(lengths)]
    running, finished = 0, []
    while len(finished) < len(lengths):
        free = SLOTS - running
        ready.engine.submit(waiting[:free])
        running += len(waiting[:free])
        del waiting[:free]
        ended = [event.request_id for event in ready.engine.step() if event.finish_reason]
        running -= len(ended)
        finished += ended
        stats = ready.engine.stats()
        assert stats.running + stats.waiting == running <= SLOTS
    assert sorted(finished) == sorted(f"q{i}" for i in range(len(lengths)))


# --- what is refused


@every_engine
@pytest.mark.parametrize(
    "bad",
    [
        Request("bad", PROMPT, 0, Sampling(MAX_MODEL_LEN - len(PROMPT) + 1)),
        Request("bad", LONG_PROMPT * 3, 0, Sampling(1)),
        Request("bad", [], 0, Sampling(4)),
        Request("bad", PROMPT, 0, Sampling(0)),
        Request("bad", PROMPT, 0, Sampling(4), prefix_ids=[5, 6, 7, 8]),
        Request("bad", PROMPT, 0, Sampling(MAX_MODEL_LEN - len(PROMPT) + 1), pause_at=4),
        Request("bad", PROMPT, 0, Sampling(40), prefix_ids=[5, 6, 7, 8], pause_at=4),
        Request("bad", PROMPT, 0, Sampling(40), pause_at=0),
        Request("bad", PROMPT, 0, Sampling(40), pause_at=-3),
    ],
    ids=[
        "too long",
        "prompt too long",
        "empty prompt",
        "nothing to draw",
        "prefix is complete",
        "too long after its pause",
        "prefix up to the pause",
        "pause at once",
        "pause before",
    ],
)
def test_a_bad_request_is_refused_by_name_and_nothing_is_taken(ready: Bench, bad: Request) -> None:
    with pytest.raises(UsageError, match="bad"):
        ready.engine.submit([*requests(2), bad])
    assert idle(ready.engine.stats())
    assert ready.engine.step() == []


@every_decoder
@pytest.mark.parametrize("token", [-1, 10_000])
def test_a_token_out_of_the_vocabulary_is_refused(ready: Bench, token: int) -> None:
    with pytest.raises(UsageError, match="bad"):
        ready.engine.submit([Request("bad", [5, token], 0, Sampling(4))])
    assert idle(ready.engine.stats())


@every_engine
def test_a_duplicate_id_is_refused(ready: Bench) -> None:
    with pytest.raises(UsageError, match="r1"):
        ready.engine.submit([*requests(2), *requests(2)[1:]])
    assert idle(ready.engine.stats())
    ready.engine.submit(requests(2))
    with pytest.raises(UsageError, match="r0"):
        ready.engine.submit(requests(1))
    stats = ready.engine.stats()
    assert stats.running + stats.waiting == 2


@every_engine
def test_more_than_the_slots_are_refused(ready: Bench) -> None:
    ready.engine.submit(requests(SLOTS - 1))
    extra = [replace(r, id=f"extra{i}") for i, r in enumerate(requests(2))]
    with pytest.raises(UsageError, match="extra"):
        ready.engine.submit(extra)
    stats = ready.engine.stats()
    assert stats.running + stats.waiting == SLOTS - 1


# --- abort and resume


@every_engine
def test_abort_returns_what_was_drawn_and_frees_the_memory(ready: Bench) -> None:
    drawn = run(ready.engine, requests(SLOTS, max_completion_length=200), steps=3)
    exact = not isinstance(ready.engine, engines.SimulatedEngine)
    unfinished = {name: one for name, one in drawn.items() if not one.finish_reason}
    assert unfinished
    assert ready.engine.stats().kv_tokens > 0
    partial = ready.engine.abort([*drawn, "unknown"])
    assert set(partial) == set(unfinished)
    for name, one in unfinished.items():
        # a simulation may jump, and so have drawn more than it has told
        told = len(partial[name].token_ids) if exact else len(one.token_ids)
        assert list(partial[name].token_ids)[:told] == one.token_ids
        assert list(partial[name].logprobs)[:told] == one.logprobs
        assert not exact or told == 3
    assert idle(ready.engine.stats())
    assert ready.engine.step() == []


@every_engine
def test_abort_before_the_first_step(ready: Bench) -> None:
    ready.engine.submit(requests(2))
    partial = ready.engine.abort(["r0", "r1"])
    assert [list(one.token_ids) for one in partial.values()] == [[], []]


@every_engine
@pytest.mark.parametrize("cut", [1, 2, 7, 20, 31, 39])
def test_a_paused_request_goes_on_as_if_it_had_not(ready: Bench, cut: int) -> None:
    batch = requests(SLOTS, LONG_PROMPT)
    whole = run(ready.engine, batch)
    longest = max(batch, key=lambda request: len(whole[request.id].token_ids))
    assert len(whole[longest.id].token_ids) > cut
    alone = run_with_pauses(ready.engine, [longest], [cut])
    check_same(alone, {longest.id: whole[longest.id]})


@every_engine
@pytest.mark.mostly_slow("{}-VLLMEngine", "{}-TransformersEngine", "{}-SimulatedEngine")
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"min_p": 0.02}], ids=str
)
def test_pauses_in_company_change_no_draw(ready: Bench, sampling: dict[str, float]) -> None:
    """Some of the others are greedy."""
    batch = requests(SLOTS, max_completion_length=120, **sampling)
    batch[::3] = [replace(r, sampling=Sampling(120, temperature=0.0)) for r in batch[::3]]
    expected = run(ready.engine, batch)
    check_same(run_with_pauses(ready.engine, batch, [2, 200, 3, 5, 200, 17, 32, 1]), expected)


@every_engine
@pytest.mark.parametrize("steps", [1, 4, 15])
def test_aborts_change_no_draw(ready: Bench, steps: int) -> None:
    batch = requests(SLOTS, max_completion_length=60)
    expected = run(ready.engine, batch)
    check_same(run_with_aborts(ready.engine, batch, steps), expected)


@every_engine
def test_a_pause_may_last(ready: Bench) -> None:
    """Others run meanwhile, and it comes back at another place in another order."""
    batch = requests(4)
    expected = run(ready.engine, batch)
    first = run(ready.engine, [replace(r, pause_at=3 + i) for i, r in enumerate(batch)])
    run(ready.engine, [replace(r, id=f"o{i}", seed=i) for i, r in enumerate(requests(SLOTS))])
    going = [r for r in batch if len(first[r.id].token_ids) < len(expected[r.id].token_ids)]
    assert len(going) > 1
    batch = [replace(r, prefix_ids=first[r.id].token_ids) for r in going[::-1]]
    ready.engine.submit(batch)
    ready.engine.abort([r.id for r in batch])  # nor does a moment inside the engine matter
    for name, rest in run(ready.engine, batch).items():
        assert first[name].token_ids + rest.token_ids == expected[name].token_ids


@every_engine
def test_another_seed_is_another_draw(ready: Bench) -> None:
    (whole,) = requests(1, temperature=1.3)
    expected = run(ready.engine, [whole])["r0"]
    prefix = run(ready.engine, [replace(whole, pause_at=5)])["r0"].token_ids
    rest = run(ready.engine, [replace(whole, prefix_ids=prefix, seed=7)])["r0"]
    assert prefix + rest.token_ids != expected.token_ids
    again = run(ready.engine, [whole])["r0"]  # from its start, though it paused before
    assert again.token_ids == expected.token_ids


@every_decoder
def test_a_resumed_draw_does_not_use_the_noise_of_its_prefix_again(ready: Bench) -> None:
    """A prompt that ends in 5 with or without it as a prefix: same distribution, other noise."""
    sampling = Sampling(2, temperature=2.0)
    fresh = [Request(f"r{i}", [4, 5], i, sampling) for i in range(SLOTS)]
    resumed = [replace(r, prompt_ids=[4], prefix_ids=[5]) for r in fresh]
    pairs = zip(run(ready.engine, fresh).values(), run(ready.engine, resumed).values(), strict=True)
    assert sum(a.token_ids[0] == b.token_ids[0] for a, b in pairs) < SLOTS // 2


@every_engine
def test_the_prefix_counts_towards_the_limit(ready: Bench) -> None:
    batch = [replace(r, prefix_ids=[5 + i] * 30) for i, r in enumerate(requests(4))]
    for request, one in zip(batch, run(ready.engine, batch).values(), strict=True):
        assert len(one.token_ids) <= request.sampling.max_completion_length - 30
        assert one.finish_reason == "stop" or len(one.token_ids) == 10


# --- weights


@pytest.mark.mostly_slow("VLLMEngine-tiny_model", "TransformersEngine-tiny_model_untied")
@pytest.mark.parametrize("checkpoint", ["tiny_model", "tiny_model_untied"])
@pytest.mark.parametrize("name", OWN)
def test_after_a_sync_the_draws_are_those_of_the_new_weights(
    name: str,
    checkpoint: str,
    request: pytest.FixtureRequest,
    make_policy: Callable[[str], PreTrainedModel],
) -> None:
    model = request.getfixturevalue(checkpoint)
    before = make_policy(model)
    with bench(name, model, make_policy(model)) as new:
        batch = requests(2, LONG_PROMPT)  # long enough that a cache of its prefix is kept
        check_scores(before, batch, run(new.engine, batch))
        for version in (1, 2):
            perturb(new.policy)
            new.sync(version)
            drawn = run(new.engine, batch)
            check_scores(new.policy, batch, drawn)
            old = score(before, batch[0], drawn["r0"].token_ids)
            assert max(abs(a - b) for a, b in zip(old, drawn["r0"].logprobs, strict=True)) > 0.1


@every_engine
def test_the_size_of_the_cache_is_told(ready: Bench) -> None:
    block, capacity = ready.engine.kv_block, ready.engine.kv_capacity
    assert block is None or block >= 1
    if capacity is not None:
        assert capacity >= MAX_MODEL_LEN
        assert capacity % (block or 1) == 0
    if block is not None:
        run(ready.engine, requests(1, LONG_PROMPT, temperature=1.3), steps=1)
        assert ready.engine.stats().kv_tokens % block == 0


@every_engine
def test_sync_is_refused_while_requests_run(ready: Bench) -> None:
    batch = requests(3)
    expected = run(ready.engine, batch)
    ready.engine.submit(batch)
    with pytest.raises(RuntimeError):
        ready.sync(1)
    drawn = {request.id: Drawn([], []) for request in batch}
    while not all(one.finish_reason for one in drawn.values()):
        for event in ready.engine.step():
            drawn[event.request_id].add(event)
    assert {name: one.token_ids for name, one in drawn.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


# --- bookkeeping


@every_engine
def test_stats_count_and_go_back_to_zero(ready: Bench) -> None:
    before = ready.engine.stats()
    run(ready.engine, requests(4, temperature=1.5), steps=1)
    during = ready.engine.stats()
    assert during.decode_steps > before.decode_steps
    assert during.prefill_tokens > before.prefill_tokens
    assert during.kv_tokens > 0
    for _ in range(100):
        ready.engine.step()
    assert idle(ready.engine.stats())


@pytest.mark.parametrize("shared", CACHED, indirect=True)
def test_a_group_computes_its_prompt_once(ready: Bench) -> None:
    prompt = LONG_PROMPT[::-1]  # nobody else's
    before = ready.engine.stats()
    run(ready.engine, requests(4, prompt), steps=1)
    after = ready.engine.stats()
    computed = after.prefill_tokens - before.prefill_tokens
    cached = after.cached_tokens - before.cached_tokens
    assert computed + cached == 4 * len(prompt)
    assert computed <= len(prompt) + 3 * 32, "at most a block of its own for each of the others"


@every_engine
def test_the_clock_does_not_go_back(ready: Bench) -> None:
    ready.engine.submit(requests(4))
    times = [ready.engine.now()]
    for _ in range(60):
        ready.engine.step()
        times.append(ready.engine.now())
    assert times == sorted(times)
    assert times[-1] > times[0]


@pytest.mark.mostly_slow("VLLMEngine", "TransformersEngine", "SimulatedEngine")
@pytest.mark.parametrize("name", [*OWN, "SimulatedEngine"])
def test_closes_twice_with_requests_inside(
    name: str, tiny_model: str, tiny_policy: PreTrainedModel
) -> None:
    with bench(name, tiny_model, tiny_policy, slots=2) as new:
        assert isinstance(new.engine, RolloutEngine)
        new.engine.submit(requests(2))
        new.engine.step()
        new.engine.close()


@every_engine
def test_sleep_and_wake(ready: Bench) -> None:
    expected = run(ready.engine, requests(2))
    ready.engine.sleep()
    ready.engine.wake()
    ready.sync(1)
    assert run(ready.engine, requests(2)) == expected
