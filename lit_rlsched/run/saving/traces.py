"""What a run leaves for `lit-rlsched simulate` and its report: rows of each round."""

import json
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from lit_rlsched.data.rows import name_of
from lit_rlsched.run.saving.resuming import SIZES
from lit_rlsched.run.switches import recorded
from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.scheduling.timeline import Interval, Lap
from lit_rlsched.settings import plain
from lit_rlsched.training.round import Round, reward_matrix
from lit_rlsched.training.schedule import Switch
from lit_rlsched.types import ENVIRONMENT, LengthOnly, Sample

if TYPE_CHECKING:
    import pyarrow as pa


FACTS = "facts"
"""What of a run decides which schedules `fit` refuses."""


def about_run(run: TrainingRun) -> dict[str, Any]:
    """Return what holds for all rounds of a run, for `TraceWriter.begin`."""
    settings, session = run.settings, run.session
    cache = None if session is None else run.startup.cache_bytes_per_token(session.spec)
    engine = settings.engine.engines[0]
    about = {
        "model": run.facts.module.get("model"),
        "train_data": name_of(settings.data["train"]),
        "advantage": run.facts.module.get("advantage"),
        "tokenizer": settings.tokenizer,
        "engine": type(getattr(engine, "engine", engine)).__name__,
        "own_process": settings.engine.decodes_by_itself,
        "kv_bytes_per_token": cache,
        "engines": len(settings.engine.engines),
        "ranks": run.facts.ranks,
        **{name: getattr(settings, name) for name in SIZES},
        "max_completion_length": settings.sampling.max_completion_length,
        "reward_workers": settings.rewards.num_workers,
        "reward_funcs": settings.rewards.names,
        "async_rewards": settings.rewards.has_async,
    }
    return {**{name: plain(value) for name, value in about.items()}, FACTS: recorded(run.facts)}


def tables_of(run: TrainingRun, round: Round, switches: Sequence[Switch]) -> "dict[str, pa.Table]":
    """Return the rows of a round that was drawn, by table."""
    import pyarrow as pa

    clock, timeline = run.clock.at, run.timeline
    tables = {"completions": pa.Table.from_pylist(_completions(run, round))}
    of_round = {
        "version": round.version,
        "clock": run.clock.seconds,
        "began": None,
        "slots": 0,
        "switches": [json.dumps(described(switch)) for switch in switches],
        "metrics": [(name, float(value)) for name, value in round.metrics.items()],
    }
    if (trace := round.trace) is not None:
        tables |= trace.tables()
        of_round["slots"] = trace.slots
        if run.session is not None and run.session.engine.virtual_clock:
            del tables["steps"]  # their seconds are made up
        elif trace.origin is not None:
            began = clock(trace.origin)
            if run.clock.before <= began <= run.clock.seconds:  # not of a resumed run's checkpoint
                of_round["began"] = began
    if timeline is not None and timeline.last is not None:
        tables["intervals"] = intervals(timeline.last, clock)
    tables["rounds"] = pa.Table.from_pylist([of_round], rounds_schema())
    return tables


def _completions(run: TrainingRun, round: Round) -> list[dict[str, Any]]:
    rewards = reward_matrix(round.groups, run.settings.rewards.weights).tolist()
    return [
        {
            "request": Sample(group, completion).id,
            "uid": group.prompt.uid,
            "prompt_tokens": len(group.prompt.token_ids),
            "tokens": len(ids),
            "drawn": completion.drawn,
            "version": next((v for v, _ in completion.segments if v != ENVIRONMENT), None),
            "reward": of[completion.index],
            "advantage": completion.advantage,
            "reward_seconds": completion.reward_seconds,
            "waited": completion.waited,
            "turns": [-n if by == ENVIRONMENT else n for by, n in completion.segments],
            "tool_seconds": completion.tool_seconds,
            "deferred": group.deferred,
            "attempts": completion.attempts,
            "fate": completion.dropped or completion.finish_reason,
            "text": None if isinstance(ids, LengthOnly) else crc32(array("i", ids)),
        }
        for group, of in zip(round.groups, rewards, strict=True)
        for completion in group.completions
        for ids in [completion.token_ids]
    ]


def described(switch: Switch) -> dict[str, Any]:
    """Return a callback as in a configuration file."""
    return {"class_path": type(switch).__name__, "init_args": getattr(switch, "init_args", {})}


def rounds_schema() -> "pa.Schema":
    """Types of a round's row; `metrics` is a map, as rounds may differ in what they have."""
    import pyarrow as pa

    return pa.schema(
        {
            "version": pa.int64(),
            "clock": pa.float64(),
            "began": pa.float64(),
            "slots": pa.int64(),
            "switches": pa.list_(pa.string()),
            "metrics": pa.map_(pa.string(), pa.float64()),
        }
    )


def intervals(lap: Lap, clock: Callable[[float], float]) -> "pa.Table":
    """Return the intervals of all lanes, in seconds of the run's clock."""
    import pyarrow as pa

    rows = [row for lane in lap.values() for row in lane]
    shown = [row._replace(start=clock(row.start), end=clock(row.end))._asdict() for row in rows]
    types = (pa.string(), pa.string(), pa.float64(), pa.float64(), pa.string())
    return pa.Table.from_pylist(shown, pa.schema(zip(Interval._fields, types, strict=True)))
