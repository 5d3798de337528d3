"""`Timeline`: totals, file and picture of when trainer and engines work."""

import json
import threading
from functools import partial
from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.figure import Figure
from seen_rounds import At, logged

from lit_rlsched.callbacks import AheadRollout, InFlightUpdates, RolloutCallback, Timeline
from lit_rlsched.callbacks.pictures import waits
from lit_rlsched.callbacks.timeline import TraceFile
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.scheduling.timeline import DECODE, ENGINES, TRAINER, Interval, Lap


def events(folder):
    """Read the file as a viewer does, which adds the last bracket."""
    text = (folder / "timeline.json").read_text().rstrip().rstrip(",")
    return json.loads(text + "]")


def lanes(folder):
    """The intervals `(name, first, last, args)` of each lane, in seconds."""
    all_of = events(folder)
    names = {e["tid"]: e["args"]["name"] for e in all_of if e["ph"] == "M"}
    assert len(names) == sum(e["ph"] == "M" for e in all_of), "a lane is named twice"
    found = {name: [] for name in names.values()}
    for e in all_of:
        if e["ph"] == "X":
            span = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
            found[names[e["tid"]]].append((e["name"], *span, e["args"]))
    return found


def check_gapless(lane, slack=2e-6):
    for (_, _, end, _), (_, start, _, _) in pairwise(lane):
        assert abs(start - end) <= slack


def test_a_synchronous_run_saves_nothing_and_nobody_waits_for_each_other(fit, tmp_path):
    steps = At(logged, "on_train_batch_start")
    fit(callbacks=[steps, Timeline()], steps_per_round=2)
    found = lanes(tmp_path)
    assert set(found) == {"trainer", "engine 0"}
    for lane in found.values():
        check_gapless(lane)
    updates = [i for i in found["trainer"] if i[0] == "update"]
    assert len(updates) == 4
    decoding = [i for i in found["engine 0"] if i[0] == DECODE]
    assert decoding
    assert all(
        end <= first or last <= start
        for _, start, end, _ in updates
        for _, first, last, _ in decoding
    )
    for metrics in steps.seen:
        assert metrics["timeline/saved"] == 0
        assert 0 < metrics["timeline/engines_busy"] < metrics["timeline/seconds"]
        assert 0 < metrics["timeline/trainer_waits_for_engines"] < metrics["timeline/seconds"]
    assert (tmp_path / "waits.png").read_bytes().startswith(b"\x89PNG")


class Held(RolloutCallback):
    """Lets the rollout beside an update begin when it begins, and holds it up until it has ended.

    Else a short rollout may have ended before the update begins.
    """

    def __init__(self):
        self.begins = threading.Event()

    def on_round_start(self, trainer, *args):
        session = trainer.datamodule.run.session
        if "in_background" not in vars(session):
            session.in_background = partial(self.later, session.in_background)

    def later(self, in_background, decode):
        def begin():
            assert self.begins.wait(60), "no update began"
            decode()

        in_background(begin)

    def on_train_batch_start(self, trainer, *args):
        if (background := trainer.datamodule.run.session.background._rollout) is not None:
            self.begins.set()
            background.result(60)
            self.begins.clear()


@pytest.mark.parametrize(
    ("ahead", "held"),
    [
        (AheadRollout(), []),  # a fast engine may have drawn all drafts when the rollout ends
        (AheadRollout("importance"), [Held()]),
        (InFlightUpdates(turns=4), []),
    ],
)
def test_an_engine_decodes_beside_the_update(fit, tmp_path, ahead, held):
    steps = At(logged, "on_train_batch_start")
    fit(
        callbacks=[steps, Timeline(), *held, ahead],
        engine=ProcessEngine(TransformersEngine()),
        steps_per_round=2,
    )
    last = steps.seen[-1]
    if held:  # all that was drawn ahead was drawn beside the update
        assert last["timeline/saved"] > 0
    for who in ("trainer", "engines"):
        parts = [v for k, v in last.items() if k.startswith(f"timeline/{who}_")]
        assert sum(parts) == pytest.approx(last["timeline/seconds"], rel=1e-5)
    for lane in lanes(tmp_path).values():
        check_gapless(lane)


def test_engines_of_a_pool_have_a_lane_each(fit, tmp_path):
    fit(
        callbacks=[Timeline()],
        engine=ProcessEngine(TransformersEngine()),
        num_engines=2,
        max_completion_length=12,
    )
    found = lanes(tmp_path)
    assert set(found) == {"trainer", "engine 0", "engine 1"}
    assert all(any(i[0] == DECODE for i in found[f"engine {n}"]) for n in (0, 1))


def test_a_validation_is_a_rollout_for_which_the_trainer_waits(fit, tmp_path, sums):
    fit(callbacks=[Timeline()], val_data=sums[80:84], trainer={"max_epochs": 1})
    lane = lanes(tmp_path)["trainer"]
    ended = max(end for name, _, end, _ in lane if name == "update")
    waited = [i for i in lane if i[0] == "rollout: waits for engines" and i[1] > ended]
    assert waited


def test_a_resumed_run_goes_on_without_duplicates(fit, tmp_path):
    saves = ModelCheckpoint(
        dirpath=tmp_path / "c", every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    settings = {"max_epochs": 4, "enable_checkpointing": True}
    fit(callbacks=[Timeline(), saves], trainer=settings, steps_per_round=2)
    whole = lanes(tmp_path)
    path = tmp_path / "c" / "step=5.ckpt"
    _, _, data = fit(
        callbacks=[Timeline()], trainer={"max_epochs": 4}, ckpt_path=path, steps_per_round=2
    )
    at = torch.load(path, weights_only=False)["RolloutDataModule"]["seconds"]
    again = lanes(tmp_path)
    for lane, intervals in again.items():
        before = [i for i in whole[lane] if i[2] <= at]
        assert intervals[: len(before)] == before
        assert len(intervals) > len(before)
        for (_, _, end, _), (_, start, _, _) in pairwise(intervals):
            assert start >= end - 2e-6
    updates = [i for i in again["trainer"] if i[0] == "update"]
    assert len(updates) == 5 + 3  # those before the checkpoint, and the rest
    assert data.run.clock.seconds >= max(i[2] for lane in again.values() for i in lane)


def test_a_new_run_replaces_the_file(fit, tmp_path):
    fit(callbacks=[Timeline()])
    fit(callbacks=[Timeline()])
    assert sum(i[0] == "update" for i in lanes(tmp_path)["trainer"]) == 2


def lap(start, end, what="update"):
    return Lap(start, end, {TRAINER: [Interval(TRAINER, what, start, end)]})


def test_a_file_is_cut_where_a_run_resumes(tmp_path):
    file = TraceFile(tmp_path / "timeline.json")
    file.keep(0.0)
    file.add(lap(100.0, 102.0), lambda moment: moment - 100, 1)
    file.add(lap(102.0, 104.0), lambda moment: moment - 100, 2)
    with (tmp_path / "timeline.json").open("a") as text:
        text.write('{"ph": "X", "na')  # killed
    file = TraceFile(tmp_path / "timeline.json")
    file.keep(3.0)
    file.add(lap(7.0, 8.0), lambda moment: moment - 4, 2)
    assert [i[:3] for i in lanes(tmp_path)["trainer"]] == [
        ("update", 0, 2),
        ("update", 2, 3),
        ("update", 3, 4),
    ]


def test_the_picture_says_what_was_saved_and_how_old_tokens_are():
    lanes = {
        TRAINER: [Interval(TRAINER, "update", 0, 3), Interval(TRAINER, "rollout", 3, 4, ENGINES)],
        "engine 0": [
            Interval("engine 0", "wait", 0, 1, TRAINER),
            Interval("engine 0", DECODE, 1, 4),
        ],
    }
    metrics = {"staleness/mean": 1.5, "staleness/0": 0.25, "staleness/8+": 0.75}
    figure = waits([Lap(0, 4, lanes)], metrics | {"drafts/accepted_share": 0.5})
    assert isinstance(figure, Figure)
    top, bottom = figure.axes
    assert "for 2 s of 4 s" in figure.get_suptitle()
    assert [t.get_text() for t in top.get_yticklabels()] == [
        "trainer\nworks 75 %",
        "engine 0\nworks 75 %",
    ]
    assert [p.get_height() for p in bottom.patches] == [0.25, 0.75]
    assert "of drafts 50 % of the tokens were kept" in bottom.get_title(loc="left")
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["decoding", "update", "waits for the trainer", "waits for the engines"]
