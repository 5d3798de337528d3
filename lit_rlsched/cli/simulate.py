"""The subcommand `simulate`: what schedules would buy."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_rlsched.callbacks.infinite_sampling import MicroGroupSampling
from lit_rlsched.callbacks.what_if import (
    ALTERNATIVES,
    CONSTRAINTS,
    PLAIN,
    WARM_UP,
    Candidate,
    Setting,
    Simulated,
    about_of,
    beside,
    first,
    left_out,
    measured,
    missing,
    named,
    own_schedule,
    recommended,
)
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines import ProcessEngine, TransformersEngine
from lit_rlsched.module import GRPOModule
from lit_rlsched.run.saving.traces import FACTS
from lit_rlsched.run.switches import facts_from, make_schedule
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError, check_ranges
from lit_rlsched.simulation.choice import rates_of, read_rates, savings
from lit_rlsched.simulation.costs import Costs, calibrated, computed
from lit_rlsched.simulation.peers import PEERS
from lit_rlsched.simulation.pipeline import Machine, Outcome
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.text import counted, parse_bytes, percent, three_digits
from lit_rlsched.training.schedule import RunFacts

DEFAULTS: dict[str, Any] = {
    **{"engine": "VLLMEngine", "slots": 256, "engines": 1, "ranks": 1},
    **{"prompts_per_round": 32, "num_generations": 8, "max_completion_length": 4096},
    **{"steps_per_round": 1, "num_iterations": 1},
}
"""What is neither given nor known from a run."""


def simulate(
    trace: str | None = None,
    lengths: str | None = None,
    constraints: str = "",
    slots: int | None = None,
    engines: int | None = None,
    ranks: int | None = None,
    prompts_per_round: int | None = None,
    num_generations: int | None = None,
    max_completion_length: int | None = None,
    most_callbacks: int = 2,
    rounds: int = 12,
    slowdown: float = 1.0,
    rank_correlation: float = 0.5,
    accepted: float = 0.95,
    seed: int = 0,
    gpu: str | None = None,
    parameters: float | None = None,
    success_rates: str | None = None,
    overlay: str | None = None,
) -> str:
    """Simulate every schedule on the lengths of a run or on others, and recommend one.

    Args:
        trace: Folder of a run: gives the lengths of its newest completions, what its steps cost,
            which schedules `fit` allows for it, and how long its tools have taken.
        lengths: Other lengths: `lognormal:median=400,sigma=1`, or a CSV file with a line for each
            prompt.
        constraints: What the recommended schedule has to keep to, such as
            `on_policy,unbiased,memory=4GiB`: no token of an earlier policy is trained on; short
            completions are not preferred, and none is left out of the update; key-value cache of an
            engine.
        slots: Slots of all engines. By default those of the run, or 256.
        engines: Number of engines. By default that of the run.
        ranks: Number of processes that train. By default that of the run.
        prompts_per_round: Prompts of an update. By default that of the run, or 32.
        num_generations: Completions of a prompt. By default that of the run, or 8.
        max_completion_length: Limit of a completion. By default that of the run, or 4096.
        most_callbacks: Callbacks of ours that are combined.
        rounds: Rounds that are simulated, after a few that do not count.
        slowdown: How much longer engine and trainer take while both work: 1 with devices or cores
            of their own, 2 if they share them.
        rank_correlation: How well lengths are predicted, from 0 to 1.
        accepted: Share of drafts that the next policy accepts whole; of older ones, for each round.
        seed: Seed of lengths from a distribution, and of the order of a run's prompts.
        gpu: Compute what steps cost on this GPU instead of measuring it: `a100`, `h100`, `h200`,
            `b200` or `l40s`; one for each engine and each rank.
        parameters: Parameters of the model for `gpu`, such as 1.5e9.
        success_rates: File with the success rate of each prompt, one on each line, to say what
            `PromptChoice` and `PromptBudget` save. By default the rates of the run, if its rewards
            are 0 and 1.
        overlay: File for the configuration of the recommended schedule.
    """
    sizes = dict(locals())
    check_ranges("simulate", sizes)
    if trace is None and lengths is None:
        raise UsageError(
            "`lit-rlsched simulate` needs lengths. Give `--trace RUN`, the folder of a run, or "
            "`--lengths lognormal:median=400,sigma=1`."
        )
    if (gpu is None) != (parameters is None):
        raise UsageError(
            f"`--gpu {gpu}` with `--parameters {parameters}`: give both, such as `--gpu h100 "
            "--parameters 1.5e9`, or none of them."
        )
    given = {n: v for n, v in sizes.items() if n in DEFAULTS and v is not None}
    traces = None if trace is None else Traces(trace)
    if traces is not None:
        traces.check()
    before = {**DEFAULTS, **(about_of(traces) if traces else {})}
    about = before | given
    newest = None if traces is None else traces.newest(rounds)
    costs = Costs() if newest is None else calibrated(newest)
    more = about["ranks"] / before["ranks"]
    costs = replace(costs, position=costs.position / more, verify=costs.verify / more)
    said = "made-up costs" if trace is None else f"costs fitted to the newest rounds of `{trace}`"
    if gpu is not None and parameters is not None:
        costs = computed(gpu, parameters, about["ranks"], costs)
        said = f"costs computed for {parameters:.3g} parameters on {gpu}, not those of a run"
    machine = Machine(about["slots"], about["engines"], slowdown, rank_correlation, accepted)
    work = _workload(lengths, newest, about, rounds + WARM_UP, seed)
    setting = Setting(about, work, costs, machine, rounds)
    names = [*filter(None, map(str.strip, constraints.split(",")))]
    wanted = _constraints(names, about.get("kv_bytes_per_token"))
    facts = facts_of(about)
    if prompts_per_round is not None:
        facts = replace(facts, prompts=None)  # as of a run with more data
    make_schedule((), beside(facts))  # refuses these sizes, if it does so without a callback
    shape = about["prompts_per_round"], about["num_generations"]
    rates = rates_of(newest) if success_rates is None else read_rates(success_rates)
    if success_rates is None and len(rates or ()) < shape[0]:
        rates = None  # the newest rounds of the run have too few prompts
    saved = [] if rates is None else savings(rates, work.lengths, *shape)
    rows, peers = setting.ours(facts, most_callbacks), setting.peers()
    peers = [replace(row, name=f"{row.name}: {PEERS[row.name].source}") for row in peers]
    plain = next(row.outcome for row in rows if row.name == PLAIN)
    best = recommended(rows, wanted)
    own, took = None, None
    if traces is not None and newest is not None and about == before and not (lengths or gpu):
        own, took = own_schedule(traces, rows), measured(newest)
    text = "" if best is None or best.of is None else _configuration(best.of, about, best is own)
    if overlay is not None and text:
        Path(overlay).write_text(text, encoding="utf-8")
    under = f" under {', '.join(names)}" if names else ""
    where = "" if own is not None else " Its own callbacks, as it has them, are in no row."
    of_run = f"Measured: {three_digits(took or 0)} s a round, the median of the newest.{where}"
    return "\n".join(
        [
            _told_setting(setting, said),
            *([] if took is None else [of_run]),
            *([] if traces is None else missing(setting)),
            "",
            _table(first(rows, best), plain, wanted, own, took),
            "",
            "Rules of other packages, on the same engine:",
            _table(first(peers), plain, wanted),
            "",
            "Not simulated:",
            *left_out(facts),
            *saved,
            "",
            f"Recommended{under}: {best.name}" if best else f"No schedule fits{under}.",
            *([text] if text else []),
        ]
    )


def _configuration(best: Candidate, about: Mapping[str, Any], own: bool) -> str:
    """Return the configuration of a schedule: what the run does not have already."""
    if own:
        return "# the run has this schedule already\n"
    callbacks = about.get("callbacks", ())
    slots, chosen = MicroGroupSampling.__name__, {of.__name__ for of, _ in best.options}
    theirs = [n for n in callbacks if n in ALTERNATIVES and (n != slots or slots in chosen)]
    engine = None if about.get("own_process") else about["engine"]
    text = best.overlay(engine, None if slots in callbacks else about["slots"])
    if not theirs:
        return text
    return f"# in place of the run's {', '.join(theirs)}: remove that from its callbacks\n{text}"


def _constraints(given: Sequence[str], token_bytes: int | None) -> dict[str, float]:
    wanted: dict[str, float] = {}
    for each in given:
        name, _, value = each.partition("=")
        if name == "memory" and value:
            size = parse_bytes(value, "constraints")
            if token_bytes is None:
                raise UsageError(
                    f"`--constraints {each}`: how many bytes a token takes in the cache is known "
                    "from a run only. Give `--trace RUN`."
                )
            wanted[name] = size / token_bytes
        elif each in CONSTRAINTS:
            wanted[each] = 1.0
        else:
            raise UsageError(f"The constraint {each!r} is none of {', '.join(CONSTRAINTS)}.")
    return wanted


def _workload(
    lengths: str | None, traces: Traces | None, about: Mapping[str, Any], rounds: int, seed: int
) -> Workload:
    limit, generations = about["max_completion_length"], about["num_generations"]
    if lengths is None:
        assert traces is not None
        return replace(Workload.of_run(traces).shuffled(seed), limit=limit)
    kind, _, given = lengths.partition(":")
    if kind != "lognormal":
        return Workload.of_file(lengths, limit)
    pairs = (pair.partition("=") for pair in given.split(",") if pair)
    try:
        values = {name: float(value) for name, _, value in pairs}
        inside = values["median"] >= 1 and values["sigma"] >= 0
        inside &= 0 <= values.get("between", 0.0) <= 1
        if not inside or values.keys() - {"median", "sigma", "between"}:
            raise ValueError
    except (ValueError, KeyError):
        raise UsageError(
            f"`--lengths {lengths}`: write `lognormal:median=400,sigma=1`, perhaps with "
            "`,between=0.5`, the share of the variance between prompts. The median is 1 or more."
        ) from None
    prompts = 4 * rounds * about["prompts_per_round"]
    return Workload.lognormal(
        limit=limit, prompts=min(prompts, 50_000), num_generations=generations, seed=seed, **values
    )


def facts_of(about: Mapping[str, Any]) -> RunFacts:
    """Return facts about a run of these sizes, from the traces of a run or of `DEFAULTS`.

    Without facts there it is a run of `GRPOModule` whose engine has its own process.
    """
    about = {**DEFAULTS, **about}
    settings = DEFAULTS.keys() - {"engine", "slots", "engines", "ranks"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = RolloutDataModule(
            [{"prompt": "?"}],
            lambda **_: [0.0],
            engine=ProcessEngine(TransformersEngine()),
            **{name: about[name] for name in settings},
        )
        if FACTS in about:
            return facts_from(about[FACTS], data.run.settings)
        advantage: Any = about.get("advantage") or "group"
        module: Any = GRPOModule(str(about.get("model")), advantage=advantage)
    return RunFacts(data.run.settings, learner=module, module=module.hparams)


def _told_setting(setting: Setting, costs: str) -> str:
    """Return the setting in words, and what the columns of the table mean."""
    about, of = setting.about, setting.machine
    every = sorted(n for group in setting.work.lengths for n in group)
    sizes = f"{about['prompts_per_round']} prompts x {about['num_generations']} completions"
    apart = "have devices or cores of their own"
    fits = [
        f"{fit.name.capitalize()}: seconds off by {percent(fit.error)} in the median round, "
        f"{percent(fit.worst)} in the worst"
        + ("." if fit.fits else ": it does not fit, so expect such errors below.")
        for fit in setting.costs.fits
        if not math.isnan(fit.error)
    ]
    if of.slowdown != 1:
        apart = f"take {of.slowdown:.3g} times as long while both work"
    lines = [
        f"Simulated: {setting.rounds} rounds of {sizes}, {counted(of.engines, 'engine')} with "
        f"{of.slots} slots, lengths up to {min(every[-1], setting.work.limit):,} (median "
        f"{every[len(every) // 2]:,}), {costs}.",
        *fits,
        f"Engine and trainer {apart}.",
        "seconds, steps: for each update's worth of prompts. x: times as fast as without a "
        "callback. age, oldest: mean and largest age of trained tokens, in rounds. length: trained "
        "over drawn. cache: most tokens in an engine's key-value cache.",
    ]
    return "\n".join(lines)


def _table(
    rows: Sequence[Simulated],
    plain: Outcome,
    wanted: Mapping[str, float],
    own: Simulated | None = None,
    took: float | None = None,
) -> str:
    lines = ["  seconds      x    steps   idle discarded   age oldest  length     cache  schedule"]
    for row in rows:
        of = row.outcome
        lines.append(
            f"{three_digits(of.seconds):>9} {plain.seconds / of.seconds:6.2f} "
            f"{of.decode_steps:8,.0f} {percent(of.idle_share):>6} "
            f"{percent(of.discarded_share):>9} {of.age:5.2f} {of.oldest:6g} "
            f"{of.length_bias:7.2f} {of.peak_kv:9,}  {named(row, own, took)}"
            f"{'  (breaks a constraint)' if row.refused(wanted) else ''}"
        )
    return "\n".join(lines)
