"""What the command line says before and after a run."""

import shlex
import textwrap
from inspect import signature
from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlsched.callbacks import RolloutCallback, RolloutLogger, RoundCheckpoint
from lit_rlsched.run.policy_module import PolicyModule
from lit_rlsched.run.saving.run_folder import folder_of, name_of
from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.settings import plain
from lit_rlsched.text import counted, three_digits
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import find_policy


class RunSummary(Callback):
    """Prints what a run will do, once its settings were checked and its engine has started."""

    _printed = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary, before the untrained model is validated if it is."""
        if trainer.state.fn == "fit" and trainer.is_global_zero and not self._printed:
            self._printed = True
            print(summary(trainer, pl_module), flush=True)

    on_train_start = on_validation_start


def summary(trainer: Trainer, module: LightningModule) -> str:
    """Return what a run will do as lines of text; its engine has started."""
    run: TrainingRun = trainer.datamodule.run  # type: ignore[attr-defined]
    settings = run.settings
    dry = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
    folder, writes = Path(trainer.default_root_dir), ["config.yaml"]
    head = "fast_dev_run" if dry else name_of(folder)
    given, prompts = settings.data["train"], run.startup.prompts
    name = given if isinstance(given, str | Path) else type(given).__name__
    name = "rows" if isinstance(given, list) else name
    held_out = len(prompts.held_out.get("val", ()))
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(c, RoundCheckpoint | ModelCheckpoint) for c in callbacks):
        writes.append("checkpoints")
    if any(isinstance(c, RolloutLogger) for c in callbacks):
        writes.append("completions and report")
    if trainer.loggers:
        writes.append(f"metrics by {' and '.join(type(one).__name__ for one in trainer.loggers)}")
    rows = {
        "model": _model(module, str(trainer.precision)),
        "data": f"{name}, {len(prompts.train):,} prompts to train on, "
        f"{f'{held_out:,}' if held_out else 'none'} held out",
        "round": f"{counted(settings.prompts_per_round, 'prompt')} x "
        f"{counted(settings.num_generations, 'completion')} of at most "
        f"{settings.sampling.max_completion_length:,} tokens, then "
        f"{counted(settings.steps_per_epoch, 'optimizer step')}",
        "run": _run(trainer, run),
        "engine": _engine(run),
        "schedule": _schedule(trainer),
        "output": "nothing is written" if dry else f"{folder}: {', '.join(writes)}",
    }
    wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent = wrapper.subsequent_indent = 12 * " "
    for label, text in rows.items():
        lines = "\n".join(wrapper.fill(line) for line in text.split("\n"))
        head += f"\n  {label:10}{lines.lstrip()}"
    return head


def _model(module: LightningModule, precision: str) -> str:
    settings = module.hparams
    total = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    size, learnt = (
        f"{three_digits(n / 1e9)} B" if n >= 1e9 else f"{three_digits(n / 1e6)} M"
        for n in (total, trained)
    )
    size += " parameters"
    if settings.get("lora_rank"):
        size += f", of which LoRA adapters of rank {settings['lora_rank']} train {learnt}"
    name = base_model(find_policy(module)).name_or_path
    loss = f" with loss_type {settings['loss_type']}" if isinstance(module, PolicyModule) else ""
    return f"{name}, {size}, precision {precision}; {type(module).__name__}{loss}"


def _run(trainer: Trainer, run: TrainingRun) -> str:
    assert run.fit_settings is not None
    rounds, steps = trainer.max_epochs, trainer.max_steps
    ends = []
    if rounds is not None and rounds != -1:
        taken = counted(rounds * run.fit_settings.steps, "optimizer step")
        ends.append(f"{counted(rounds, 'round')}, {taken}")
    if steps != -1:
        ends.append(f"at most {counted(steps, 'optimizer step')}")
    text = "; ".join(ends) or "until it is stopped"
    every = trainer.check_val_every_n_epoch
    if run.settings.data["val"] is not None and every is not None:
        text += f"; validated after every {f'{every:,} rounds' if every > 1 else 'round'}"
    if done := run.rounds_over:
        text += f"; {counted(done, 'round')} already done"
    return text


def _engine(run: TrainingRun) -> str:
    assert run.session is not None
    engine = run.settings.engine
    name, inner = engine.name, getattr(engine.engines[0], "engine", None)
    if inner is not None:
        name += f" of {type(inner).__name__}"
    at_once = f"up to {counted(run.session.spec.slots, 'completion')} at once"
    if (engines := len(engine.engines)) > 1:
        return f"{engines} engines ({name}), which decode {at_once}"
    return f"{name}, decodes {at_once}"


def _schedule(trainer: Trainer) -> str:
    said = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutCallback) and callback.sets is not None:
            kind = type(callback)
            defaults = {n: plain(p.default) for n, p in signature(kind).parameters.items()}
            given = (f"{n}={v!r}" for n, v in callback.init_args.items() if v != defaults.get(n))
            about = (kind.__doc__ or "").partition("\n")[0].replace("`", "")
            said.append(f"{kind.__name__}({', '.join(given)}): {about}")
    return "\n".join(said) or "every completion is decoded to its end, then the round is trained on"


def next_commands(trainer: Trainer) -> list[str]:
    """Return commands that go on with a run that has ended; none if nothing was saved."""
    if (saved := _saved(trainer)) is None:
        return []
    run, commands = " ".join(saved), list[str]()
    if isinstance(trainer.lightning_module, PolicyModule):
        commands = [
            f"lit-rlsched predict {run} --data.predict_data prompts.jsonl",
            f"lit-rlsched export {saved[1]} --out my-model",
        ]
    if trainer.datamodule.run.settings.data["val"] is not None:  # type: ignore[attr-defined]
        commands.insert(0, f"lit-rlsched validate {run}")
    rounds = trainer.max_epochs or 0
    if rounds > 0 and trainer.max_steps == -1:
        commands.append(f"lit-rlsched fit {run} --trainer.max_epochs={2 * rounds}")
    if (report := folder_of(trainer) / "report.html").exists():
        commands.insert(0, f"python -m webbrowser -t {report.absolute().as_uri()}")
    return commands


def resume_command(trainer: Trainer) -> str | None:
    """Return the command that resumes a run that was stopped, if it was saved."""
    saved = _saved(trainer)
    return saved and f"lit-rlsched fit {' '.join(saved)}"


def _saved(trainer: Trainer) -> tuple[str, str] | None:
    """Return the options that name the configuration and the newest checkpoint of the run."""
    paths = [
        Path(path)
        for callback in trainer.checkpoint_callbacks
        if not getattr(callback, "save_weights_only", False)
        for name in ("last_path", "_last_checkpoint_saved")
        if (path := getattr(callback, name, None)) and Path(path).exists()
    ]
    if not paths:
        return None
    newest = max(paths, key=lambda path: path.stat().st_mtime_ns)
    config = Path(trainer.default_root_dir) / "config.yaml"
    return f"-c {shlex.quote(str(config))}", f"--ckpt_path {shlex.quote(str(newest))}"
