"""The command `simulate`."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from lit_rlsched.callbacks import AsyncRollout, MicroGroupSampling, TailBatching
from lit_rlsched.callbacks.what_if import (
    PLAIN,
    Simulated,
    candidates,
    own_schedule,
    recommended,
)
from lit_rlsched.cli.main import main
from lit_rlsched.cli.simulate import DEFAULTS, facts_of, simulate
from lit_rlsched.run.saving.traces import described
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.scheduling.trace_files import TraceWriter
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.choice import CHOICES, PILOT, tokens_per_signal
from lit_rlsched.simulation.costs import Costs
from lit_rlsched.simulation.peers import PEERS
from lit_rlsched.simulation.pipeline import Machine, Pipeline
from lit_rlsched.simulation.workload import Workload

SMALL = {"prompts_per_round": 4, "num_generations": 2, "slots": 4, "rounds": 4}
EIGHT = SMALL | {"num_generations": 8}
HOW = ("verify", "wait")
LENGTHS = "lognormal:median=20,sigma=1"


def test_every_callback_and_every_peer_has_a_row_and_the_best_is_recommended(tmp_path):
    overlay = tmp_path / "schedule.yaml"
    said = simulate(lengths=LENGTHS, max_completion_length=200, **SMALL, overlay=overlay)
    of_age = [f"AsyncRollout(max_staleness={n}, too_old={how!r})" for n in (1, 2, 3) for how in HOW]
    for name in (PLAIN, "SortedBatching(mode='partial')", "RolloutWindow(overtake=1)", *of_age):
        assert f"  {name}\n" in said
    assert all(f"  {name}: {peer.source}\n" in said for name, peer in PEERS.items())
    assert "\nDynamicSampling(), PromptChoice(): it depends on rewards;" in said
    best = said.partition("Recommended: ")[2].partition("\n")[0]
    config = yaml.safe_load(overlay.read_text())
    first, *names = [each["class_path"] for each in config["trainer"]["callbacks+"]]
    assert first == "MicroGroupSampling"  # with the slots that were simulated
    assert names == [part.partition("(")[0] for part in best.split(" + ")]
    assert "made-up costs" in said


def test_what_is_recommended_keeps_to_the_constraints():
    free = simulate(lengths=LENGTHS, **SMALL)
    policy = simulate(lengths=LENGTHS, **SMALL, constraints="on_policy, unbiased")
    fastest = free.partition("Recommended: ")[2].partition("\n")[0]
    assert f"  {fastest}  (breaks a constraint)\n" in policy
    best = policy.partition("Recommended under on_policy, unbiased: ")[2].partition("\n")[0]
    assert best and not any(name in best for name in ("Async", "partial", "Tail", "DownSampling"))
    row = next(line for line in policy.splitlines() if line.endswith(f"  {best}"))
    assert row.split()[7:9] == ["0.00", "0"] and "breaks" not in row


def test_of_equals_the_simplest_is_recommended():
    facts = facts_of({**DEFAULTS, **{k: v for k, v in SMALL.items() if k in DEFAULTS}})
    work = Workload([[5, 5]] * 40, [3] * 40, 9)  # nothing to gain by any order
    rows = [
        Simulated(c.name, c.schedule, Pipeline(c.schedule, work, Costs(), Machine(8), 2).run(4), c)
        for c in candidates(facts)
        if not (c.schedule.beside_update or c.schedule.selection or c.schedule.streaming)
    ]
    assert recommended(rows, {}).name == PLAIN
    assert recommended(rows, {"memory": 0}) is None


class WithRounds(SimpleNamespace):
    """Traces of a run with these callbacks."""

    def rows(self, name):
        return [{"switches": [json.dumps(described(of)) for of in self.callbacks]}]


@pytest.mark.parametrize(
    ("callbacks", "wanted"),
    [
        ([], PLAIN),
        ([MicroGroupSampling(slots=6)], PLAIN),
        ([MicroGroupSampling(slots=6, refill="rounds")], None),
        ([MicroGroupSampling(slots=6), TailBatching()], "TailBatching()"),
        ([TailBatching(prompt_ratio=3.0)], None),  # not simulated
        ([AsyncRollout()], "AsyncRollout(max_staleness=2, too_old='verify')"),
        ([AsyncRollout(1, too_old="wait")], "AsyncRollout(max_staleness=1, too_old='wait')"),
        ([MicroGroupSampling(memory_budget="1GiB")], None),
    ],
)
def test_the_schedule_of_the_run_itself_is_found(callbacks, wanted):
    rows = [Simulated(c.name, c.schedule, None, c) for c in candidates(facts_of(DEFAULTS), 1)]
    found = own_schedule(WithRounds(callbacks=callbacks), rows)
    assert found is None if wanted is None else wanted in found.name


@pytest.mark.parametrize("slowdown", [0.0, 0.5])
def test_nothing_is_faster_for_work_beside_it(slowdown):
    with pytest.raises(UsageError, match=r"`simulate\(slowdown=.*use 1 or more"):
        simulate(lengths=LENGTHS, **SMALL, slowdown=slowdown)


def test_pairs_that_are_refused_are_no_candidates():
    names = [c.name for c in candidates(facts_of(DEFAULTS))]
    assert len(names) == len({*names}) > 15 and names[0] == PLAIN
    assert not [name for name in names if "SortedBatching" in name and "TailBatching" in name]


def test_candidates_are_made_again_from_their_overlays():
    facts = facts_of(DEFAULTS)
    for candidate in candidates(facts, most=1):
        again = make_schedule(candidate.callbacks(), facts)
        assert type(again.rule) is type(candidate.schedule.rule)
        config = yaml.safe_load(candidate.overlay("VLLMEngine")) or {}
        given = config.get("trainer", {}).get("callbacks+", [])
        assert [each.get("init_args", {}) for each in given] == [a for _, a in candidate.options]
        assert ("data" in config) == bool(candidate.schedule.beside_update)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "needs lengths"),
        ({"lengths": "lognormal:sigma=1"}, "write `lognormal:median=400,sigma=1`"),
        ({"lengths": "lognormal:median=0,sigma=1"}, "median is 1 or more"),
        ({"lengths": "lognormal:median=9,sigma=1,between=2"}, "between"),
        ({"lengths": "lognormal:median=many,sigma=1"}, "write `lognormal"),
        ({"lengths": "none.csv"}, "`none.csv` cannot be read"),
        ({"lengths": LENGTHS, "constraints": "quick"}, "none of on_policy, unbiased"),
        ({"lengths": LENGTHS, "constraints": "memory=1GiB"}, "from a run only"),
        ({"lengths": LENGTHS, "slots": 0}, "slots"),
        ({"lengths": LENGTHS, "slots": 5, "engines": 2}, "cannot be divided among 2 engines"),
        ({"trace": "."}, "holds no traces"),
        ({"lengths": LENGTHS, "gpu": "h100"}, "`--gpu h100` with `--parameters None`: give both"),
        ({"lengths": LENGTHS, "parameters": 1e9}, "`--gpu None` with `--parameters 1000000000.0`"),
        ({"lengths": LENGTHS, "gpu": "h10", "parameters": 1e9}, "not known. Did you mean `h100`"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, why):
    with pytest.raises(UsageError, match=why):
        simulate(**arguments)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no prompt"),
        ("3,0,2\n", r"line 1: '3,0,2' has not only lengths \(a length is 0\)"),
        ("4,5\n\n6,long\n", r"line 3: '6,long' has not only lengths \(.*'long'\)"),
        *((cell, "line 1: ") for cell in ("4.5", "nan", "inf", "1e300", "1;2", "0x10", "-1")),
        (f"{10**20}", "line 1: "),
        ("\x00\xff", "not only lengths"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_used(tmp_path, text, why):
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=why):
        Workload.of_file(path)


def test_a_file_of_lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("3, 4,\n\n5,600\n", encoding="utf-8-sig")
    work = Workload.of_file(path)
    assert work.lengths == [[3, 4], [5, 600]] and work.limit == 600
    assert "lengths up to 500 (median 5)" in simulate(
        lengths=str(path), max_completion_length=500, **SMALL
    )


def test_traces_without_a_completion_are_refused(tmp_path, capsys):
    TraceWriter(tmp_path / "traces").begin(1, {"reward_workers": 1})
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--trace", str(tmp_path)])
    assert stop.value.code == 2 and "no decode steps" in capsys.readouterr().err


def test_what_a_choice_of_prompts_saves(tmp_path):
    """Of plain and budgeted prompts by their definition; those that are chosen are better."""
    rates = np.array([0.0, 0.02, 0.1, 0.5, 0.9, 1.0] * 20)
    lengths, size = [[3, 5]], 8
    found = {
        name: tokens_per_signal(rates, lengths, 6, size, 400, how) for name, how in CHOICES.items()
    }
    plain, budget, skip, chosen, both = found.values()

    def differs(n):
        return 1 - rates**n - (1 - rates) ** n

    assert plain == pytest.approx(4 * size / differs(size).mean(), rel=0.05)
    drawn = PILOT + (size - PILOT) * differs(PILOT)
    assert budget == pytest.approx(4 * drawn.mean() / differs(PILOT).mean(), rel=0.05)
    assert chosen < 0.7 * plain and skip < 0.9 * plain and both < budget
    file = tmp_path / "rates"
    file.write_text("\n".join(map(str, rates)))
    said = simulate(lengths=LENGTHS, success_rates=str(file), **EIGHT)
    assert "Tokens for a group with a signal, with the success rates of 120 prompts:" in said
    assert all(f"  {name}\n" in said for name in CHOICES)
    for text, why in (("", "from 0 to 1"), ("1.5", "from 0 to 1"), ("a", "could not convert")):
        file.write_text(text)
        with pytest.raises(UsageError, match=f"--success_rates .*{why}"):
            simulate(lengths=LENGTHS, success_rates=str(file), **EIGHT)
    file.write_text("0.5")
    with pytest.raises(UsageError, match="success rates of 1 prompts"):
        simulate(lengths=LENGTHS, success_rates=str(file), **EIGHT)
