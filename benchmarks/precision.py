"""Differences between the log-probs of trainer and vLLM by precision, on the CPU.

    python -m benchmarks run precision --seeds 0 1

Each case draws one round of the quick task in a new process and scores the same tokens with the
Trainer's precision before any training. In cases with LoRA the adapters are random, with 1 % of the
norm of their weights.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.common import ENVIRONMENT


class Case(NamedTuple):
    """A row of the table."""

    precision: str
    lora_rank: int
    engine: str | None = None
    """Data type of vLLM; None for its default."""
    enable_lora: bool = False
    """Whether vLLM gets the adapters alone."""


CASES = {
    "`32-true`": Case("32-true", 0),
    "`32-true`, LoRA": Case("32-true", 16),
    "`32-true`, LoRA, adapters alone": Case("32-true", 16, enable_lora=True),
    "`bf16-mixed`": Case("bf16-mixed", 0),
    "`bf16-mixed`, LoRA": Case("bf16-mixed", 16),
    "`bf16-mixed`, LoRA, adapters alone": Case("bf16-mixed", 16, enable_lora=True),
    "`bf16-true`": Case("bf16-true", 0),
    "`bf16-true`, LoRA": Case("bf16-true", 16),
    "`bf16-true`, LoRA, adapters alone": Case("bf16-true", 16, enable_lora=True),
    '`32-true`, `VLLMEngine(dtype="bfloat16")`': Case("32-true", 0, "bfloat16"),
    '`bf16-mixed`, `VLLMEngine(dtype="float32")`': Case("bf16-mixed", 0, "float32"),
}


def gaps(case: Case, model: str, seed: int) -> list[float]:
    """Return the absolute differences of the log-probs of all tokens of a round."""
    import torch
    from lightning import Callback, Trainer, seed_everything

    from benchmarks.ledger import spread
    from lit_rlsched import GRPOModule, RolloutDataModule
    from lit_rlsched.data.tasks import Countdown
    from lit_rlsched.engines import VLLMEngine

    seed_everything(seed, verbose=False)
    differences: list[Any] = []

    class Compare(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            for layer in pl_module.modules():
                if hasattr(layer, "get_delta_weight"):
                    up = layer.lora_B["default"].weight
                    torch.nn.init.normal_(up)
                    size = layer.get_delta_weight("default").norm()
                    up.data *= 0.01 * layer.weight.float().norm() / size

        def on_train_batch_start(self, trainer: Any, pl_module: Any, step: Any, index: int) -> None:
            for batch in step:
                with trainer.precision_plugin.forward_context():
                    ours = pl_module.score(batch)["old_logprobs"]
                gap = (ours.float() - batch.rollout_logp).abs()
                differences.append(gap[batch.completion_mask.bool()])

    data = RolloutDataModule(
        Countdown("train", size=400),
        [spread],
        engine=VLLMEngine(dtype=case.engine, enable_lora=case.enable_lora),
        prompts_per_round=32,
        num_generations=4,
        max_completion_length=512,
        micro_batch_tokens=4096,
        verify_sync=False,  # its tolerance is meant for runs
        seed=seed,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        precision=case.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Compare()],
    )
    trainer.fit(GRPOModule(model, lora_rank=case.lora_rank), datamodule=data)
    return torch.cat(differences).tolist()


def _print_one(name: str, model: str, seeds: list[int]) -> None:
    import torch

    every = torch.tensor([gap for seed in seeds for gap in gaps(CASES[name], model, seed)])
    figures = [every.mean(), every.square().mean().sqrt(), every.max()]
    print(json.dumps([len(every), *map(float, figures)]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = results.parser("precision", __doc__)
    parser.add_argument("--model", default="examples/countdown/model", help="folder of the model")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1], help="seeds of the rounds")
    results.add_cases(parser, CASES)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = results.parse(parser, arguments)
    if options.one:
        return _print_one(options.one, options.model, options.seeds)
    print("| trainer | tokens | mean | RMS | largest |\n|---|---|---|---|---|")
    for name in options.cases:
        command = [sys.executable, "-m", "benchmarks.precision", "--one", name]
        command += ["--model", options.model, "--seeds", *map(str, options.seeds)]
        env = os.environ | ENVIRONMENT
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        tokens, *figures = json.loads(done.stdout.splitlines()[-1])
        names = ("mean", "RMS", "largest")
        results.add(name, {"tokens": tokens, **dict(zip(names, figures, strict=True))})
        cells = [f"{tokens:,}", *(f"{figure:.1e}" for figure in figures)]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
