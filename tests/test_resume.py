"""Kill a run with SIGKILL wherever it hurts, resume it, and compare with a run never stopped."""

import json

import forked
import pytest
import resumable_run

pytestmark = pytest.mark.slow

PLACES = [
    "step 1",  # in the middle of a round, between two of its optimizer steps
    "completion 40",  # while the third round is drawn
    "step 4",  # at the start of a round: its completions are drawn, nothing of it is trained on
    "save 2",  # while a checkpoint is written, in place of the one before
    "validation 3",  # in the third validation
    "round_end 3",  # all drawn, advantages set
    "step 7",
]
SORTED = [
    "harvest 1",  # while a round is drawn in which the pool of the first one goes on
    "round_end 1",  # harvested: tokens kept or thrown away, nothing trained on
    "validation 2",  # some prompts wait in the pool
    "step 2",  # harvested, at the start of the update
    "harvest 4",
]
TAIL = [
    "harvest 1",  # while a short round is drawn, and what lost the first one waits
    "round_end 1",  # some are put off
    "validation 2",
    "harvest 2",  # while the first long round is drawn
    "round_end 2",
    "step 2",  # at the start of the long round's update
    "harvest 5",  # while the second one is drawn
    "step 7",  # at the start of a short round's update
]
STREAMED = [
    "harvest 1",  # while a short round is drawn, and some gradients are there
    "harvest 2",  # while the first long round is drawn
    "round_end 5",  # the second one is drawn, and most of its gradients are there
]
DRAFTS = [
    "round_end 1",  # some are put off, with what they had drawn
    "harvest 2",  # while the first long round goes on from it
    "step 2",  # at the start of its update
    "harvest 5",
]
LOSERS = [
    "harvest 1",  # while a round is drawn in which what lost the first one goes on
    "round_end 3",
    "harvest 5",
]
AHEAD = [
    "step 1",  # in the middle of an update, while the next round is drawn
    "round_end 1",  # before the next one is begun
    "harvest 2",  # while drafts that were cut go on
    "validation 3",
    "step 6",  # after a round, whose next one is drawn
]
SELECTED = [
    "harvest 0",  # while the first round is drawn
    "step 1",
    "harvest 2",
    "round_end 2",  # all drawn and selected, nothing trained on
    "step 6",
]
STOPPED = [
    "TERM completion 3",  # while the first round is drawn
    "TERM micro 1",  # in the second optimizer step of a round, between two micro-batches
    "TERM completion 40",
    "TERM step 4",
    "TERM answers 3",  # while the third validation is drawn
    "TERM validation 3",  # in the one that is begun anew
    "TERM last 3",  # in the last prompt of the one that is begun again
    "TERM round_end 3",
    "TERM step 9",  # in the last step of the last round
]
"""Where SIGTERM comes."""
STOPPED_AHEAD = [f"TERM {place}" for place in AHEAD if place != "harvest 2"]
STOPPED_STREAMED = [
    "TERM step 1",
    "TERM round_end 1",  # with gradients that a checkpoint does not hold
    "TERM micro 4",  # while gradients are computed beside the rollout
    "TERM micro 5",
    "TERM step 6",
]
VALIDATING = ("answers", "validation", "last")
AUTOMATIC = [place for place in STOPPED if place.split()[1] not in VALIDATING]


RESUMED = "resumed 5"
"""While completions that another round began are gone on with."""


def run(folder, engine, model, schedule, *places):
    """Figures of a run that nothing stops, and of one that dies at each place and is resumed."""
    process = forked.run(
        resumable_run.runs, str(folder), engine, model, schedule, *places, timeout=600
    )
    assert process.returncode == 0, process.stdout + process.stderr
    whole, resumed = (json.loads(x) for x in process.stdout.splitlines() if x.startswith('{"weig'))
    return whole, resumed


@pytest.mark.parametrize(
    ("engine", "schedule", "places"),
    [
        ("TransformersEngine", "full", PLACES),
        ("TransformersEngine", "on_policy", SORTED),
        ("TransformersEngine", "partial", [*SORTED, RESUMED]),
        ("VLLMEngine", "partial", ["validation 2", RESUMED]),
        ("TransformersEngine", "tail", TAIL),
        ("TransformersEngine", "streamed", STREAMED),
        ("TransformersEngine", "ahead", AHEAD),
        ("TransformersEngine", "ahead streamed", AHEAD),
        ("TransformersEngine", "in flight", AHEAD),
        ("TransformersEngine", "drafts", DRAFTS),
        ("TransformersEngine", "losers go on", LOSERS),
        ("TransformersEngine", "drain", TAIL),
        ("TransformersEngine", "selected", SELECTED),
    ],
)
def test_killed_anywhere_and_resumed_equals_never_stopped(
    engine, schedule, places, tiny_model, tmp_path
):
    whole, resumed = run(tmp_path, engine, tiny_model, schedule, *places)
    assert resumed["weights"] == whole["weights"]
    assert resumed == whole
    assert "vowels" in whole["columns"]
    if schedule == "full":
        assert whole["num_completions"] == whole["rounds"] * 16
        assert len(whole["uids"]) == len(set(whole["uids"])) == whole["rounds"] * 4
        return
    assert len(whole["uids"]) == len(set(whole["uids"]))
    if schedule == "selected":
        dropped, drawn = whole["dropped"], 6 * len(whole["uids"])
        assert whole["num_completions"] == len(whole["spans"]) == drawn - dropped["dropped/stopped"]
        assert dropped["dropped/uninformative"] > 0 and len(whole["uids"]) > 4 * whole["rounds"]
        assert whole["num_discarded_tokens"] > 0
        return
    assert whole["num_completions"] == 3 * len(whole["uids"]) == len(whole["spans"])
    goes_on = schedule in ("partial", "in flight")
    assert (whole["num_discarded_tokens"] > 0) != goes_on
    assert (max(whole["spans"]) > 1) == goes_on
    if schedule in ("drafts", "losers go on", "drain"):
        assert whole["recovered"] > 0 and (whole["drafts"] or schedule == "drain")
    if schedule not in ("on_policy", "partial", "in flight"):
        assert len(whole["uids"]) == 2 * whole["rounds"]
    if schedule in ("tail", "drafts"):
        assert whole["dropped"]["dropped/stopped"] > 0


@pytest.mark.parametrize(
    ("engine", "schedule", "places"),
    [
        ("TransformersEngine", "full", STOPPED),
        ("TransformersEngine", "automatic optimization", AUTOMATIC),
        ("TransformersEngine", "partial", [f"TERM {place}" for place in (*SORTED, RESUMED)]),
        ("TransformersEngine", "ahead importance", STOPPED_AHEAD),
        ("TransformersEngine", "ahead", STOPPED_AHEAD),
        ("TransformersEngine", "ahead streamed", STOPPED_STREAMED),
        ("VLLMEngine", "full", ["TERM completion 40", "TERM answers 3"]),
    ],
)
def test_stopped_anywhere_and_resumed_equals_never_stopped(
    engine, schedule, places, tiny_model, tmp_path
):
    whole, resumed = run(tmp_path, engine, tiny_model, schedule, *places)
    assert resumed["weights"] == whole["weights"]
    assert resumed == whole
    if schedule != "automatic optimization":  # that module does not validate
        steps = [step for step, _ in whole["validations"]]
        assert steps == sorted(set(steps)) and len(steps) >= whole["rounds"] - 1
