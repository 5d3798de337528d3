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
from lit_rlsched.run.saving.run_folder import folder_with

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

```bash
vllm serve {name}{dtype}
```"""
_USE_ADAPTER = """\
```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```

```bash
vllm serve {base}{dtype} --enable-lora --max-lora-rank {rank} --lora-modules trained={name}
```"""


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
    settings, run = checkpoint["hyper_parameters"], folder_with(source)
    module = _module(checkpoint)
    method = module.removesuffix("Module")
    data = ModelCardData(
        base_model=None if Path(base).exists() else base,  # the Hub refuses a folder's name
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["lit_rlsched", "reinforcement-learning", method.lower()],
    )
    rank = settings["lora_rank"]
    use = (_USE_ADAPTER if adapter else _USE).format(
        name=name,
        base=base,
        dtype=" --dtype float32" if served == torch.float32 else "",
        rank=min((allowed for allowed in LORA_RANKS if allowed >= rank), default=rank),
    )
    config = _text(run, "config.yaml")
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name.rpartition('/')[2]}",
        f"`{base}`, trained with {method} by lit_rlsched.",
        "## Use",
        use,
        "## Training",
        _table(("", ""), _facts(checkpoint, module, adapter, dtype)),
        *_metrics(checkpoint),
        "## Settings",
        f"```bash\n{command}\n```" if (command := _command(run)) else "",
        _folded("Configuration", config)
        if config
        else _folded("Settings of the module and the data module", _settings(checkpoint)),
        "## Versions at export",
        _table(("package", "version"), versions().items()),
    ]
    return ModelCard("\n\n".join(part for part in parts if part) + "\n")


def _module(checkpoint: Mapping[str, Any]) -> str:
    """Name of the module's class; checkpoints of earlier versions do not have it."""
    guess = "RLOO" if "normalize_advantages" in checkpoint["hyper_parameters"] else "GRPO"
    return str(checkpoint.get("policy", {}).get("module", f"{guess}Module"))


def _facts(
    checkpoint: Mapping[str, Any], module: str, adapter: bool, dtype: torch.dtype
) -> Iterator[tuple[str, Any]]:
    settings = checkpoint["hyper_parameters"]
    sampling = checkpoint.get("datamodule_hyper_parameters", {})
    run = _run(checkpoint)
    counters = run.get("counters", {})
    rank = settings["lora_rank"]
    yield "module", f"`{module}`, `loss_type={settings['loss_type']}`"
    yield "trained weights", f"LoRA adapters of rank {rank}" if rank else "all"
    yield (
        "these weights",
        f"{'adapters' if adapter else 'whole model'} in {dtype}".replace("torch.", ""),
    )
    yield "data", run.get("train_data")
    yield "reward functions", ", ".join(run.get("reward_funcs", ()))
    yield "rounds", run.get("num_rounds")
    yield "optimizer steps", checkpoint["global_step"]
    yield "completions", counters.get("num_completions")
    yield "tokens", counters.get("num_tokens")
    names = ("num_generations", "temperature", "top_p", "top_k", "min_p", "max_completion_length")
    yield "sampling", ", ".join(f"`{n}={sampling[n]}`" for n in names if n in sampling)
    yield "lit_rlsched in training", run.get("version")


def _run(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """State of the data module."""
    keys = {"num_rounds", "counters"}
    found = (s for s in checkpoint.values() if isinstance(s, dict) and keys <= s.keys())
    return next(found, {})


def _metrics(checkpoint: Mapping[str, Any]) -> list[str]:
    """Reward and held-out metrics: at first and in the model, with their optimizer steps."""
    record = _run(checkpoint).get("record", {"rounds": [], "validations": []})
    rows = [*record["rounds"], *record["validations"]]
    names = {n for row in rows for n in row if n == "reward" or n.startswith("val/")}
    found = ((name, measured(rows, name)) for name in sorted(names))
    lines = [
        (f"`{name}`", *(f"{value:.4g} (step {step:.0f})" for step, value in (seen[0], seen[-1])))
        for name, seen in found
        if seen
    ]
    return ["## Metrics", _table(("metric", "first", "last"), lines)] if lines else []


def _settings(checkpoint: Mapping[str, Any]) -> str:
    both = {n: checkpoint.get(n, {}) for n in ("hyper_parameters", "datamodule_hyper_parameters")}
    return json.dumps(both, indent=1, default=str)


def _command(run: Path | None) -> str:
    """Command of the run without the folder of the program."""
    try:
        program, *arguments = shlex.split(json.loads(_text(run, "run.json"))["command"])
    except (ValueError, KeyError, TypeError):
        return ""
    return shlex.join([Path(program).name, *arguments])


def _text(run: Path | None, name: str) -> str:
    with suppress(OSError):
        return (run / name).read_text(encoding="utf-8").strip() if run is not None else ""
    return ""


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n```yaml\n{text}\n```\n\n</details>"


def _table(head: tuple[str, ...], rows: Any) -> str:
    filled = [row for row in rows if row[1] not in (None, "")]
    lines = [head, ("---",) * len(head), *filled]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
