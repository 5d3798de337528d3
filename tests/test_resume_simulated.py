"""A run goes on from any checkpoint as if it had never stopped, whatever its schedule.

Everything of the run is real except for the ends: the engine is simulated, and a few lines stand in
for Lightning's loop, the weights, their gradients and the reward workers. So a run takes
milliseconds, and can stop anywhere. `test_resume.py` kills real ones.
"""

import io
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import SIGTERMException
from resumable_run import state_hash
from schedules import LONG, RESUMED, SETTINGS, TWO_STEPS, Schedule

from lit_rlsched import RolloutDataModule
from lit_rlsched.callbacks import (
    DownSampling,
    DynamicSampling,
    LengthPrediction,
    MicroGroupSampling,
    RolloutWindow,
    SortedBatching,
    TailBatching,
)
from lit_rlsched.data.source import DomainSource
from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.result import DraftAudit
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.run import position, training_run
from lit_rlsched.run.interrupts import check_interrupt
from lit_rlsched.run.loaders import Evaluation
from lit_rlsched.run.saving import run_state
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.run.trainer import FitSettings
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.length_prediction import PromptHistory
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.learner import PlainLearner
from lit_rlsched.training.schedule import RunFacts
from lit_rlsched.types import Prompt, stable_hash

pytestmark = pytest.mark.filterwarnings("ignore")  # advice about rewards of 0 and 1
SCHEDULES = {
    **{
        name: of
        for name, of in RESUMED.items()
        if name not in ("automatic optimization", "tracker")
    },
    "streamed": Schedule(
        RESUMED["streamed"].callbacks,
        LONG | {"prompts_per_round": 4},  # so that most rounds stream
    ),
    "partial with a limit": Schedule(lambda: [SortedBatching(4, None, "partial", 2)], LONG),
    "domains": Schedule(lambda: [TailBatching(1.5, per_domain={"a": 0.5, "b": 0.5})], LONG),
    "window of few slots": Schedule(
        lambda: [RolloutWindow(9), MicroGroupSampling(slots=4)],
        LONG | TWO_STEPS | {"prompts_per_round": 4},
    ),
    "window, replaced and stopped early": Schedule(
        lambda: [
            RolloutWindow(),
            DownSampling(3, early_stop=True),
            DynamicSampling(),
            MicroGroupSampling(slots=7),
        ],
        LONG | {"num_generations": 6},
    ),
    "window in any order": Schedule(
        lambda: [RolloutWindow(8, overtake=9), MicroGroupSampling(slots=7)], LONG
    ),
    "completions alone": Schedule(
        lambda: [SortedBatching(3, mode="partial"), MicroGroupSampling(slots=7)],
        LONG | {"needs_group": False},
    ),
}
PROMPTS = [Prompt(f"p{i}", "?", (4 + i % 10, 5), {"domain": "ab"[i % 2]}) for i in range(17)]


class Engine(SimulatedEngine):
    """In this process; a real one would be in its own."""

    decodes_by_itself = logprobs = True


class Coin(Unscored):
    """Half of the completions get 1, the others 0."""

    names = ("coin",)

    def poll(self):
        for group, completion in super().poll():
            completion.scores = [float(sum(completion.token_ids) % 2)]
            yield group, completion


class SomeDrafts(Drafts):
    """Keeps a part of each draft, if it has the weights that drew it."""

    def verify(self, groups, policy, version, update, eos_token_ids, seed_domain=""):
        audit, (end,) = DraftAudit(), eos_token_ids
        for group, completion in ((g, c) for g in groups for c in g.completions if c.draft):
            draft, completion.draft = completion.draft, None
            audit.tokens += len(draft.token_ids)
            assert all(self.weights[v]["weight"].item() == v for v in draft.versions)
            kept = 1 + stable_hash(group.id, completion.index, version) % len(draft.token_ids)
            ids = completion.token_ids = [*draft.token_ids[:kept]]
            completion.logprobs = [*draft.logprobs[:kept]]
            completion.segments = [(version, kept)]
            if ids[-1] == end or kept == group.sampling.max_completion_length:
                completion.finish_reason = "stop" if ids[-1] == end else "length"
            audit.accepted_tokens += kept
        return audit


@pytest.fixture(autouse=True, scope="module")
def verify():
    with pytest.MonkeyPatch.context() as patch:
        for module in (position, run_state, training_run):
            patch.setattr(module, "Drafts", SomeDrafts)
        yield


class Module(PlainLearner):
    """Notes what it is trained on, in place of gradients, and counts what happens."""

    automatic_optimization = False
    hparams = {}

    def __init__(self, needs_group, event):
        self.policy = torch.nn.Linear(1, 1, bias=False)
        self.policy.weight.data.zero_()
        self.needs_group, self._event, self.gradients = needs_group, event, []

    def streaming_obstacle(self):
        return None

    def accumulate(self, step, first):
        if first:
            self.gradients = []
        for batch in step:
            self._event()
            public = {name: value for name, value in vars(batch).items() if name[0] != "_"}
            self.gradients.append(state_hash(public))

    def on_round_start(self, *args):
        self._event()

    on_completion_end = on_group_end = on_round_end = on_evaluation_progress = on_round_start


class Run:
    """A run of a schedule, from its beginning or from a checkpoint."""

    def __init__(self, name, checkpoint=None):
        schedule = SCHEDULES[name]
        predictor = TokenConditioned if name == "partial" else PromptHistory
        given = SETTINGS | {"micro_batch_tokens": 64} | schedule.data
        needs_group = given.pop("needs_group", True)
        for own in ("reward_funcs", "val_greedy"):  # the same for all here
            given.pop(own, None)
        engine = Engine(partial(length, given["max_completion_length"]))
        rows = [{"prompt": "?"}]  # tokenised already
        evaluation = {"val_data": rows, "val_num_generations": 2, "val_greedy": False}
        self.data = RolloutDataModule(rows, [print], engine=engine, **evaluation, **given)
        self.run, self.taken, self.events, self.stop = self.data.run, [], 0, None
        self.module = Module(needs_group, self.event)
        self.validated = True
        self.trainer = SimpleNamespace(
            callbacks=[*schedule.callbacks(), LengthPrediction(predictor(), probe_tokens=4)],
            lightning_module=self.module,
            datamodule=self.data,
            global_step=0,
            max_steps=schedule.trainer.get("max_steps", 8),
            max_epochs=None,
            limit_train_batches=1.0,
            overfit_batches=0,
            fast_dev_run=False,
            log_every_n_steps=1,
            progress_bar_callback=None,
            received_sigterm=False,
            _signal_connector=None,
            validating=False,
            predicting=False,
            sanity_checking=False,
            state=SimpleNamespace(fn="fit"),
            profiler=SimpleNamespace(profile=lambda name: nullcontext()),
            precision_plugin=SimpleNamespace(forward_context=nullcontext),
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)),
            loggers=[],
            callback_metrics={},
        )
        self.run._trainer = self.trainer
        facts = RunFacts(self.run.settings, self.run.learner)
        self.run.schedule = make_schedule(self.trainer.callbacks, facts)
        for callback in [*self.trainer.callbacks]:
            callback.setup(self.trainer, self.module, "fit")
        self.start(engine)
        if checkpoint is not None:
            self.load(checkpoint)
        self.saved = self.save()

    def start(self, engine):
        """What `Startup` does, without a tokenizer."""
        run, trainer, schedule, given = self.run, self.trainer, self.run.schedule, self.run.settings
        run.fit_settings = FitSettings(trainer, given.steps_per_epoch, run.record)
        train = SimpleNamespace(of_uid={prompt.uid: prompt for prompt in PROMPTS}.__getitem__)
        run._startup = SimpleNamespace(
            policy=self.module.policy,
            decode=str,
            prompts=SimpleNamespace(train=train, held_out={"val": PROMPTS[:3]}),
        )
        domain_of = schedule.rule.domain_of if schedule.rule.has_domains else None
        run.pool.connect(DomainSource(PROMPTS, given.seed, True, domain_of))
        slots = schedule.slots.slots or 100
        order = schedule.slots.resolved_order(True, schedule.rule.ends_early)
        run.session = RolloutSession(
            engine,
            EngineSpec("", slots, 100, (1,)),
            Coin(),
            lambda version: engine.sync_weights([], version) or {},
            lambda: Admission(slots, order=order),
            seed=given.seed,
        )
        run.session.lengths, run.session.probe_tokens = schedule.lengths, schedule.probe_tokens
        run.session.check_interrupt = partial(check_interrupt, trainer)
        run._started = True

    def event(self):
        self.events += 1
        if self.events == self.stop:
            self.trainer.received_sigterm = True

    def fit(self, stop=None):
        """Train to the end, or until SIGTERM at an event; return whether it came to the end."""
        self.stop = stop
        try:
            while self.trainer.global_step < self.trainer.max_steps:
                if self.validated:
                    self.train()
                self.validate()
        except SIGTERMException:
            self.run.wait_for_rollout()
            return False
        return True

    def train(self):
        """One round, or the rest of it."""
        trainer, module = self.trainer, self.module
        for step in self.run.optimizer_steps():
            module.accumulate(step, first=not step.accumulated)
            check_interrupt(trainer)
            drawn = [(s.id, [*s.completion.token_ids], s.completion.scores) for s in step.samples]
            self.taken.append(state_hash([drawn, module.gradients, +self.run.counters]))
            trainer.global_step += 1
            module.policy.weight.data.fill_(trainer.global_step)
            for callback in trainer.callbacks:
                callback.on_train_batch_end(trainer, module, None, None, 0)
            self.event()
            self.validated = not self.run.round_is_over
            if self.validated:  # in the middle of a round
                self.saved = self.save()
            check_interrupt(trainer)
            if trainer.global_step == trainer.max_steps:
                return

    def validate(self):
        for _ in Evaluation(self.run, "val"):
            self.event()
            check_interrupt(self.trainer)
        self.validated = True
        self.saved = self.save()

    def save(self):
        """A checkpoint: callbacks first, as Lightning does."""
        trainer, file = self.trainer, io.BytesIO()
        callbacks = [callback.state_dict() for callback in trainer.callbacks]
        state = {"callbacks": callbacks, "run": self.run.state_dict()}
        torch.save(state | {"step": trainer.global_step, "validated": self.validated}, file)
        return file.getvalue()

    def load(self, checkpoint):
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for callback, saved in zip(self.trainer.callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(saved)
        self.run.load_state_dict(state["run"])
        self.trainer.global_step, self.validated = state["step"], state["validated"]
        self.module.policy.weight.data.fill_(state["step"])

    def end(self):
        """All that the run has left."""
        state = {
            "run": self.run.state_dict(),
            **{
                type(callback).__name__: callback.state_dict()
                for callback in self.trainer.callbacks
            },
        }
        self.run.session.close()
        record = state["run"]["record"]
        figures = {"round", "step", "reward", "completions/mean_length"}  # others are times
        record["rounds"] = [{k: row[k] for k in figures & row.keys()} for row in record["rounds"]]
        return untimed(state)


def untimed(state):
    if not isinstance(state, dict):
        return state_hash(state)
    return {key: untimed(value) for key, value in state.items() if "seconds" not in str(key)}


def length(limit, request):
    """One completion in four ends at once; some would be longer than they may."""
    drawn = stable_hash(request.id)
    return 1 if drawn % 4 == 0 else 1 + drawn // 4 % (limit + 4)


@cache
def whole(name):
    """A run that nothing stops."""
    run = Run(name)
    assert run.fit()
    return run.taken, run.end(), run.events


@pytest.mark.mostly_slow("window streamed", "async")
@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data())
def test_stopped_anywhere_and_resumed_equals_never_stopped(name, data):
    """By SIGTERM, and saved then, or killed, and resumed from the last checkpoint before."""
    taken, end, events = whole(name)
    stops = st.tuples(st.sampled_from(["KILL", "TERM"]), st.integers(1, events))
    run, steps = Run(name), []
    for signal, event in data.draw(st.lists(stops, min_size=1, max_size=3)):
        if run.fit(event):
            break
        checkpoint = run.saved if signal == "KILL" else run.save()
        steps += run.taken
        run.run.session.close()
        run = Run(name, checkpoint)
        del steps[run.trainer.global_step :]
    run.fit()
    assert [*steps, *run.taken] == taken
    assert run.end() == end
