import re
import time
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from lit_rlsched.callbacks import RolloutProgressBar
from lit_rlsched.callbacks import rollout_progress_bar as progress
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.text import duration, three_digits
from lit_rlsched.training.round import Round
from lit_rlsched.types import Completion, Group, Prompt, Sampling

METRICS = {
    "reward": 0.5,
    "completions/mean_length": 98.4,
    "completions/clipped_ratio": 0.03,
    "rollout/bubble_ratio": 0.25,
    "rollout/tokens_per_second": 2345.6,
    "time/rollout": 1.5,
}

pytestmark = pytest.mark.filterwarnings("ignore")


class Data(LightningDataModule):
    """Stands in for the rollout data module: only its session is looked at."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches
        self.run = SimpleNamespace()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(self.batches, 1))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(3, 1))


class Module(LightningModule):
    """Each step of training is a round of four completions of two tokens in two slots."""

    def __init__(self, bar: RolloutProgressBar) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.bar = bar
        self.postfixes: list[str] = []

    def training_step(self, batch, batch_idx):
        self.roll_out()
        loss = (self.weight * batch).sum()
        self.log("loss", loss, prog_bar=True)
        self.print("from the module")
        return loss

    def roll_out(self) -> None:
        trainer, trace = self.trainer, RolloutTrace(2)
        trainer.datamodule.run.session = SimpleNamespace(trace=trace)
        group = Group("p@0", Prompt("p", "p", (1,)), Sampling(9), [Completion(i) for i in range(4)])
        self.bar.on_round_start(trainer, self, [group])
        for i, completion in enumerate(group.completions):
            completion.token_ids = [5, 5]
            completion.finish_reason, completion.scores = "stop", [1.0]
            trace.admitted(str(i), 2.0 * i)
            trace.take(Step(2.0 * i, 2.0 * i + 2, 1, 0, decode_steps=2))
            trace.left(str(i), 2.0 * i + 2, 2)
            self.bar.on_completion_end(trainer, self, completion)
        self.postfixes.append(getattr(self.bar._rollout_bar, "postfix", None))
        self.bar.on_round_end(trainer, self, Round(0, 0, [group], metrics=METRICS))

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.75, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def terminal(monkeypatch):
    """Let the bars take the output for a terminal, and refresh on every completion."""
    monkeypatch.setattr(progress, "_interactive", lambda: True)
    monkeypatch.setattr(progress, "SECONDS_PER_FRAME", 0.0)


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(progress, "_interactive", lambda: False)


def fit(folder, bar: RolloutProgressBar, batches: int = 1, **settings):
    module = Module(bar)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        callbacks=[bar],
        enable_model_summary=False,
        enable_checkpointing=False,
        **settings,
    )
    trainer.fit(module, datamodule=Data(batches))
    return module


def test_terminal_shows_one_bar_for_the_run(tmp_path, capsys, terminal):
    bar = RolloutProgressBar()
    fit(tmp_path, bar, max_epochs=3)
    main, out = bar.train_progress_bar, capsys.readouterr().out
    assert (main.n, main.total, main.unit) == (3, 3, "round")
    assert "reward=0.500, val/accuracy=0.750, loss=" in main.postfix
    assert "Epoch" not in out and re.search(r"Rounds: 100%.*3/3", out)
    assert "Validation DataLoader 0: 100%" in out
    assert "from the module" in out


def test_rollout_bar_moves_with_completions(tmp_path, capsys, terminal):
    module = fit(tmp_path, RolloutProgressBar(), max_epochs=1)
    assert module.postfixes == ["tok/s=1, bubble=0.500"]  # 8 tokens in 8 s, 1 of 2 slots
    out = capsys.readouterr().out
    assert all(f"{n}/4" in out for n in range(5)) and "rollout" in out


def test_a_check_on_a_part_is_no_validation(tmp_path, capsys, log):
    fit(tmp_path, RolloutProgressBar(), max_epochs=1, num_sanity_val_steps=1)
    assert "before training" not in capsys.readouterr().out


def test_log_gets_a_line_for_each_round_and_validation(tmp_path, capsys, log, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    fit(tmp_path, RolloutProgressBar(), max_epochs=2, num_sanity_val_steps=-1)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if re.match(r"round \d|before training", line)]
    figures = (
        r"reward 0.500, held-out accuracy 0.75, 2,346 tokens/s, 98 tokens on average, 3 % cut, "
        r"25 % idle, rollout [\d.]+ s, update [\d.]+ s, loss [\d.]+"
    )
    assert lines[0] == "before training: held-out accuracy 0.75"
    assert re.fullmatch(rf"round 1/2: {figures}, [\d.]+ s left", lines[1]), lines[1]
    assert re.fullmatch(rf"round 2/2: {figures}", lines[2]), lines[2]
    assert len(lines) == 3
    assert "\r" not in out and "from the module" in out


def test_log_of_quick_rounds_is_short(tmp_path, capsys, log):
    fit(tmp_path, RolloutProgressBar(), max_epochs=20, limit_val_batches=0)
    rounds = re.findall(r"^round (\d+)/20: ", capsys.readouterr().out, re.MULTILINE)
    assert rounds[0] == "1" and rounds[-1] == "20" and len(rounds) < 10


def test_log_of_a_long_rollout_shows_that_it_moves(tmp_path, capsys, log, monkeypatch):
    clock = iter(range(0, 10**6, 20))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    bar, trainer = (
        RolloutProgressBar(),
        SimpleNamespace(datamodule=SimpleNamespace(run=SimpleNamespace())),
    )
    Module.roll_out(SimpleNamespace(bar=bar, trainer=trainer, postfixes=[]))
    out = capsys.readouterr().out.splitlines()
    assert out == ["  rollout: 2 of 4 completions, 1 tokens/s, 50 % idle"]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def left_of(clock, monkeypatch, rounds, seconds, steps=1, done=0, **limits):
    """What a bar says is left after each round, and what was true."""
    monkeypatch.setattr(progress, "duration", lambda seconds: f"{seconds}")
    trainer = SimpleNamespace(current_epoch=done, global_step=0, max_epochs=-1, max_steps=-1)
    vars(trainer).update(limits)
    bar, told, ends = RolloutProgressBar(), [], []
    bar._ends.append((0 if trainer.max_steps > 0 else done, clock.now))
    bar._advance = lambda *_: None
    bar.get_metrics = lambda *_: {}
    bar._print = told.append
    for number in range(done + 1, rounds + 1):
        clock.now += seconds(number)
        trainer.global_step += steps
        trainer.current_epoch = number - 1
        bar.on_train_epoch_end(trainer, None)
        ends.append(clock.now)
    left = [re.search(r": ([\d.]+) left", line) for line in told]
    return [of and float(of[1]) for of in left], [ends[-1] - end for end in ends]


def test_time_left_counts_the_newest_rounds_with_their_validations(clock, monkeypatch):
    seconds = lambda n: 4.5 + 25.0 * (n % 10 == 0)  # noqa: E731
    for done in (0, 30):
        told, true = left_of(clock, monkeypatch, 60, seconds, done=done, max_epochs=60)
        assert told[20:-10] == pytest.approx(true[20:-10], rel=0.3) and told[-1] is None
    told, true = left_of(
        clock, monkeypatch, 100, lambda n: 300 if n == 1 else 2 + n / 10, max_epochs=100
    )
    assert told[-11] == pytest.approx(true[-11], rel=0.15), "what began slowly is forgotten"
    for more in ({}, {"max_epochs": 1000}):
        told, true = left_of(clock, monkeypatch, 20, lambda n: 30, steps=2, max_steps=40, **more)
        assert told[:-1] == pytest.approx(true[:-1]) and told[-1] is None
    assert left_of(clock, monkeypatch, 5, lambda n: 3)[0] == [None] * 5  # it has no end


def test_lightnings_bar_is_replaced_unless_somebody_has_set_it_up(request, capsys, log):
    train = request.getfixturevalue("fit")  # this file has a `fit` of its own
    trainer, *_ = train(trainer={"enable_progress_bar": True, "max_epochs": 1})
    assert isinstance(trainer.progress_bar_callback, RolloutProgressBar)
    assert re.search(r"^round 1/1: reward ", capsys.readouterr().out, re.MULTILINE)
    for bar in (TQDMProgressBar(refresh_rate=7), RichProgressBar(refresh_rate=7)):
        trainer = Trainer(callbacks=[bar], logger=False, accelerator="cpu")
        progress.replace_default_bar(trainer)
        assert trainer.progress_bar_callback is bar
    for bar in (TQDMProgressBar(), RichProgressBar()):
        trainer = Trainer(callbacks=[bar], logger=False, accelerator="cpu")
        progress.replace_default_bar(trainer)
        assert isinstance(trainer.progress_bar_callback, RolloutProgressBar)


def test_bar_shows_the_time_left_and_seconds_a_round(tmp_path, capsys, terminal):
    bar = RolloutProgressBar()
    fit(tmp_path, bar, max_epochs=2)
    out = capsys.readouterr().out
    assert re.search(r"Rounds:  50%.* 1/2 \[00:\d\d<00:\d\d, .*round.*, reward=0.500", out), out
    bar = bar.init_train_tqdm()
    bar.unit = "round"
    bar.reset(60)
    bar.n, bar.start_t = 3, bar._time() - 36
    assert "[00:36<11:24, 12.00s/round" in str(bar)


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_log_of_an_evaluation_shows_that_it_moves(capsys, log, clock, function):
    bar, trainer = RolloutProgressBar(), SimpleNamespace(sanity_checking=False)
    trainer.state = SimpleNamespace(fn=TrainerFn(function))
    for done in range(5):
        bar.on_evaluation_progress(trainer, None, done, 4)
        clock.now += 12
    what = {"validate": "validation"}.get(function, function)
    lines = [f"  {what}: {done} of 4 completions" for done in (0, 3)]
    assert capsys.readouterr().out.splitlines() == lines
    trainer.state.fn = "fit"  # quick validations between rounds have no line
    bar.on_evaluation_progress(trainer, None, 0, 4)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (99.4, "99 s"), (99.6, "2 min")],
        *[(3569, "59 min"), (3571, "1 h 0 min"), (12000, "3 h 20 min")],
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_figures_have_three_digits_and_no_exponent():
    values = (0.1234, 9.876, 99.94, 99.96, 999.6, 2329.6)
    assert [three_digits(v) for v in values] == ["0.123", "9.88", "99.9", "100", "1,000", "2,330"]


def test_rollout_bar_counts_what_a_stop_takes_and_a_new_prompt_brings(terminal):
    bar, trainer = RolloutProgressBar(), SimpleNamespace()
    trainer.datamodule = SimpleNamespace(
        run=SimpleNamespace(session=SimpleNamespace(trace=RolloutTrace(2)))
    )
    plan = [
        Group(name, Prompt(name, name, (1,)), Sampling(9), [Completion(i) for i in range(4)])
        for name in "abc"
    ]
    bar.on_round_start(trainer, None, shown := plan[:2])
    totals = []
    for change in (None, lambda: plan[0].completions.pop(), lambda: shown.append(plan[2])):
        scored = next(c for c in plan[0].completions if not c.scored)
        scored.finish_reason, scored.scores = "stop", [1.0]
        if change:
            change()
        bar.on_completion_end(trainer, None, scored)
        totals.append((bar._rollout_bar.n, bar._rollout_bar.total))
    assert totals == [(1, 8), (2, 7), (3, 11)]
    bar.on_round_end(trainer, None, Round(0, 0, shown, metrics=METRICS))


@pytest.mark.parametrize("interactive", [True, False])
def test_refresh_rate_zero_is_silent(tmp_path, capsys, monkeypatch, interactive):
    monkeypatch.setattr(progress, "_interactive", lambda: interactive)
    fit(tmp_path, RolloutProgressBar(refresh_rate=0), max_epochs=1)
    out = capsys.readouterr().out
    assert "round" not in out.lower() and "rollout" not in out
