"""The benchmark of the papers: completions of given lengths, and its table."""

import pytest
import torch

from benchmarks import results
from benchmarks.papers import child, main
from benchmarks.papers.child import GivenLengths
from benchmarks.papers.rows import ROWS
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.training.block_verification import Trial
from lit_rlsched.training.schedule import RunFacts
from lit_rlsched.types import Completion, Draft, Group, Prompt, Request, Sample, Sampling

LENGTHS = {("p", 0): 3, ("p", 1): 9, ("p", 2): 40}
EOS = tuple(range(1, 9))  # many, so that some are drawn


@pytest.fixture
def engine(tiny_model, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(child, "read_lengths", lambda: LENGTHS)
    engine = GivenLengths()
    engine.start(EngineSpec(tiny_model, 4, 64, EOS))
    yield engine
    engine.close()


def drawn(engine, *requests):
    """Decode to the end; returns the tokens and the last reason of each request."""
    engine.submit(requests)
    found = {request.id: [] for request in requests}
    reasons = {}
    while len(reasons) < len(requests):
        for event in engine.step():
            found[event.request_id] += event.token_ids
            if event.finish_reason:
                reasons[event.request_id] = event.finish_reason
    return {name: (tokens, reasons[name]) for name, tokens in found.items()}


@pytest.mark.slow
def test_completions_have_the_recorded_lengths(engine):
    sampling = Sampling(30)
    requests = [Request(f"p@0/{i}", (10, 11, 12), i, sampling) for i in range(3)]
    got = drawn(engine, *requests)
    assert [(len(tokens), reason) for tokens, reason in got.values()] == [
        (3, "stop"),
        (9, "stop"),
        (30, "length"),
    ]
    # it pauses before its end, is aborted in between, and goes on to its end
    paused = Request("p@0/1", (10, 11, 12), 1, sampling, pause_at=5)
    engine.submit([requests[1]])
    engine.step()
    engine.abort(["p@0/1"])
    tokens, reason = drawn(engine, paused)["p@0/1"]
    assert (len(tokens), reason) == (5, "length")
    rest = Request("p@0/1", (10, 11, 12), 1, sampling, prefix_ids=tokens)
    tokens, reason = drawn(engine, rest)["p@0/1"]
    assert (len(tokens), reason) == (4, "stop")
    assert {*EOS} & {token for tokens, _ in got.values() for token in tokens}


def test_drafts_end_where_completions_do(monkeypatch):
    monkeypatch.setattr(Trial, "become", Trial.become)
    child.drafts_end_at(LENGTHS)
    group = Group("p@0", Prompt("p", "", (10,)), Sampling(30), [])
    for index, tokens, reason in ((0, 2, None), (0, 3, "stop"), (2, 29, None), (2, 30, "length")):
        completion = Completion(index, [1] * tokens)
        draft = Draft([1] * tokens, [0.0] * tokens, [(0, tokens)])
        trial = Trial(Sample(group, completion), draft, torch.zeros(tokens), 0.0)
        trial.become(completion, 7, EOS)
        assert (completion.finish_reason, completion.segments) == (reason, [(7, tokens)])


def test_rows_that_were_measured_are_not_measured_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(main, "MODEL", str(tmp_path))
    ran = []
    monkeypatch.setattr(
        main, "measure", lambda name, seed: ran.append(name) or {"seconds": 4.0, "rounds": []}
    )
    wanted = list(ROWS)[:2]
    for repeats, times in ((1, 1), (1, 1), (2, 2)):
        with results.recording("papers"):
            main.main(["--repeats", str(repeats), "--rows", *wanted])
        assert ran == [name for _ in range(times) for name in wanted]
    with results.recording("papers"):
        main.main(["--repeats", "1", "--rows", wanted[0], "--seed", "1"])
    assert ran[4:] == wanted[:1]
    assert f"| {wanted[0]} | 4.0 ± 0.0 |" in capsys.readouterr().out


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_row_is_a_schedule_that_may_run(row):
    facts = RunFacts(child.data_of(row, 0).run.settings, prompts=child.PROMPTS)
    make_schedule(row.callbacks(), facts)


def test_the_recording_has_each_completion_of_the_rows():
    lengths = child.read_lengths()
    assert {index for _, index in lengths} == set(range(16))
    assert len(lengths) == child.PROMPTS * 16
    assert all(row.generations <= 16 and row.prompts <= child.PROMPTS for row in ROWS.values())
