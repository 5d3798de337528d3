"""Whole runs on several engines that are killed and stopped: `runs`, which prints a line for each.

The engines' processes are forks of this one, which has done the imports.
"""

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

import forked_engines
import torch
from lightning import Trainer, seed_everything
from schedules import digits
from seen_rounds import At, Rounds, logged, vector
from struck_engines import fallen, left, struck

from lit_rlsched import GRPOModule, RolloutDataModule, engines
from lit_rlsched.callbacks import StreamedTraining

DIFFERENCE = "sampling/sampling_logp_difference/max"
ROWS = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]


def validated(trainer, *_):
    figures = {k: v for k, v in logged(trainer).items() if k.startswith("val/")}
    return [trainer.global_step, figures]


def run(
    folder,
    model,
    engines_,
    faults,
    engine="TransformersEngine",
    rounds=6,
    streamed=False,
    precision="32-true",
):
    """Train on so many engines; return what was drawn and trained, and what it warned of."""
    folder.mkdir()
    seed_everything(1)
    base = getattr(engines, engine)
    data = RolloutDataModule(
        ROWS[:30],
        [digits],
        val_data=ROWS[30:33],
        val_num_generations=1,
        engine=base() if engines_ == 1 else struck(base, folder, faults),
        num_engines=engines_,
        prompts_per_round=6,
        num_generations=2,
        max_completion_length=16,
        micro_batch_tokens=24 if streamed else 1024,
    )
    seen, steps = Rounds(), At(logged, "on_train_batch_end")
    history = At(validated, "on_validation_end")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=rounds,
        precision=precision,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[seen, steps, history, *([StreamedTraining(start=0)] if streamed else [])],
    )
    # log-probs of tokens that were drawn before a fault are rounded in another way
    exact = {"importance_sampling_mode": None} if engine == "TransformersEngine" else {}
    module = GRPOModule(model, learning_rate=1e-3, **exact)
    error = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, datamodule=data)
        except RuntimeError as raised:
            error = str(raised)
    for c in (c for round in seen.rounds for c in round.completions):
        assert c.finished and c.scored and sum(n for _, n in c.segments) == len(c.logprobs)
    weights = vector(module)
    torch.save(weights, folder / "weights.pt")
    return {
        "drawn": seen.drawn,
        "difference": max((row.get(DIFFERENCE, 0.0) for row in steps.seen), default=0.0),
        "validations": history.seen,
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "counters": dict(data.run.counters),
        "streamed": sum(bool(round.accumulated) for round in seen.rounds),
        "restarts": [getattr(one, "restarts", 0) for one in data.run.settings.engine.engines],
        "warnings": [str(w.message) for w in told if "takes its place" in str(w.message)],
        "error": error,
        "fallen": fallen(folder),
        "left": left(folder),
    }


def runs(folder, *wanted):
    forked_engines.begin()
    torch.set_num_threads(1)
    for number, (model, engines_, faults, more) in enumerate(wanted):
        figures = run(Path(folder, str(number)), model, engines_, faults, **more)
        print("\n" + json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)
