"""The model card of an exported model, from its checkpoint and the folder of its run."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData

from lit_rlsched.engines._vllm_args import LORA_RANKS
from lit_rlsched.run.record import measured
from lit_rlsched.run.run_config import versions
from lit_rlsched.run.saving.run_folder import folder_with, run_state

TEMPLATE = Path(__file__).with_suffix(".md")


def model_card(
    checkpoint: Mapping[str, Any],
    base: str,
    source: Path,
    adapter: bool,
    dtype: torch.dtype,
    served: torch.dtype,
    name: str,
) -> ModelCard:
    """Return the card: how to use the model, and how it was trained."""
    settings, folder = checkpoint["hyper_parameters"], folder_with(source)
    sampling, state = checkpoint.get("datamodule_hyper_parameters", {}), run_state(checkpoint)
    module, rank = checkpoint["policy"]["module"], settings["lora_rank"]
    method = module.removesuffix("Module")
    counters = state.get("counters", {})
    drawn = ("num_generations", "temperature", "top_p", "top_k", "min_p", "max_completion_length")
    both = {"module": settings, "data module": sampling}
    card_data = ModelCardData(
        base_model=None if Path(base).exists() else base,  # the Hub refuses a folder's name
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["lit_rlsched", "reinforcement-learning", method.lower()],
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        title=name.rpartition("/")[2],
        name=name,
        base=base,
        method=method,
        adapter=adapter,
        dtype=" --dtype float32" if served == torch.float32 else "",
        rank=min((allowed for allowed in LORA_RANKS if allowed >= rank), default=rank),
        facts={
            "module": f"`{module}`, `loss_type={settings['loss_type']}`",
            "trained weights": f"LoRA adapters of rank {rank}" if rank else "all",
            "these weights": f"{'adapters' if adapter else 'whole model'} in {str(dtype)[6:]}",
            "data": state.get("train_data"),
            "reward functions": ", ".join(state.get("reward_funcs", ())),
            "rounds": state.get("num_rounds"),
            "optimizer steps": checkpoint["global_step"],
            "completions": counters.get("num_completions"),
            "tokens": counters.get("num_tokens"),
            "sampling": ", ".join(f"`{n}={sampling[n]}`" for n in drawn if n in sampling),
            "lit_rlsched in training": state.get("version"),
        },
        metrics=[*_metrics(state.get("record", {}))],
        command=_command(folder),
        config=_text(folder, "config.yaml") or json.dumps(both, indent=1, default=str),
        versions=versions(),
    )


def _metrics(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield reward and held-out metrics: at first and in the model, with their optimizer steps."""
    rows = [*record.get("rounds", ()), *record.get("validations", ())]
    for name in sorted({n for row in rows for n in row if n == "reward" or n.startswith("val/")}):
        if seen := measured(rows, name):
            first, last = (f"{value:.4g} (step {at:.0f})" for at, value in (seen[0], seen[-1]))
            yield name, first, last


def _command(folder: Path | None) -> str:
    """Return the command of the run without the folder of the program."""
    try:
        program, *arguments = shlex.split(json.loads(_text(folder, "run.json"))["command"])
    except (ValueError, KeyError, TypeError):
        return ""
    return shlex.join([Path(program).name, *arguments])


def _text(folder: Path | None, name: str) -> str:
    with suppress(OSError):
        return (folder / name).read_text(encoding="utf-8").strip() if folder is not None else ""
    return ""
