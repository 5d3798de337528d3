"""Write the policy of a checkpoint as a Hugging Face folder, with a model card."""

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from lit_rlsched.engines._vllm_args import LORA_RANKS
from lit_rlsched.run.record import measured
from lit_rlsched.run.run_config import versions
from lit_rlsched.run.saving.checkpoints import CheckpointError, read_checkpoint
from lit_rlsched.run.saving.resuming import check_base, check_same_weights
from lit_rlsched.run.saving.run_folder import folder_with, newest_checkpoint, run_state
from lit_rlsched.settings import RunFailed, UsageError
from lit_rlsched.training.lora import adapter_config, base_model, read_config, with_adapter
from lit_rlsched.training.policy import eos_token_ids, load_policy, load_tokenizer, named_weights
from lit_rlsched.training.precision import kept_in_float32, main_dtype

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
Dtype = Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]
_FIX = "Name the base model of the run with `model`."
_SUFFIX = ".export-tmp"


def export(
    ckpt_path: str,
    out: str,
    adapter: bool = False,
    dtype: Dtype = "auto",
    push_to_hub: str | None = None,
    model: str | None = None,
) -> Path:
    """Export a trained model as a Hugging Face folder, for transformers, vLLM and the Hub.

    The folder has weights (safetensors), tokenizer, chat template, a generation config with the
    sampling of the run, and a model card. It appears under its name once it is complete.

    Args:
        ckpt_path: Checkpoint of `GRPOModule` or `RLOOModule`, a run's folder (its newest readable
            checkpoint), or `last` for the newest in `runs/`.
        out: Folder to write. It must be empty or not exist.
        adapter: Write the LoRA adapters as a PEFT folder instead of merging them into the base.
        dtype: Of the weights. `auto` is the dtype in training: `float32` in `32-true` and
            `bf16-mixed`, whose trained weights are float32, and `bfloat16` in `bf16-true`. With
            LoRA it is that of the frozen base, `bfloat16` in `bf16-mixed` too, and the sum of base
            and adapters is rounded once; an adapter folder is float32. Tensors that transformers
            keeps in float32 stay so in every dtype.
        push_to_hub: Name of a repository on the Hub to which the folder is then uploaded.
        model: Folder or hub name of the base model, if it is not where the run found it.

    Returns:
        The folder.

    Raises:
        CheckpointError: the file is not a readable checkpoint of this package.
        UsageError: the checkpoint has LoRA adapters, and peft is missing.
        RunFailed: the upload failed; the folder stays.
        UsageError: an argument is wrong, or base model or tokenizer cannot be found.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"`{dtype=}`: use 'auto' or one of {', '.join(map(repr, DTYPES))}.")
    try:
        if push_to_hub is not None:
            validate_repo_id(push_to_hub)
    except HFValidationError as error:
        raise UsageError(f"`{push_to_hub=}`: use `NAME` or `USER/NAME`. ({error})") from error
    folder, source = new_folder(out), find_checkpoint(ckpt_path)
    checkpoint = read_checkpoint(source)
    settings, about = checkpoint.get("hyper_parameters", {}), checkpoint.get("policy", {})
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in checkpoint["state_dict"].items()
        if name.startswith("model.")
    }
    if not isinstance(settings.get("model"), str) or not about or not weights:
        raise CheckpointError(
            f"`{source}` is not a checkpoint of `GRPOModule` or `RLOOModule`: its hyperparameters "
            "name no base model. Use a checkpoint of one of these modules; for a module of your "
            "own, call `save_pretrained` of the model in it."
        )
    lora = about["adapter"]
    if adapter and lora is None:
        raise UsageError(
            f"`adapter=True`: the run of `{source}` trained all weights (`lora_rank=0`), so there "
            "are no adapters. Leave `adapter` out."
        )
    named = model or settings["model"]
    base = named if model or lora is None else lora["base_model_name_or_path"]
    if (given := adapter_config(base)) is not None:
        base = str(given.base_model_name_or_path)
    sampling = checkpoint.get("datamodule_hyper_parameters", {})
    trained = getattr(torch, about["dtype"].removeprefix("torch."))
    used = DTYPES.get(dtype, main_dtype(weights.values()) if adapter else trained)
    with torch.device("meta"):
        shell = load_policy(base, dtype=used)  # has config and names, but no weights
    tokenizer = load_tokenizer(sampling.get("tokenizer") or named)
    shell.config = AutoConfig.from_pretrained(base)  # `load_policy` sets dropout to 0
    shell.generation_config = _generation_config(base, shell, tokenizer, sampling)
    with written_at_once(folder) as new:
        tokenizer.save_pretrained(new)
        if adapter:
            with torch.device("meta"):
                policy: Any = _with_lora(shell, lora, weights)
            policy.peft_config["default"].base_model_name_or_path = base
            cast = {name: _cast(tensor, used) for name, tensor in weights.items()}
            policy.save_pretrained(new, state_dict=cast, save_embedding_layers=False)
        else:
            if lora is not None:
                plain = load_policy(base, dtype=trained)
                check_base(about["origin"], plain, base)
                merged = _with_lora(plain, lora, weights)
                merged.load_state_dict(weights, strict=False)  # the base has its weights
                inner = base_model(merged)
                buffers = {name for name, _ in inner.named_buffers()}
                weights = {n: tensor for n, tensor in inner.state_dict().items() if n in buffers}
                weights |= dict(named_weights(merged))
            write_model(shell, weights, used, new)
        served = trained if adapter else used
        card = model_card(
            checkpoint, base, source, adapter, used, served, push_to_hub or folder.name
        )
        card.save(new / "README.md")
    if push_to_hub is not None:
        _upload(folder, push_to_hub)
    return folder


def new_folder(out: str) -> Path:
    """Return the full path of a folder to write, and refuse one that has files."""
    folder = Path(out).resolve()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"`out={out}` exists and is not an empty folder. Name a new folder.")
    return folder


def find_checkpoint(ckpt_path: str) -> Path:
    """Return the file that `ckpt_path` of `export` means."""
    path = Path("runs" if ckpt_path == "last" else ckpt_path)
    if not path.exists():
        raise UsageError(f"`ckpt_path={ckpt_path}`: `{path.absolute()}` does not exist.")
    newest = path if path.is_file() else newest_checkpoint(path, resumable=False)
    if newest is None:
        raise UsageError(
            f"`ckpt_path={ckpt_path}`: there is no readable checkpoint in `{path.absolute()}`. "
            "Name the file of one."
        )
    return newest


def _with_lora(model: Any, lora: Mapping[str, Any], adapters: Mapping[str, Tensor]) -> nn.Module:
    policy = with_adapter(model, read_config(lora))
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    check_same_weights(trained, adapters, _FIX)
    return policy


def write_model(
    shell: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path
) -> None:
    """Write weights and the configuration of `shell`, whose own weights do not matter."""
    named = {*dict(shell.named_parameters()), *dict(shell.named_buffers())}  # tied weights once
    shapes = {name: tensor for name, tensor in shell.state_dict().items() if name in named}
    weights = {name: tensor for name, tensor in weights.items() if name in named}
    check_same_weights(shapes, weights, _FIX)
    kept = kept_in_float32(shell, dtype)
    cast = {name: _cast(t, torch.float32 if name in kept else dtype) for name, t in weights.items()}
    shell.save_pretrained(folder, state_dict=cast)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    to = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", to).contiguous()


def _generation_config(
    base: str, model: Any, tokenizer: Any, sampling: Mapping[str, Any]
) -> GenerationConfig:
    """The base's special tokens with the sampling of the run."""
    with suppress(OSError):  # without the file, the model's config has the tokens
        model.generation_config = GenerationConfig.from_pretrained(base)
    own = model.generation_config
    tokens: dict[str, Any] = {n: getattr(own, n) for n in ("bos_token_id", "pad_token_id")}
    tokens["eos_token_id"] = list(eos_token_ids(model, tokenizer)) or None
    names = ("temperature", "top_p", "top_k", "min_p")
    drawn = {name: sampling[name] for name in names if name in sampling}
    if "max_completion_length" in sampling:
        drawn["max_new_tokens"] = sampling["max_completion_length"]
    return GenerationConfig(**tokens, **drawn, do_sample=True)


@contextmanager
def written_at_once(out: Path) -> Iterator[Path]:
    """Give a temporary folder beside `out`, and rename it to `out` once it is filled."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*{_SUFFIX}"):  # of a process that was killed
        shutil.rmtree(left)
    folder = out.with_name(f".{out.name}.{os.getpid()}{_SUFFIX}")
    folder.mkdir()
    try:
        yield folder
        for file in folder.iterdir():  # safetensors writes files that only the owner can read
            file.chmod(folder.stat().st_mode & 0o666)
        folder.rename(out)  # which is empty, if it exists
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _upload(folder: Path, name: str) -> None:
    try:
        repository = HfApi().create_repo(name, exist_ok=True).repo_id
        message = "Upload by lit_rlsched"
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:  # errors of the Hub and of its HTTP client share no other base
        raise RunFailed(
            f"`push_to_hub={name}` failed, but `{folder}` is complete. Upload it with "
            f"`hf upload {name} {folder}`. ({type(error).__name__}: {error})"
        ) from error


TEMPLATE = Path(__file__).with_name("model_card.md")


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
    command: list[str] = []
    with suppress(ValueError, KeyError, TypeError):
        program, *arguments = shlex.split(json.loads(_text(folder, "run.json"))["command"])
        command = [Path(program).name, *arguments]
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
        command=shlex.join(command),
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


def _text(folder: Path | None, name: str) -> str:
    with suppress(OSError):
        return (folder / name).read_text(encoding="utf-8").strip() if folder is not None else ""
    return ""
