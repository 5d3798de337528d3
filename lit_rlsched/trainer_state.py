"""What reward functions are told of the training's progress."""

from types import SimpleNamespace

from lightning import Trainer


def trainer_state(
    trainer: Trainer, steps_per_round: int, prompts_per_round: int, prompts: int
) -> SimpleNamespace:
    """TRL's `trainer_state`, as far as it has a meaning here; a plain object that can be pickled.

    Args:
        trainer: Of the run.
        steps_per_round: Optimizer steps of a round, repeated ones included.
        prompts_per_round: Prompts that these train on.
        prompts: Of `train_data`.

    Returns:
        `global_step`, the optimizer steps taken; `max_steps`, those at which the run ends, -1 if it
        has no end; and `epoch`, how often `train_data` was trained on, a fraction. As in
        `transformers.TrainerState`.
    """
    ends = [trainer.max_steps, (trainer.max_epochs or -1) * steps_per_round]
    return SimpleNamespace(
        global_step=trainer.global_step,
        max_steps=min((end for end in ends if end > 0), default=-1),
        epoch=trainer.global_step / steps_per_round * prompts_per_round / max(1, prompts),
    )
