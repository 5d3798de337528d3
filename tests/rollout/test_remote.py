"""A worker in a process of its own draws what one in this process draws, and survives kills."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from bare_rollout import hooks_of, rollout_on
from placements import process, process_only, ray
from sampled_groups import GENERATIONS, PROMPTS, plan
from struck_engines import patience

from lit_rlsched.engines import ProcessEngine, SimulatedEngine, TransformersEngine
from lit_rlsched.engines.child import PipeChild, Watch
from lit_rlsched.engines.remote import RemoteWorker
from lit_rlsched.engines.spec import EngineBroken, EngineSpec
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, Sampling

LIMIT = 400
POLICIES = {
    "full": FullRound(PROMPTS),
    "tail": TailRound(4, GENERATIONS, 1.5, patience=1e9),
    "completions race": TailRound(4, 2, 1.5, 1.5, patience=1e9),
    "on policy": SortedRound(2, PROMPTS, GENERATIONS),
    "partial": SortedRound(2, PROMPTS, GENERATIONS, mode="partial"),
}


class Bench:
    """An engine, and what it draws."""

    def __init__(self, engine, model, policy, scheduler):
        self.engine, self.scheduler, self.policy = engine, scheduler, policy
        self.engine.start(EngineSpec(model, 18, 448, (1,), dtype=torch.float64, policy=policy))
        self.sync()

    def sync(self):
        self.engine.sync_weights(self.policy.named_parameters(), 0)

    def run(
        self, rule, slots=18, order="fifo", lengths=None, on_group=None, more=None, worker=None
    ):
        """Groups after a round, the round's state, and who ran when."""
        worker = worker or self.engine.make_worker(Admission(slots, order=order))
        hooks, groups = hooks_of(replaces=more is not None), plan(LIMIT)
        if on_group:
            hooks.group_ended = on_group
        if more:
            hooks.another = lambda group, state: more(group)
        scorer, given = Scorer(self.scheduler, str), {"seed": 1, "lengths": lengths}
        rollout = rollout_on(worker, scorer, groups, rule, hooks=hooks, **given)
        trace = rollout.trace
        list(rollout.decode())
        assert not worker.busy and self.engine.stats().running == 0
        columns = ("request", "start_step", "end_step", "tokens")
        spans = sorted(zip(*(trace.spans[name] for name in columns), strict=True))
        counts = {name: trace.steps[name] for name in ("running", "prefill_tokens", "kv_tokens")}
        decoded = [group.id for group in rollout.state.decoded]
        return worker, groups, (decoded, spans, trace.decode_steps, counts)


@pytest.fixture(scope="module")
def here(tiny_model, make_policy, scheduler):
    bench = Bench(TransformersEngine(), tiny_model, make_policy(tiny_model).double(), scheduler)
    yield bench
    bench.engine.close()


@pytest.fixture(scope="module")
def there(placement, tiny_model, make_policy, scheduler):
    engine = placement(TransformersEngine())
    bench = Bench(engine, tiny_model, make_policy(tiny_model).double(), scheduler)
    yield bench
    bench.engine.close()


def pause(group):
    """A trainer that has other things to do: the worker there is steps ahead meanwhile."""
    time.sleep(0.05)


def wait_for_a_step(child):
    """Wait until there is an answer that was not received."""
    if isinstance(child, PipeChild):
        while not child.connection.poll():
            time.sleep(0.01)
    else:
        import ray

        ray.wait([child._batch])


def check_alike(groups, others):
    """Equal but for the rounding that other company puts on log-probs."""
    for group, other in zip(groups, others, strict=True):
        for c, o in zip(group.completions, other.completions, strict=True):
            assert c.logprobs == pytest.approx(o.logprobs, abs=1e-6)
            c.logprobs = o.logprobs
    assert groups == others


def test_an_engine_knows_that_its_process_ends_with_it(here, there):
    assert not here.engine.ends_with_process
    assert there.engine.child.call("engine", "__getattribute__", "ends_with_process")


@pytest.mark.mostly_slow(
    "process-full-4",
    "process-partial-4",
    "process-completions race-18",
    "process-on policy-18",
)
@pytest.mark.parametrize("slots", [18, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_how_far_it_runs_ahead_changes_nothing(here, there, name, slots):
    _, groups, figures = here.run(POLICIES[name], slots)
    worker, same, same_figures = there.run(POLICIES[name], slots, on_group=pause)
    assert isinstance(worker, RemoteWorker)
    if name == "completions race" and slots == 18:
        # what was aborted here went on for some steps there, beside the others
        check_alike(same, groups)
        assert same_figures[:-1] == figures[:-1]
    else:
        assert same == groups
        assert same_figures == figures
    if name == "completions race" and slots == 4:  # who is aborted decides who goes in when
        assert worker.ahead_steps == 0


def test_it_runs_ahead_and_what_it_drew_is_dropped(there):
    worker = there.engine.make_worker(Admission(18))
    trace = worker.start_trace()
    worker.start_round(ahead=True)
    worker.submit([Request("a", range(4, 20), 0, Sampling(400))])
    (event,) = worker.step()
    wait_for_a_step(there.engine.child)
    assert worker.abort() == [] and not worker.busy
    assert worker.ahead_steps > 0
    assert trace.tokens == len(event.token_ids) == 1


@pytest.fixture
def impatient(there, monkeypatch):
    """What hangs is killed at once."""
    monkeypatch.setattr(there.engine.child, "_limit_of", lambda starts: patience(there.engine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "name", "slots", "how"),
    [
        process("full", 4, signal.SIGKILL),
        process("tail", 18, signal.SIGKILL),
        process("partial", 4, signal.SIGKILL),
        process("full", 18, signal.SIGSTOP),  # found in another way; what follows is the same
        ray("full", 4, signal.SIGKILL),
        ray("full", 18, signal.SIGSTOP),
    ],
    indirect=["placement"],
)
def test_a_killed_or_stopped_process_goes_on_from_the_tokens_received(
    here, there, name, slots, how, impatient
):
    """The noise of this engine has no state: what is drawn is what would have been drawn."""
    _, groups, _ = here.run(FullRound(PROMPTS), slots)
    whole = {g.id: [c.token_ids for c in g.completions] for g in groups}
    before, killed = there.engine.restarts, []

    def kill_once(group):
        if not killed:
            killed.append(os.kill(there.engine.pid, how))

    told = "died.*; another" if how == signal.SIGKILL else "not answer for"
    with pytest.warns(UserWarning, match=told):
        _, groups, (decoded, spans, *_) = there.run(POLICIES[name], slots, on_group=kill_once)
    assert there.engine.restarts == before + 1
    tokens = {}
    for request, _, _, count in spans:
        tokens[request] = tokens.get(request, 0) + count
    assert decoded
    for group in groups:
        for completion in group.completions:
            ids = whole[group.id][completion.index]
            assert completion.token_ids == ids[: len(completion.token_ids)]
            assert tokens.get(f"{group.id}/{completion.index}", 0) == len(completion.token_ids)
    if name == "full":
        assert all(c.finished and c.scored for g in groups for c in g.completions)


@process_only
@pytest.mark.slow
def test_a_process_killed_between_rounds_has_the_weights_when_it_comes_back(here, there):
    before = next(here.policy.parameters()).detach().clone()
    with torch.no_grad():
        for bench in (here, there):
            next(bench.policy.parameters()).copy_(1.5 * before)
    there.sync()
    worker, _, _ = there.run(FullRound(PROMPTS))
    os.kill(there.engine.pid, signal.SIGKILL)
    there.engine.wake()
    _, groups, _ = here.run(FullRound(PROMPTS))
    _, same, _ = there.run(FullRound(PROMPTS), worker=worker)
    with torch.no_grad():  # tests of another placement may come next, with `here` as it is
        for bench in (here, there):
            next(bench.policy.parameters()).copy_(before)
            bench.sync()
    assert [c.token_ids for g in same for c in g.completions] == [
        c.token_ids for g in groups for c in g.completions
    ]


@process_only
@pytest.mark.slow
@pytest.mark.parametrize("what", ["sync", "submit"])
def test_one_that_hangs_between_rounds_is_replaced(there, impatient, what):
    """Whatever is asked first: weights, or more requests than the pipe takes."""
    worker = there.engine.make_worker(Admission(18))
    worker.start_trace()
    before, pid = there.engine.restarts, there.engine.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.warns(UserWarning, match="did not answer for"):
        if what == "sync":
            there.sync()
        else:
            worker.submit([Request(f"r{i}", range(4, 20), 0, Sampling(400)) for i in range(9999)])
        worker.abort()
    assert there.engine.restarts == before + 1 and not alive(pid)


@pytest.mark.slow
def test_one_that_hangs_or_dies_while_it_starts_is_replaced(placement, tmp_path):
    class Hanging(SimulatedEngine):
        def start(self, spec):
            for name, how in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
                if not (tmp_path / name).exists():
                    (tmp_path / name).touch()
                    os.kill(os.getpid(), how)
            super().start(spec)

    def limit(starts):  # once it is stopped: until then it may take its time
        return 1.0 if (tmp_path / "stopped").exists() and engine.restarts == 1 else 1e9

    engine = placement(Hanging())
    engine.limit = limit
    with pytest.warns(UserWarning, match=r"did not answer for .*restart 2"):
        engine.start(SPEC)
    assert engine.restarts == 2 and engine.stats().running == 0
    engine.close()


@process_only
@pytest.mark.slow
def test_an_engine_that_lost_a_part_of_itself_is_replaced(placement, tmp_path):
    class Losing(SimulatedEngine):
        def step(self):
            if not (tmp_path / "lost").exists():
                (tmp_path / "lost").touch()
                raise EngineBroken("a worker has died")
            return super().step()

    engine = placement(Losing(lengths=lambda request: 9))
    engine.start(SPEC)
    worker = engine.make_worker(Admission(2))
    worker.start_trace()
    worker.submit([Request("a", [5], 0, Sampling(400))])
    with pytest.warns(UserWarning, match=r"lost a part of its engine \(a worker has died\)"):
        assert worker.step()
    assert engine.restarts == 1
    engine.close()


@pytest.mark.slow
def test_one_that_started_once_and_is_refused_later_is_tried_again(tmp_path):
    class Busy(SimulatedEngine):
        def start(self, spec):
            with open(tmp_path / "starts", "a+") as file:
                file.write(".")
                starts = file.tell()
            if starts == 2:
                raise ValueError("no memory yet")
            super().start(spec)

    engine = ProcessEngine(Busy())
    engine.start(SPEC)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match=r"did not start again \(no memory yet\)"):
        assert engine.stats().running == 0
    assert engine.restarts == 2
    engine.close()


def test_who_waits_counts_the_time_in_which_it_runs():
    killed = []
    watch = Watch(killed.append)
    watch.end()  # its own ticks are not wanted here
    with watch.waiting(lambda: 3.5):
        for seconds in (1.0, 0.5, 7200.0, 1.0):  # this process was stopped meanwhile
            watch.tick(seconds)
        assert killed == []
        watch.tick(1.0)
        watch.tick(1.0)
    assert killed == [4.5], "once"
    watch.tick(7200.0)
    assert killed == [4.5], "nobody waits"


def test_an_answer_that_nobody_waits_for_any_more(there):
    """As after Ctrl-C in the middle of a step."""
    worker = there.engine.make_worker(Admission(18))
    worker.start_trace()
    worker.submit([Request("a", range(4, 20), 0, Sampling(400))])
    there.engine.child.ask("worker", "advance")
    assert worker.abort() == []
    assert there.engine.stats().running == 0 and not worker.busy


def test_errors_are_those_of_the_engine(there):
    with pytest.raises(UsageError, match="'long' does not fit") as error:
        there.engine.submit([Request("long", range(4, 40), 0, Sampling(440))])
    assert isinstance(error.value, UsageError), "the command line prints it without a traceback"
    there.run(FullRound(PROMPTS))


@process_only
@pytest.mark.slow
@pytest.mark.spawned
def test_one_that_keeps_dying_stops_the_run(placement, tiny_model, make_policy, scheduler):
    class Dying(SimulatedEngine):
        """Takes no request."""

        def submit(self, requests):
            os.kill(os.getpid(), signal.SIGKILL)

    bench = Bench(placement(Dying()), tiny_model, make_policy(tiny_model), scheduler)
    with pytest.raises(RuntimeError, match=r"died.*, 3 times in a row"):
        bench.run(FullRound(PROMPTS))
    bench.engine.close()


SPEC = EngineSpec("", 2, 448, (1,))


@pytest.mark.slow
def test_a_step_that_nobody_asked_for_fails_nothing(tmp_path):
    class Failing(SimulatedEngine):
        def step(self):
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps > 3:
                (tmp_path / "failed").touch()
                raise ValueError("enough")
            return super().step()

    engine = ProcessEngine(Failing(max_jump=1, lengths=lambda request: 100))
    engine.start(SPEC)
    worker = engine.make_worker(Admission(2))
    for _ in range(2):
        worker.start_trace()
        worker.start_round(ahead=True)
        worker.submit([Request("a", [5], 0, Sampling(400))])
        if not (tmp_path / "failed").exists():
            worker.step()
            while not (tmp_path / "failed").exists():
                time.sleep(0.01)
            worker.abort()  # two more steps were made, and one failed
            assert worker.ahead_steps == 2 and engine.stats().running == 0
    with pytest.raises(ValueError, match="enough"):
        worker.step()
    engine.close()


def test_one_that_hangs_when_it_is_closed_is_killed(monkeypatch):
    class Hanging(SimulatedEngine):
        def close(self):
            time.sleep(1000)

    monkeypatch.setattr("lit_rlsched.engines.child.SHUTDOWN", 0.2)
    engine = ProcessEngine(Hanging())
    engine.start(SPEC)
    pid = engine.pid
    engine.close()
    assert not alive(pid) and engine.pid is None


@pytest.mark.slow
def test_a_start_that_is_refused_leaves_no_process(placement, tmp_path):
    class Refusing(SimulatedEngine):
        def start(self, spec):
            (tmp_path / "pid").write_text(str(os.getpid()))
            raise ValueError("not with this model")

    engine = placement(Refusing())
    with pytest.raises(ValueError, match="not with this model") as error:
        engine.start(SPEC)
    assert not isinstance(error.value, UsageError), "an error of the user's own code"
    assert not engine.alive
    wait_until_dead(int((tmp_path / "pid").read_text()))


def test_an_answer_that_cannot_be_sent_is_an_error():
    class Secretive(SimulatedEngine):
        def stats(self):
            return lambda: None

    engine = ProcessEngine(Secretive())
    engine.start(SPEC)
    with pytest.raises(Exception, match="pickle"):
        engine.stats()
    engine.close()


def test_an_engine_that_cannot_be_sent_is_refused():
    engine = ProcessEngine(SimulatedEngine())
    engine.engine.lock = threading.Lock()
    with pytest.raises(UsageError, match="`SimulatedEngine` cannot be sent to another process"):
        engine.start(SPEC)


def test_it_dies_with_the_trainer(tiny_model):
    script = f"""
        from lit_rlsched.engines import ProcessEngine, SimulatedEngine
        from lit_rlsched.engines.spec import EngineSpec
        engine = ProcessEngine(SimulatedEngine())
        engine.start(EngineSpec({tiny_model!r}, 2, 64, (1,)))
        print(engine.pid, flush=True)
        input()
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(trainer.stdout.readline())
    assert alive(pid)
    trainer.kill()
    trainer.wait()
    wait_until_dead(pid)


def wait_until_dead(pid):
    while alive(pid):
        time.sleep(0.05)


def alive(pid):
    """Whether it runs; one that is dead and not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_process_imports_neither_lightning_nor_transformers():
    """They take seconds of each start; an engine imports what it needs."""
    code = "import sys, lit_rlsched.engines._engine_server as _; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"lightning", "transformers", "vllm"} & {*modules.stdout.split()}
