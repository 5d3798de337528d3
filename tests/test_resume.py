"""Kill a run with SIGKILL wherever it hurts, resume it, and compare with a run never stopped.

`test_resume_simulated.py` stops every schedule anywhere, without processes and weights.
"""

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
KILLED = {
    "partial": "resumed 5",  # while completions that another round began are gone on with
    "streamed": "third 2",  # the same, and some gradients are there
    "window overtaking": "step 2",  # at the start of the update of a round that went on from them
    "async": "step 6",  # after a round, whose next one is drawn
    "tracker": "step 5",  # after a round that has changed what prompts are chosen by
    "selected": "round_end 2",  # all drawn and selected, nothing trained on
}
"""Where some other schedules are killed; the simulated engine tries all of them."""
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
        ("VLLMEngine", "partial", [KILLED["partial"]]),
        *(("TransformersEngine", name, [KILLED[name]]) for name in KILLED if name != "partial"),
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
    size = 1 if schedule == "tracker" else 3
    assert whole["num_completions"] == size * len(whole["uids"]) == len(whole["spans"])
    # in `async` tokens that would get too old are verified
    assert (whole["num_discarded_tokens"] > 0) == (schedule not in ("partial", "tracker"))
    assert (max(whole["spans"]) > 1) == (schedule in ("partial", "async", "tracker"))
    if schedule == "window overtaking":
        assert whole["recovered"] > 0 and whole["drafts"]
    if schedule not in ("partial", "tracker"):
        assert len(whole["uids"]) == 2 * whole["rounds"]


@pytest.mark.parametrize(
    ("engine", "schedule", "places"),
    [
        ("TransformersEngine", "full", STOPPED),
        ("VLLMEngine", "full", ["TERM completion 40"]),
        ("TransformersEngine", "automatic optimization", ["TERM micro 1"]),
        ("TransformersEngine", "window streamed", ["TERM micro 4"]),  # beside the rollout
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
