"""The command `lit-rlsched fit | validate | test`."""

import os
import sys

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lit_rlsched import callbacks, engines
from lit_rlsched._malloc import keep_heap
from lit_rlsched.callbacks import RNGState, RolloutLogger, RolloutProgressBar
from lit_rlsched.data import tasks
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.module import GRPOModule, PolicyModule, RLOOModule

for _package in (callbacks, engines):  # short class names resolve among what is imported
    for _name in _package.__all__:
        getattr(_package, _name)
__all__ = ["GRPOModule", "RLOOModule", "RolloutCLI", "RolloutDataModule", "main", "tasks"]


class RolloutCLI(LightningCLI):
    """Lightning's CLI with our defaults."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Our defaults; a config overrides them."""
        parser.set_defaults(
            {
                "trainer.num_sanity_val_steps": 0,
                "trainer.log_every_n_steps": 1,
                "trainer.enable_model_summary": False,
            }
        )

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let the checkpoint's hyperparameters win over the config."""

    def after_fit(self) -> None:
        """Close W&B, which prints on exit, so that the summary is the last line."""
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish(quiet=True)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutLogger):
                print(callback.summary(self.trainer), flush=True)


def main(args: ArgsType = None) -> None:
    """Run the command line; `args` stands in for it in tests."""
    sys.path.insert(0, os.getcwd())  # reward functions live beside the config
    keep_heap()
    RolloutCLI(
        PolicyModule,
        RolloutDataModule,
        subclass_mode_model=True,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [RNGState(), RolloutProgressBar()]},
        auto_configure_optimizers=False,
        args=args,
    )
