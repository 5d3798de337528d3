import os
from importlib.util import find_spec
from types import SimpleNamespace

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from seen_rounds import At, Rounds, logged
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lit_rlsched import GRPOModule
from lit_rlsched.callbacks import (
    MicroGroupSampling,
    ParallelismPlanner,
    TailBatching,
)
from lit_rlsched.engines import TransformersEngine, VLLMEngine, devices
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineStats
from lit_rlsched.settings import UsageError

needs_workers = pytest.mark.skipif(
    find_spec("vllm") is None or len(os.sched_getaffinity(0)) < 2,
    reason="needs vLLM and two cores",
)


class Divisible(TransformersEngine):
    """Says that it splits, counts what its size would preempt, and how often it starts."""

    def __init__(self, preempted, size=1, most=8):
        super().__init__()
        self.tensor_parallel_size = size
        self.preempted, self.most, self.starts = preempted, most, []
        self._counted = 0

    def max_tensor_parallel_size(self, spec):
        return self.most

    def start(self, spec):
        super().start(spec)
        self.starts.append(self.tensor_parallel_size)
        self._counted = 0

    def step(self):
        events = super().step()
        if events:
            self._counted += self.preempted.get(self.tensor_parallel_size, 0)
        return events

    def stats(self):
        stats = super().stats()
        return EngineStats(stats.running, stats.waiting, stats.kv_tokens, None, self._counted)


LOGGED = {
    "sizes": "parallelism/tensor_parallel_size",
    "restarts": "parallelism/restarts",
    "seconds": "time/restart",
    "differences": "sync/max_logp_diff",
    "preemptions": "rollout/preemptions",
}


def train(fit, engine, *callbacks, epochs=8, planner=None, **settings):
    """Returns the tokens and some metrics of each round, and the data module."""
    rounds, metrics = Rounds(), At(logged, "on_train_batch_start")
    _, _, data = fit(
        callbacks=[*callbacks, planner or ParallelismPlanner(), rounds, metrics],
        engine=engine,
        trainer={"max_epochs": epochs, **settings.pop("trainer", {})},
        **{"max_completion_length": 16, **settings},
    )
    seen = {name: [row[key] for row in metrics.seen] for name, key in LOGGED.items()}
    tokens = [[c.token_ids for c in round.completions] for round in rounds.rounds]
    return SimpleNamespace(tokens=tokens, **seen), data


def test_preemptions_split_the_model_and_quiet_rounds_join_it(fit):
    engine = Divisible({1: 2})
    recorder, data = train(fit, engine, epochs=9)
    assert recorder.sizes == [1, 2, 2, 2, 2, 1, 1, 2, 2]
    assert engine.starts == [1, 2, 1, 2]
    assert recorder.restarts == [0, 1, 1, 1, 1, 2, 2, 3, 3]
    assert [seconds > 0 for seconds in recorder.seconds] == [
        size != before for size, before in zip(recorder.sizes, [1, *recorder.sizes], strict=False)
    ]
    assert all(0 <= d < 1e-4 for d in recorder.differences)
    assert data.run.counters["num_completions"] == 9 * 16
    assert engine.tensor_parallel_size == 1, "as it came"


def test_a_restart_changes_no_draw(fit):
    plain, _ = train(fit, Divisible({}), epochs=3)
    split, _ = train(fit, Divisible({1: 2}), epochs=3)
    assert (plain.sizes, split.sizes) == ([1, 1, 1], [1, 2, 2])
    assert split.tokens == plain.tokens


def test_all_engines_of_a_run_have_the_same_size(fit, monkeypatch):
    monkeypatch.setattr(devices, "available_cores", lambda: list(range(4)))
    alone, _ = train(fit, Divisible({}), epochs=3)
    engines = [Divisible({1: 2}) for _ in range(2)]
    recorder, _ = train(fit, EnginePool(engines), epochs=3)
    assert recorder.sizes == [1, 2, 2]
    assert [engine.starts for engine in engines] == [[1, 2], [1, 2]]
    assert recorder.tokens == alone.tokens
    with pytest.raises(UsageError, match=r"allow 2 for each of 2 engines\. Use 2"):
        train(fit, EnginePool(engines), planner=ParallelismPlanner(maximum=4))
    with pytest.raises(UsageError, match=r"for each of 3 .* a smaller `num"):
        train(fit, EnginePool([Divisible({}) for _ in range(3)]))


@pytest.mark.slow
def test_long_rounds_have_a_size_of_their_own(fit):
    class OnlyLong(Divisible):
        """Preempts where nothing is raced."""

        def step(self):
            self.preempted = {1: int(self.long)}
            return super().step()

    def kind(trainer, pl_module, plan):
        engine.long = any(group.deferred for group in plan)
        return engine.long

    engine, kinds = OnlyLong({}), At(kind, "on_round_start")
    engine.long = False
    settings = {"epochs": 15, "num_generations": 2, "max_completion_length": 48}
    recorder, _ = train(fit, engine, kinds, TailBatching(), **settings)
    assert kinds.seen == [False, False, False, False, True] * 3
    assert recorder.sizes == [1] * 9 + [2] + [1] * 4 + [2]
    assert engine.starts == [1, 2, 1, 2]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_size(fit, tmp_path):
    stop = 2
    whole, _ = train(fit, Divisible({1: 2}), epochs=8)
    saved = ModelCheckpoint(tmp_path, save_last=True)
    checkpointed = {"enable_checkpointing": True}
    train(fit, Divisible({1: 2}), saved, epochs=stop, trainer=checkpointed)
    engine = Divisible({1: 2})
    rest, _ = train(fit, engine, epochs=8, ckpt_path=str(tmp_path / "last.ckpt"))
    assert rest.sizes == whole.sizes[stop:]
    assert rest.restarts == whole.restarts[stop:]
    assert rest.tokens == whole.tokens[stop:]
    assert engine.starts[0] == whole.sizes[stop - 1], "no start for nothing"


@pytest.mark.parametrize(
    ("limits", "size"), [({"maximum": 2}, 2), ({"minimum": 8}, 8)], ids=["lower", "higher"]
)
def test_a_resumed_run_keeps_to_its_own_limits(fit, tmp_path, limits, size):
    saved = ModelCheckpoint(tmp_path, save_last=True)
    train(fit, Divisible({}, size=4), saved, epochs=1, trainer={"enable_checkpointing": True})
    engine, planner = Divisible({}, size=size), ParallelismPlanner(**limits)
    ckpt_path = str(tmp_path / "last.ckpt")
    rest, _ = train(fit, engine, epochs=2, planner=planner, ckpt_path=ckpt_path)
    assert rest.sizes == engine.starts == [size]


@pytest.mark.parametrize(
    ("engine", "planner", "others", "message"),
    [
        (TransformersEngine, {}, [], r"nothing to choose: `TransformersEngine`.*Remove the call"),
        (lambda: Divisible({}), {"maximum": 16}, [], r"maximum=16\)`.*allow 8. Use 8"),
        (lambda: Divisible({}), {"minimum": 2}, [], r"`Divisible\(tensor_parallel_size=1\)`.*2 to"),
        (
            lambda: Divisible({}, size=6),
            {},
            [],
            r"tensor_parallel_size=6\)` must be a power of two",
        ),
        (
            lambda: Divisible({}),
            {},
            [lambda: MicroGroupSampling(4)],
            "`MicroGroupSampling` decodes no more",
        ),
    ],
    ids=["no split", "too far", "below", "no power", "slots"],
)
def test_what_does_not_fit_is_refused(fit, engine, planner, others, message):
    engine = engine()
    with pytest.raises(UsageError, match=message):
        train(fit, engine, *(make() for make in others), planner=ParallelismPlanner(**planner))
    assert engine.tensor_parallel_size in (1, 6)


def test_an_engine_that_does_not_start_with_a_size_stops_the_run(fit):
    class Fragile(Divisible):
        def start(self, spec):
            super().start(spec)
            if self.tensor_parallel_size == 2:
                raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        train(fit, Fragile({1: 2}), epochs=4)


def workers(*_):
    return sum("Worker_TP" in c.name() for c in psutil.Process().children(recursive=True))


def with_heads(tiny_model, folder, **heads):
    """The same model with other heads, and six blocks of cache in GiB, for 16 completions."""
    config = AutoConfig.from_pretrained(tiny_model, **heads)
    model = str(folder / "model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(model)
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return model, 6 * 32 * token / 2**30


@pytest.mark.slow
@needs_workers
@pytest.mark.usefixtures("forked_workers")
def test_on_vllm(fit, tmp_path, tiny_model):
    model, cache = with_heads(tiny_model, tmp_path, num_key_value_heads=2)
    counted = At(workers, "on_round_end")
    recorder, data = train(
        fit,
        VLLMEngine(kv_cache_gib=cache),
        counted,
        module=GRPOModule(model, learning_rate=1e-3),
        epochs=3,
        max_completion_length=40,
    )
    assert recorder.sizes == [1, 2, 2] and counted.seen == [0, 2, 2]
    assert recorder.preemptions[0] > 0
    assert all(difference < 1e-4 for difference in recorder.differences)
    assert data.run.counters["num_completions"] == 3 * 16
    assert not workers()
