import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger

from lit_rlsched.callbacks import RolloutLogger
from lit_rlsched.data.rows import load_rows
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.run.record import WHOLE_ROUNDS, RunRecord
from lit_rlsched.run.saving.resuming import SAME_ON_RESUME
from lit_rlsched.run.trainer import Clock, Recorder
from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts
from lit_rlsched.types import Completion, Group, Prompt, Sampling

LIMIT = 40


def make_round(number: int = 0, prompts: int = 3, size: int = 4, slots: int = 5, seed: int = 0):
    """A round on a clock of one second a step."""
    rng = random.Random(f"{seed}/{number}")
    groups = [
        Group(
            f"p{p}@0",
            Prompt(f"p{p}", f"prompt {p}", (1, 2)),
            Sampling(LIMIT),
            [make_completion(i, min(LIMIT, rng.randint(1, 60))) for i in range(size)],
        )
        for p in range(prompts)
    ]
    trace = make_trace(groups, slots)
    metrics = {"reward": 0.1 * number, "rollout/bubble_ratio": trace.bubble_ratio}
    return Round(number=number, version=2 * number, groups=groups, trace=trace, metrics=metrics)


def make_completion(index: int, length: int) -> Completion:
    return Completion(
        index,
        token_ids=[5] * length,
        logprobs=[-1.0] * length,
        finish_reason="length" if length == LIMIT else "stop",
        text=f"text {index}",
        scores=[1.0, None],
        advantage=0.5 if index else float("nan"),
    )


def make_trace(groups: list[Group], slots: int) -> RolloutTrace:
    trace = RolloutTrace(slots)
    lengths = {f"{g.id}/{c.index}": len(c.token_ids) for g in groups for c in g.completions}
    waiting, left, now = list(lengths), {}, 0.0
    while waiting or left:
        while waiting and len(left) < slots:
            left[waiting[0]] = lengths[waiting[0]]
            trace.admitted(waiting.pop(0), now)
        trace.take(Step(now, now + 1, len(left), 0))
        now += 1
        left = {name: n - 1 for name, n in left.items()}
        for name in [name for name, n in left.items() if n == 0]:
            trace.left(name, now, lengths[name])
            del left[name]
    return trace


def make_trainer(folder: Path, *loggers):
    """What the callback asks a Trainer for, so that no engine is needed."""
    datamodule = RolloutDataModule.__new__(RolloutDataModule)
    datamodule.run = TrainingRun.__new__(TrainingRun)
    datamodule.run.counters = {"num_completions": 24}
    datamodule.run.record, datamodule.run.clock = RunRecord(), Clock()
    datamodule.run.session = None
    rewards = SimpleNamespace(
        names=["accuracy", "format"], weights=[1.0, 1.0], num_workers=1, has_async=False
    )
    datamodule.run.settings = SimpleNamespace(
        rewards=rewards,
        data={"train": "prompts.jsonl"},
        engine=SimpleNamespace(
            engines=["engine"],
            name="engine",
            **dict.fromkeys(["logprobs", "keeps_cache", "decodes_by_itself"], False),
        ),
        tokenizer=None,
        tools=None,
        sampling=Sampling(LIMIT),
        **dict.fromkeys(SAME_ON_RESUME, 1),
        evaluation=SimpleNamespace(sampling=Sampling(LIMIT, temperature=0.7)),
    )
    datamodule.run.facts = RunFacts(datamodule.run.settings)
    return SimpleNamespace(
        default_root_dir=str(folder),
        datamodule=datamodule,
        loggers=list(loggers),
        callbacks=[],
        is_global_zero=True,
        fast_dev_run=False,
        sanity_checking=False,
        callback_metrics={},
        state=SimpleNamespace(fn="fit"),
        global_step=0,
    )


def run(callback: RolloutLogger, trainer, rounds) -> None:
    callback.setup(trainer, None, "fit")
    for number in rounds:
        draw(callback, trainer, make_round(number))


def draw(callback: RolloutLogger, trainer, round: Round) -> None:
    trainer.datamodule.run.record.add_round(round)
    callback.on_round_end(trainer, None, round)


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").open()]


# Completions.


def test_rows_have_trls_columns_and_whole_groups(tmp_path):
    run(RolloutLogger(num_completions=8), make_trainer(tmp_path), [0, 1])
    rows = read_rows(tmp_path)
    assert [*rows[0]] == [
        *("step", "prompt", "completion", "accuracy", "format", "advantage"),
        *("completion_length", "finish_reason", "round"),
    ]
    assert [r["prompt"] for r in rows] == 2 * (["prompt 0"] * 4 + ["prompt 1"] * 4)
    assert [r["round"] for r in rows] == [1] * 8 + [2] * 8
    assert rows[9] == {
        "step": 2,
        "prompt": "prompt 0",
        "completion": "text 1",
        "accuracy": 1.0,
        "format": None,
        "advantage": 0.5,
        "completion_length": len(make_round(1).completions[1].token_ids),
        "finish_reason": make_round(1).completions[1].finish_reason,
        "round": 2,
    }
    assert rows[0]["advantage"] is None  # NaN is not JSON


def test_prompts_can_be_trained_on_again(tmp_path):
    round = make_round()
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\u2028there"},
    ]
    round.groups[0].prompt = Prompt("p0", chat, (1,))
    callback, trainer = RolloutLogger(), make_trainer(tmp_path)
    callback.setup(trainer, None, "fit")
    callback.on_round_end(trainer, None, round)
    rows = load_rows(tmp_path / "completions.jsonl")
    assert [rows[i]["prompt"] for i in (0, 4, 8)] == [chat, "prompt 1", "prompt 2"]


def test_resumed_run_replaces_the_rounds_it_redoes(tmp_path):
    first = RolloutLogger(num_completions=4)
    run(first, make_trainer(tmp_path), [0, 1])
    whole = (tmp_path / "completions.jsonl").read_text()
    run(first, make_trainer(tmp_path), [2, 3])
    with (tmp_path / "completions.jsonl").open("a") as file:
        file.write('{"step": 8, "prom')  # killed while it wrote

    resumed = RolloutLogger(num_completions=4)
    run(resumed, make_trainer(tmp_path), [2, 3, 4])
    assert (tmp_path / "completions.jsonl").read_text().startswith(whole)
    assert [r["round"] for r in read_rows(tmp_path)] == [n for n in range(1, 6) for _ in range(4)]


def test_half_a_surrogate_pair_is_escaped(tmp_path):
    wandb = pytest.importorskip("wandb")
    logger = WandbLogger(save_dir=tmp_path, project="test", offline=True)
    round = make_round()
    for completion in round.completions:
        completion.text = "half \ud83d of a pair, and a whole one: \U0001f600"
        completion.extra = {"why\udc00": ["\ud800", {"\udfff": 1.5}]}
    callback, trainer = RolloutLogger(num_completions=1), make_trainer(tmp_path, logger)
    callback.setup(trainer, None, "fit")
    callback.on_round_end(trainer, None, round)
    (row,) = read_rows(tmp_path)
    assert row["completion"] == "half \\ud83d of a pair, and a whole one: \U0001f600"
    assert row["why\\udc00"] == ["\\ud800", {"\\udfff": 1.5}]
    (path,) = Path(logger.experiment.dir).glob("media/table/*.table.json")
    wandb.finish()
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["columns"] == [*row] and table["data"][0][2] == row["completion"]


def test_columns_of_rewards_do_not_overwrite_ours(tmp_path):
    round = make_round(3)
    for completion in round.completions:
        completion.extra = {"round": "a", "step": "b", "accuracy": "c", "mine": "e"}
    callback, trainer = RolloutLogger(), make_trainer(tmp_path)
    trainer.datamodule.run.settings.rewards.names = ["accuracy", "advantage"]
    callback.setup(trainer, None, "fit")
    callback.on_round_end(trainer, None, round)
    row = read_rows(tmp_path)[1]
    assert (row["round"], row["step"], row["accuracy"], row["advantage"]) == (4, 6, 1.0, 0.5)
    assert (row["reward/round"], row["reward/step"], row["reward/accuracy"]) == ("a", "b", "c")
    assert (row["mine"], row["reward/advantage"]) == ("e", None)


def test_unreadable_lines_are_left_out_and_counted(tmp_path):
    first = RolloutLogger(num_completions=4)
    run(first, make_trainer(tmp_path), [0, 1, 2])
    path = tmp_path / "completions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1:3] = [b"\x00\xff\n", b'{"step": 1}\n', b"[]\n"]
    lines += [b"[" * 100_000 + b"\n", b'{"round": 1e999}\n']
    path.write_bytes(b"".join(lines))
    resumed = RolloutLogger(num_completions=4)
    with pytest.warns(UserWarning, match=r"completions.jsonl`: 5 of 11 lines .* is line 2\."):
        run(resumed, make_trainer(tmp_path), [2])
    assert [row["round"] for row in read_rows(tmp_path)] == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_writes_nothing_on_fast_dev_run_and_other_ranks(tmp_path):
    for change in ({"fast_dev_run": 1}, {"is_global_zero": False}):
        trainer = make_trainer(tmp_path)
        vars(trainer).update(change)
        run(RolloutLogger(), trainer, [0])
    assert not list(tmp_path.iterdir())


def test_traces_are_kept_by_default(tmp_path):
    rounds = [make_round(number) for number in (6, 7)]
    run(RolloutLogger(), make_trainer(tmp_path), [6, 7])
    traces = Traces(tmp_path)
    assert traces.about["max_completion_length"] == LIMIT
    spans, steps = traces.rows("spans"), traces.rows("steps")
    assert [row["round"] for row in spans] == [7] * 12 + [8] * 12
    assert sum(row["tokens"] for row in spans) == sum(r.trace.tokens for r in rounds)
    assert sum(row["decode_steps"] for row in steps) == sum(r.trace.decode_steps for r in rounds)
    rows = traces.rows("completions")
    assert [row["drawn"] for row in rows] == [c.drawn for r in rounds for c in r.completions]
    assert dict(traces.rows("rounds")[1]["metrics"])["reward"] == pytest.approx(0.7)


# Loggers.


def wandb_tables(folder: Path) -> list[dict]:
    """The tables `completions` of an offline run's folder `files`, in the order of logging."""
    paths = folder.glob("media/table/completions_*.table.json")
    ordered = sorted(paths, key=lambda path: int(path.name.split("_")[1]))
    return [json.loads(path.read_text(encoding="utf-8")) for path in ordered]


@pytest.fixture
def offline(tmp_path):
    wandb = pytest.importorskip("wandb")
    wandb.finish()
    yield lambda: WandbLogger(save_dir=tmp_path / "w", project="test", offline=True)
    wandb.finish()


@pytest.mark.slow
def test_wandb_gets_the_newest_rows_once_with_each_report(tmp_path, offline):
    logger = offline()
    trainer = make_trainer(tmp_path, logger)
    callback = RolloutLogger(num_completions=4, report_every_n_rounds=2, save_trace=False)
    run(callback, trainer, [0, 1, 2, 3])
    callback.on_fit_end(trainer, None)  # the newest round was shown already
    tables = wandb_tables(Path(logger.experiment.dir))
    at = tables[0]["columns"].index("round")
    assert [[row[at] for row in table["data"]] for table in tables] == [[1] * 4, [2] * 4, [4] * 4]
    assert tables[0]["columns"] == [*read_rows(tmp_path)[0]]


def test_what_changes_its_type_is_no_error(tmp_path, offline):
    logger, callback = offline(), RolloutLogger(num_completions=4)
    trainer = make_trainer(tmp_path, logger)
    callback.setup(trainer, None, "fit")
    round = make_round()
    round.trace = None
    values = [1, "one", None, [1, 2]]
    for completion, value in zip(round.completions, values, strict=False):
        completion.extra = {"why": value}
    callback.on_round_end(trainer, None, round)
    (table,) = wandb_tables(Path(logger.experiment.dir))
    at = table["columns"].index("why")
    assert [row[at] for row in table["data"]] == values


# Summary.


def summary(folder, rounds, accuracies=(), more=(), **settings):
    """Of a run of so many rounds, with held-out accuracies after some steps."""
    callback, trainer = RolloutLogger(), make_trainer(folder)
    vars(trainer).update(settings)
    run(callback, trainer, range(rounds))
    trainer.datamodule.run.record.validations = [
        {"step": step, **dict.fromkeys(("val/accuracy", *more), value)}
        for step, value in accuracies
    ]
    trainer.datamodule.run.clock.before = 213.7
    return callback.summary(trainer)


def test_summary_goes_from_the_first_to_the_last_accuracy(tmp_path):
    folder = tmp_path / "quickstart"
    assert summary(folder, 2, [(0, 0.39), (2, 0.858)]) == (
        "quickstart: held-out accuracy 0.39 -> 0.86 (2 rounds, 24 completions, 214 s); "
        f"report and metrics in {folder}"
    )


def test_summary_says_which_completions_the_accuracy_is_of(tmp_path):
    def said(*names):
        of = summary(tmp_path, 2, [(0, 0.4), (2, 0.9)], names)
        return of.partition(" (2 rounds")[0].partition("accuracy ")[2]

    sampled = "0.40 -> 0.90 as the mean of 4 samples at temperature 0.7"
    assert said("val/mean@4", "val/pass@4") == sampled
    greedy = "0.40 -> 0.90 of greedy decoding"
    assert said("val/greedy_accuracy") == greedy
    assert said("val/greedy_accuracy", "val/mean@4") == f"{sampled}, {greedy}"
    assert said("val/mean@1") == "0.40 -> 0.90 as the mean of 1 sample at temperature 0.7"
    assert said() == "0.40 -> 0.90"


def test_summary_claims_no_start_that_was_not_measured(tmp_path):
    late = summary(tmp_path / "late", 2, [(1, 0.67), (60, 0.89)])
    assert late.startswith("late: held-out accuracy 0.89 (2 rounds")
    before = summary(tmp_path / "run", 2, [(0, 0.42)])
    assert "run: held-out accuracy before training 0.42, reward 0.00 -> 0.10 (2 rounds" in before
    assert ": nothing trained (0 rounds" in summary(tmp_path / "none", 0)
    assert ": reward 0.00 -> 0.20 (3 rounds" in summary(tmp_path / "unmeasured", 3)


def test_summary_of_a_fast_dev_run_claims_nothing(tmp_path):
    assert summary(tmp_path, 1, [(1, 1.0)], fast_dev_run=1) == (
        "fast_dev_run: everything ran once (1 round, 24 completions, 214 s); "
        "nothing was measured or written"
    )


def test_refuses_data_without_rollouts():
    trainer = SimpleNamespace(datamodule=object())
    with pytest.raises(UsageError, match="`RolloutLogger` needs rollouts, but the data module is"):
        RolloutLogger().setup(trainer, None, "fit")


# Record.


def test_the_record_is_bounded_and_goes_on_after_a_resume():
    """The curves reach over the whole run; everything else is of the newest rounds."""
    whole, resumed = RunRecord(), RunRecord()
    trainer = SimpleNamespace()
    number = WHOLE_ROUNDS + 10
    for n in range(number):
        if n == number - 5:
            resumed.load_state_dict(whole.state_dict())
        for record in (whole, resumed)[: 1 + (n >= number - 5)]:
            round = make_round(n)
            record.add_round(round)
            record.add_metrics({"step": 99, "time/total": n})  # `step` of a reward function
            trainer.callback_metrics = {"kl": torch.tensor(0.5 + n), "loss": torch.tensor(1.0)}
            Recorder(record).on_train_batch_end(trainer, None)
    assert whole.state_dict() == resumed.state_dict()
    assert [(r["round"], r["step"]) for r in whole.rounds] == [
        (n + 1, 2 * n) for n in range(number)
    ]
    assert [r["kl"] for r in whole.rounds] == [0.5 + n for n in range(number)]
    kept = [n for n, row in enumerate(whole.rounds) if "rollout/bubble_ratio" in row]
    assert kept == [*range(10, number)] and not any("loss" in row for row in whole.rounds)
