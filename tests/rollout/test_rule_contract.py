"""What every rule of rounds owes: the same tests run against all, whatever a round meets."""

import copy
import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ruled_rounds import ADMISSIONS, SEED, Case, Run, Stopped, blank, changed, plain

from lit_rlsched.engines.sampling import counter_uniform
from lit_rlsched.rollout.requests import completion_seed
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import PATIENCE, TailRound
from lit_rlsched.types import Completion

few = settings(max_examples=settings.default.max_examples // 2)  # of each rule
updates = st.integers(1, 5)
ratios = st.just(1.0) | st.floats(1, 3)


@st.composite
def whole_rounds(draw, size):
    return partial(FullRound, draw(updates))


@st.composite
def sorted_rounds(draw, size, mode):
    update = draw(updates)
    return partial(
        SortedRound,
        update,
        draw(st.integers(update, 12)),
        size,
        draw(st.sampled_from(["group", "completion"])),
        mode,
        draw(st.none() | st.integers(1, 3)) if mode == "partial" else None,
        draw(st.none() | st.floats(1, 3)),
    )


@st.composite
def tail_rounds(draw, size):
    how = {"patience": PATIENCE}
    update = draw(updates)
    if update > 1 and draw(st.booleans()):
        n = draw(st.integers(1, update - 1))
        how["shares"] = {"a": n / update, "b": 1 - n / update}
    return partial(TailRound, update, size, draw(st.floats(1, 3)), draw(ratios), **how)


@st.composite
def windows(draw, size, reorders, age=0):
    update = draw(updates)
    prompts = draw(st.integers(update + reorders, 3 * update + reorders))
    overtakes = draw(st.sampled_from([1, 2, 7, 10**9])) if reorders else 0
    how = {"max_staleness": age, "verifies_from": age or 1} if age != 0 else {}
    return partial(WindowRound, update, prompts, overtakes, **how)


RULES = {
    "whole": whole_rounds,
    "sorted": partial(sorted_rounds, mode="on_policy"),
    "sorted partial": partial(sorted_rounds, mode="partial"),
    "tail": tail_rounds,
    "window": partial(windows, reorders=False),
    "window overtaking": partial(windows, reorders=True),
    "window of an age": partial(windows, reorders=True, age=2),
}
NOT_REPLACED = ("sorted", "window ")
every_rule = pytest.mark.parametrize("name", RULES)


@st.composite
def cases(draw, name, **fixed):
    size = draw(st.integers(1, 3))
    make = draw(RULES[name](size))
    admission = draw(st.sampled_from([*ADMISSIONS]))
    domains = "ab" if "shares" in make.keywords else ""
    drawn = {
        "domains": domains,
        "slots": draw(st.integers(1, 40)),
        "engines": draw(st.sampled_from([1, 1, 2])),
        "admission": admission,
        "stream": draw(st.booleans()),
        "key": draw(st.sampled_from(["id", "seed"])),
        "seed_domain": draw(st.integers(0, 2**32)),
        "spare": draw(st.integers(0, 6)),
        "latency": draw(st.integers(0, 12)),
        "whole": draw(st.sampled_from([0, 8])),
        "useless": 0 if name.startswith(NOT_REPLACED) else draw(st.sampled_from([0, 0, 2, 3])),
        "bad": draw(st.sampled_from([0, 0, 3])),
        # completions are selected from whole groups
        "stops": not ({"completion"} & {*make.args} or name.startswith("window "))
        and draw(st.booleans()),
    }
    return Case(make, size, **{**drawn, **fixed})


# What is trained on.


@every_rule
@few
@given(st.data())
def test_every_completion_is_trained_on_once_a_pass(name, data):
    """Nothing is lost, and nothing comes twice."""
    run = Run(data.draw(cases(name)))
    trained, seen = [], set()
    for r in run.each():
        trained += [(g.id, c.index) for g in r.trained for c in g.completions]
        seen |= {*r.planned, *(g.id for g in run.pool)}
        assert len(trained) == len(set(trained))
        waiting = {(g.id, c.index) for g in run.pool for c in g.completions}
        assert not waiting & set(trained)
        assert {group for group, _ in (*trained, *waiting)} == seen
        uids = [g.prompt.uid for g in run.pool]
        assert len(uids) == len(set(uids)), "two completions would share their noise"
    for source in run.pool.source.sources.values():
        uids = {prompt.uid for prompt in source.prompts}
        late = [f"{source.prompts[i].uid}@{n}" for i, n in source.state_dict()["deferred"]]
        for n in range(source.epoch):  # a pass that is over
            ids = {f"{uid}@{n}" for uid in uids}
            assert sorted(x for x in (*seen, *late) if x in ids) == sorted(ids)


@every_rule
@few
@given(st.data())
def test_an_update_is_whole(name, data):
    """As large as it must be, of completions that are done, each in its place."""
    case = data.draw(cases(name))
    run, update = Run(case), case.rule.update_prompts
    launched = range(case.rule.launched(case.size))
    alone = getattr(case.rule, "unit", "group") == "completion"
    drafts = case.rule.verifies_from is not None  # what verifies them drops those
    for r in run.each():
        done = r.useful if "tail" in name else r.trained
        done = len(r.completions) / case.size if alone else len(done)
        rest = r.left if case.bad else [*run.pool]
        assert done >= update or not rest or case.useless or (case.bad and case.domains)
        assert alone or len(r.planned) <= 3 * update + case.rule.most_prompts()
        if name == "whole" and not case.bad:
            most = min(3 * update, len(run.prompts))  # then nothing is replaced any more
            assert len(r.useful) == update or (case.useless and len(r.planned) == most)
        order = {group: i for i, group in enumerate(r.planned)}
        for groups in (r.trained, r.left):
            assert sorted(groups, key=lambda g: order[g.id]) == groups
        # what lost is whole again, whatever had stopped of it
        assert all(len(g.completions) == case.size for g in r.left if g.deferred)
        for g in r.trained:
            places = [c.index for c in g.completions]
            assert places == sorted(set(places)) and set(places) <= set(launched)
            assert len(places) == case.size or alone or case.stops or case.bad
        for c in r.completions:
            assert c.finished and c.scored and c.draft is None
            assert len(c.token_ids) == len(c.logprobs) == sum(n for _, n in c.segments) > 0
            assert (c.finish_reason == "stop") == (c.token_ids[-1] == 1)
            assert c.finish_reason == "stop" or len(c.token_ids) == case.limit
            finite = all(map(math.isfinite, c.logprobs))
            assert c.dropped in (None, "nonfinite_logprob", "uninformative")
            assert not finite if c.dropped == "nonfinite_logprob" else c.dropped or finite or drafts
            assert c.dropped != "uninformative" or case.useless
        # the hook has seen every group that is trained on to its end, and no group twice
        assert len(r.ended) == len(set(r.ended)) and set(r.ended) <= set(r.planned)
        assert {g.id for g in r.trained} - {g.id for g in r.left} <= set(r.ended)
        assert r.metrics["rollout/pool_prompts"] == len(run.pool)
        if "window" in name or ("sorted" in name and not alone):  # and none that goes on
            assert {*r.ended} == {g.id for g in r.trained}


@every_rule
@few
@given(st.data())
def test_every_token_is_trained_on_or_counted(name, data):
    run = Run(data.draw(cases(name)))
    drawn, trained, discarded, rounds = 0, 0, 0, 0
    for r in run.each():
        drawn += r.trace.tokens + r.replaced
        trained += sum(r.lengths)
        discarded += r.round_result.discarded_tokens
        assert drawn == trained + discarded + run.pool.tokens
        rounds += 1
        if "pool/rounds" in r.metrics:
            assert r.metrics["pool/rounds"] == rounds
            assert 0 <= r.metrics["pool/useful_token_share"] <= 1
            rounds = 0
    assert run.pool._audit.rounds == rounds


@every_rule
@few
@given(st.data())
def test_every_token_is_of_the_version_that_it_says(name, data):
    """And none is older than the rule allows."""
    case = data.draw(cases(name, bad=0))
    run, most = Run(case), case.rule.max_staleness
    for r in run.each():
        for g in [*r.trained, *r.left]:
            for c in g.completions:
                versions = [version for version, _ in c.segments]
                assert versions == sorted(set(versions))
                assert most is None or g not in r.trained or c.staleness(r.version) <= most
                start = 0
                for version, tokens in c.segments:
                    kept = run.kept.get((g.id, c.index, version), 0)
                    so_far = Completion(c.index, c.token_ids[: start + kept])
                    seed = completion_seed(SEED, g, so_far, version)
                    places = torch.arange(start + kept, start + tokens)
                    noise = counter_uniform(torch.tensor(seed), places).numpy()
                    assert list(c.logprobs[start : start + tokens])[kept:] == (
                        np.log1p(-noise).tolist()
                    )
                    start += tokens
        left = [c for g in r.left for c in g.completions]
        if run.rule.verifies_from == 1:
            assert all(c.segments in ([], [(r.version, len(c.token_ids))]) for c in left)
        elif most == 0:
            assert all(c == blank(c) for c in left)


@pytest.mark.parametrize("name", [name for name in RULES if "window" in name])
@few
@given(st.data())
def test_what_is_old_is_verified_once_a_round(name, data):
    run, verified = Run(data.draw(cases(name))), 0
    for _ in range(8):
        before, age = [*run.pool], run.rule.verifies_from
        old = {
            (g.id, c.index, tuple(v for v, _ in c.segments))
            for g in before[: run.rule.prompts]
            for c in g.completions
            if c.staleness(run.version) >= age
        }
        run.round()
        assert run.verified.keys() >= old and run.verified.total() == verified + len(old)
        verified = run.verified.total()
    assert {*run.verified.values()} <= {1}, "each time under newer weights"


@pytest.mark.parametrize("name", ["window"])
@few
@given(st.data())
def test_what_waits_changes_nothing_of_a_round(name, data):
    """Nothing that its completions say, nor whether there are any."""
    case = data.draw(cases(name, admission="fifo", engines=1, useless=0, bad=0))
    n, run = case.rule.update_prompts, Run(case)
    r, alone = run.round(), Run(case, WindowRound(n, n, 0)).round()
    assert [c for g in r.trained for c in g.completions] == alone.completions
    assert r.trace.decode_steps == alone.trace.decode_steps
    assert not any(c.scored for g in r.left for c in g.completions)


@every_rule
@few
@given(st.data())
def test_a_slot_is_free_only_if_nothing_waits(name, data):
    case = data.draw(cases(name, engines=1, admission="fifo", useless=0))
    for r in Run(case).each():
        assert max(r.trace.steps["running"], default=0) <= case.slots
        step, last = 0, max(r.trace.spans["start_step"], default=0)
        columns = (r.trace.steps[n] for n in ("running", "decode_steps"))
        for running, jump in zip(*columns, strict=True):
            assert running == case.slots or last <= step
            step += jump


# What must not matter.


@pytest.mark.mostly_slow("window", "tail", "sorted partial")
@every_rule
@few
@given(st.data(), st.integers(1, 4))
def test_how_an_engine_tells_does_not_matter(name, data, max_jump):
    case = data.draw(cases(name))
    if case.admission == "budget":  # what a request may still take is known by its events
        case = changed(case, stream=True)
    twin = Run(changed(case, stream=True, max_jump=max_jump))
    for r, other in zip(Run(case).rounds(6), twin.rounds(6), strict=True):
        assert r.result == other.result and r.steps == other.steps
        assert r.trace.decode_steps == other.trace.decode_steps


@every_rule
@few
@given(st.data(), st.integers(0, 30), st.integers(1, 3))
def test_how_long_scores_take_does_not_matter(name, data, latency, haste):
    case = data.draw(cases(name))
    twin = Run(changed(case, latency=latency, haste=haste))
    for r, other in zip(Run(case).rounds(6), twin.rounds(6), strict=True):
        assert r.result == other.result and r.steps == other.steps


OFF = {
    "sorted": lambda n, size: SortedRound(n, n, size),
    "sorted partial": lambda n, size: SortedRound(n, n, size, mode="partial"),
    "sorted completions": lambda n, size: SortedRound(n, n, size, "completion", "partial"),
    "tail": lambda n, size: TailRound(n, size, 1.0),
    "window": lambda n, size: WindowRound(n, n, 0),
    "window overtaking": lambda n, size: WindowRound(n, n, 3 * n),
}


@pytest.mark.parametrize("off", OFF.values(), ids=OFF)
@few
@given(st.data())
def test_a_rule_that_is_off_is_the_plain_round(off, data):
    case = data.draw(cases("whole", useless=0))
    run = Run(case, off(case.rule.update_prompts, case.size))
    for r, other in zip(run.rounds(6), plain(case).rounds(6), strict=True):
        assert r.result == other.result and not r.left
        assert r.trace.spans == other.trace.spans
        assert sorted(r.ended) == sorted(other.ended)


# Stopping and going on.


@pytest.mark.mostly_slow("window", "tail", "sorted partial")
@every_rule
@few
@given(st.data(), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=5))
def test_a_round_cut_short_is_drawn_again_as_a_whole(name, data, stops):
    """Whether the engine fails or the trainer, and with what had replaced others by then."""
    fixed = {"useless": 2, "stream": True} if name == "whole" else {}
    case = data.draw(cases(name, **fixed))
    run, twin = Run(case), Run(case)
    for stop in [*stops, None]:
        if stop is not None:
            run.pool.plan(run.rule)  # draws what is to be drawn
            before, of_trainer, count = copy.deepcopy([*run.pool]), *stop
            run.stop_after(math.inf if of_trainer else count)
            try:
                run.round(stop_at_group=count if of_trainer else None)
            except Stopped:
                assert of_trainer or run.idle
                assert [*run.pool][: len(before)] == before
                more = [*run.pool][len(before) :]  # replacements
                assert case.useless or not more
            else:  # it was over before
                twin.round()
            run.stop_after(math.inf)
        again, expected = run.round(), twin.round()
        assert again.result == expected.result and [*run.pool] == [*twin.pool]
        assert again.steps == expected.steps


@pytest.mark.mostly_slow("window", "tail", "sorted partial")
@every_rule
@few
@given(st.data())
def test_a_run_goes_on_after_a_checkpoint(name, data):
    case = data.draw(cases(name))
    run, rounds = Run(case), Run(case).rounds(6)
    for expected in rounds:
        r = run.round()
        assert r.result == expected.result
        figures = {k: v for k, v in expected.metrics.items() if k.startswith("pool/")}
        got = {k: v for k, v in r.metrics.items() if k.startswith("pool/")}
        assert got == pytest.approx(figures, abs=1e-9)  # another clock rounds otherwise
        file = io.BytesIO()
        torch.save(run.pool.state_dict(), file)
        file.seek(0)
        resumed = run.resumed(torch.load(file, weights_only=True))
        assert [*resumed.pool] == [*run.pool]
        run = resumed


@every_rule
@few
@given(st.data())
def test_another_trainer_draws_other_noise(name, data):
    """Versions begin again at 0, so what was drawn under them is thrown away."""
    run = Run(data.draw(cases(name)))
    run.rounds(3)
    left = [(g.id, c.index) for g in run.pool for c in g.completions]
    drawn = {(g.id, c.index): c.token_ids for g in run.pool for c in g.completions}
    tokens = run.pool.tokens
    assert run.pool.leave_run() == tokens and not run.pool.tokens
    assert [(g.id, c.index) for g in run.pool for c in g.completions] == left
    run.version, run.kept = 0, {}
    for r in run.rounds(2):
        for g in r.trained:
            for c in g.completions:
                before = drawn.get((g.id, c.index), ())
                assert len(before) < 8 or c.token_ids[: len(before)] != before
