"""What a checkpoint holds of a run besides weights and optimizer, and how a run goes on from it.

1. `run_state`: the position in the data, the pool, the round that is trained on, counters.
2. `check_run_state`: what was saved fits the settings of the run that resumes.
3. `restore`: once prompts are tokenised, the run has the state.
"""

import time
from collections import Counter
from typing import Any

from lit_rlsched import __version__
from lit_rlsched.data.rows import name_of
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.run.position import RunPosition
from lit_rlsched.run.same_ranks import check_same_checkpoint
from lit_rlsched.run.saving.checkpoints import CheckpointError
from lit_rlsched.run.saving.resuming import (
    FORMAT,
    SAME_ON_RESUME,
    check_drawn,
    check_state,
    check_whole_groups,
)
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunSettings


def _same(settings: RunSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in SAME_ON_RESUME}


def run_state(run: RunPosition) -> dict[str, Any]:
    """Return the state of a run, as primitives and tensors."""
    if run.resumed is not None:  # at most a validation since it was loaded
        return run.resumed | {"record": run.record.state_dict()}
    over, counters, saved = run.round_is_over, run.counters, None
    if over:
        counters = counters + run.untrained(run.cursor(), "limit_train_batches")
    elif run.current is not None:
        saved = run.current.state_dict()
    return {
        **{"format": FORMAT, "version": __version__, "unix_seconds": time.time()},
        "settings": _same(run.settings),
        "reward_funcs": list(run.settings.rewards.names),
        "train_data": name_of(run.settings.data["train"]),
        **run.pool.state_dict(),
        "statistics": run.statistics.state_dict(),
        "drafts": run.drafts.weights,
        "next": run.next.state_dict() if run.next else None,
        "num_rounds": run.num_rounds + over,
        "counters": dict(counters),
        "seconds": run.clock.seconds,
        "record": run.record.state_dict(),
        "advice": run.advice.state_dict(),
        "round": saved,
    }


def check_run_state(run: RunPosition, state: dict[str, Any]) -> None:
    """Refuse the state of another run; take what does not need the prompts."""
    settings = run.settings
    check_state(state, _same(settings))
    drawn = [state["pool"], *([state["round"]["groups"]] if state["round"] else [])]
    if ahead := state["next"]:
        drawn.append(ahead["trained"])
    limit = settings.sampling.max_completion_length
    check_drawn(drawn, state["reward_funcs"], settings.rewards.names, limit)
    run.clock.before = state.get("seconds", 0.0)
    run.record.load_state_dict(state.get("record", {}))
    run.advice.load_state_dict(state.get("advice", {}))


def check_resumed(run: RunPosition) -> None:
    """Refuse a checkpoint without a run, and processes that go on from other ones."""
    trainer, path = run.trainer, run.trainer.ckpt_path
    check_same_checkpoint(run.team, path)
    if run.resumed is None and trainer.state.fn == "fit" and path is not None:
        name = type(trainer.datamodule).__qualname__  # type: ignore[attr-defined]
        raise CheckpointError(
            f"`{path}` has no state of `{name}`: no prompts, pool, round or counters to "
            "resume. Resume from a checkpoint of the whole run, or start a new run without "
            "`ckpt_path`."
        )


def restore(run: RunPosition, state: dict[str, Any]) -> None:
    """Let a run go on from a state; its prompts are tokenised."""
    prompt_of_uid = run.startup.prompts.train.of_uid
    run.statistics.load_state_dict(state["statistics"])
    run.pool.load_state_dict(state, prompt_of_uid)
    run.drafts, run.ahead, run.current = Drafts(), None, None
    run.drafts.weights = dict(state["drafts"])
    run.num_rounds, run.counters = state["num_rounds"], Counter(state["counters"])
    saved = state["next"]
    run.next = RoundResult.from_state(saved, prompt_of_uid) if saved else None
    if not run.schedule.ahead:
        run.drop_next()
    groups = [*run.pool]
    if run.next is not None:
        groups += run.next.trained + run.next.left
    for completion in (c for group in groups for c in group.completions):
        if completion.finished:  # a checkpoint holds no texts
            completion.text = run.startup.decode(completion.own_ids)
    if run.learner.needs_group or run.schedule.selection:
        check_whole_groups(run.pool, run.settings.num_generations)
    if (saved := state["round"]) is not None:
        run.current = Round.from_state(saved, prompt_of_uid)
        run.update.accumulate_again(run.current, run.cursor())
