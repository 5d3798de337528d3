"""The exported model is the one that was trained."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from causal_families import FAMILIES, LOOK_AHEAD, NOT_TINY, TEXT_MODELS, make_family
from character_tokenizer import make_tokenizer
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lit_rlsched import GRPOModule, RLOOModule
from lit_rlsched.callbacks import RoundCheckpoint
from lit_rlsched.cli.main import main
from lit_rlsched.run.saving import export as exporting
from lit_rlsched.run.saving.export import export
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import named_weights
from lit_rlsched.training.precision import to_like

IDS = torch.arange(4, 64).view(3, 20)


def logprobs(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def test_a_run_is_taken_home(fit, tiny_model, sums, tmp_path, capsys):
    """Command, card and folder, with a checkpoint that alone says what it needs."""
    _, module, _ = fit(
        RLOOModule(tiny_model, learning_rate=1e-2, beta=0.0),
        [RoundCheckpoint()],
        {"enable_checkpointing": True, "max_epochs": 1},
        temperature=0.9,
        top_k=20,
        val_data=sums[80:84],
    )
    out = tmp_path / "mine"
    main(["export", "--ckpt_path", str(tmp_path), "--out", str(out)])
    (saved,) = (tmp_path / "checkpoints").glob("*.ckpt")
    assert f"The model of `{saved}` is in `{out}`.\n" in capsys.readouterr().out
    torch.testing.assert_close(logprobs(load(out)), logprobs(module.model), atol=1e-5, rtol=0)
    text = "17+4=21"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(tiny_model)(
        text
    )
    sampling = GenerationConfig.from_pretrained(out)
    assert (sampling.do_sample, sampling.temperature, sampling.top_k) == (True, 0.9, 20)
    assert sampling.max_new_tokens == 24 and sampling.eos_token_id == [1]
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "transformers" and card.data.base_model is None
    assert card.data.tags == ["lit_rlsched", "reinforcement-learning", "rloo"]
    for line in (
        "| module | `RLOOModule`, `loss_type=rloo` |",
        "| data | 80 rows |",
        "| reward functions | digits |",
        "| completions | 16 |",
        "| optimizer steps | 1 |",
    ):
        assert line in card.text
    for metric in (r"reward` \| [\d.]+ \(step 0", r"val/accuracy` \| [\d.]+ \(step 1"):
        assert re.search(rf"\| `{metric}\) \|", card.text)
    assert re.search(r"\| transformers \| \d", card.text)


def test_the_chat_template_comes_along(tiny_model, saved, tmp_path):
    base = tmp_path / "base"
    load(tiny_model).save_pretrained(base)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(base)
    out = export(saved(GRPOModule(str(base))), str(tmp_path / "out"))
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("model", ["tiny_model", "tiny_model_untied", "exact_model"])
@pytest.mark.parametrize("rank", [0, 4])
def test_all_weights_and_merged_adapters(model, rank, saved, tmp_path, request):
    torch.manual_seed(0)  # of the adapters: the largest difference depends on it
    module = GRPOModule(request.getfixturevalue(model), lora_rank=rank)
    loaded = load(export(saved(module), str(tmp_path / "out")))
    assert loaded.dtype == torch.float32
    # adapters are computed apart from their layer in training, merged they are rounded otherwise
    atol = 2e-5 if rank else 0.0
    torch.testing.assert_close(logprobs(loaded), logprobs(module.model), atol=atol, rtol=0)
    exported, weights = dict(named_weights(loaded)), dict(named_weights(module.model))
    assert exported.keys() == weights.keys()
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(weights)
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_adapters_alone(tiny_model, saved, tmp_path):
    from peft import AutoPeftModelForCausalLM

    module = GRPOModule(tiny_model, lora_rank=4, lora_alpha=8)
    out = tmp_path / "out"
    main(["export", "--ckpt_path", saved(module), "--out", str(out), "--adapter"])
    assert not (out / "model.safetensors").exists()
    loaded = AutoPeftModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(logprobs(loaded), logprobs(module.model), atol=1e-5, rtol=0)
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "peft"
    line = f"vllm serve {tiny_model} --dtype float32 --enable-lora --max-lora-rank 8 "
    assert f"{line}--lora-modules trained=out\n" in card.text
    half = export(tmp_path / "some.ckpt", str(tmp_path / "half"), adapter=True, dtype="bf16")
    tensors = load_file(half / "adapter_model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("precision", "rank", "dtype"),
    [
        ("bf16-mixed", 0, torch.float32),
        ("bf16-true", 0, torch.bfloat16),
        ("bf16-mixed", 4, torch.bfloat16),
        ("bf16-true", 4, torch.bfloat16),
    ],
)
def test_the_dtype_is_that_of_training(precision, rank, dtype, tiny_model, saved, tmp_path):
    module = GRPOModule(tiny_model, lora_rank=rank)
    path = saved(module, precision)
    loaded = load(export(path, str(tmp_path / "out")))
    line = f"vllm serve out{' --dtype float32' * (dtype == torch.float32)}\n"
    assert line in (tmp_path / "out" / "README.md").read_text()
    assert loaded.dtype == dtype == getattr(torch, str(loaded.config.dtype).split(".")[-1])
    exact = load(export(path, str(tmp_path / "exact"), dtype="fp32"))
    weights = dict(named_weights(module.model))
    for name, weight in exact.named_parameters():
        assert torch.equal(weight, weights[name].float()), name
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, weights[name].to(dtype)), name


def test_half_precision_is_the_model_rounded(tiny_model, saved, tmp_path):
    """The bound of docs/howto/export.md: the model that decodes in bfloat16 has it too."""
    module = GRPOModule(tiny_model)
    rounded = load(export(saved(module), str(tmp_path / "out"), dtype="bfloat16"))
    rounding = to_like(module.model, torch.empty(0, dtype=torch.bfloat16))
    assert torch.equal(logprobs(rounded), logprobs(rounding))


def in_family(family, saved, tmp_path):
    base = tmp_path / "base"
    make_family(family).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    module = GRPOModule(str(base))
    path = saved(module)
    full = load(export(path, str(tmp_path / "full")))
    # transformers sets the padding token's embedding of this family to 0 after it is loaded
    same = slice(1 if family == "youtu" else 0, None)
    logps = [logprobs(model)[..., same] for model in (full, module.model)]
    torch.testing.assert_close(*logps, atol=1e-5, rtol=0)
    half, expected = load(export(path, str(tmp_path / "half"), dtype="bf16")), tmp_path / "twin"
    module.model.save_pretrained(expected)  # by transformers itself
    expected = load(expected, dtype=torch.bfloat16).state_dict()
    assert half.state_dict().keys() == expected.keys()
    for name, tensor in half.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_what_transformers_keeps_in_float32(saved, tmp_path):
    in_family("deepseek_v3", saved, tmp_path)  # a float32 buffer, and experts saved one by one
    kept = [t for n, t in load(tmp_path / "half").named_buffers() if "correction_bias" in n]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", sorted(set(FAMILIES) - set(LOOK_AHEAD) - set(NOT_TINY) - set(TEXT_MODELS))[::6]
)
def test_a_sixth_of_all_families(family, saved, tmp_path):
    in_family(family, saved, tmp_path)


def test_dropout_of_the_base_is_not_lost(exact_model, saved, tmp_path):
    config = load(export(saved(GRPOModule(exact_model)), str(tmp_path / "out"))).config
    assert config.attention_dropout == load(exact_model).config.attention_dropout == 0.1


# Loading as a module.


@pytest.mark.parametrize("module", [GRPOModule, RLOOModule])
@pytest.mark.parametrize("rank", [0, 4])
def test_load_from_checkpoint(module, rank, tiny_model, saved):
    trained = module(tiny_model, lora_rank=rank)
    path = saved(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = module.load_from_checkpoint(path)
    assert torch.equal(logprobs(loaded.model), logprobs(trained.model))


def test_a_checkpoint_with_too_few_adapters_is_refused(tiny_model, saved):
    contents = torch.load(path := saved(GRPOModule(tiny_model, lora_rank=4)))
    contents["state_dict"].popitem()
    torch.save(contents, path)
    with pytest.raises(UsageError, match="1 weights differ"):
        GRPOModule.load_from_checkpoint(path)


# Bad input.


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["export", *map(str, args)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in error
    assert "tip: `lit-rlsched export --help`" in error
    lines = error.splitlines()
    return next(line for line in lines if line.startswith("error: "))


def change(path, **changes):
    contents = torch.load(path)
    for name, values in changes.items():
        contents[name] = contents[name] | values
    torch.save(contents, path)


def test_refusals(tiny_model, saved, tmp_path, capsys):
    path, out = Path(saved(GRPOModule(tiny_model))), tmp_path / "out"
    given = ["--ckpt_path", path, "--out", out]

    def error(*args):
        return refused(capsys, *(args or given))

    assert "`out`" in error("--ckpt_path", path)
    assert "`dtype=int8`: must be 'auto' or" in error(*given, "--dtype=int8")
    assert "`adapter=True`" in error(*given, "--adapter") and not out.exists()
    assert "lora_rank=0" in error(*given, "--adapter")
    assert "nowhere.ckpt` does not exist" in error("--ckpt_path=nowhere.ckpt", "--out", out)
    assert "no readable checkpoint" in error("--ckpt_path", tiny_model, "--out", out)
    assert "push_to_hub='a b'" in error(*given, "--push_to_hub=a b")
    assert "There is no option `--config`" in error(*given, "--config=x.yaml")
    (out / "inside").mkdir(parents=True)
    assert f"`out={out}` exists and is not an empty folder" in error()
    (out / "inside").rmdir()
    change(path, hyper_parameters={"model": "./moved"})
    assert "`model=./moved`: no such folder" in error() and [*out.iterdir()] == []
    fixed = export(str(path), str(out), model=tiny_model)
    assert (fixed / "model.safetensors").exists()


def test_a_base_model_of_another_shape_is_refused(exact_model, tiny_model, saved, tmp_path):
    path = saved(GRPOModule(tiny_model))
    with pytest.raises(UsageError, match=r"weights differ.*Name the base model of the run"):
        export(path, str(tmp_path / "out"), model=exact_model)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_ours(tiny_model, saved, tmp_path, capsys):
    path = Path(saved(GRPOModule(tiny_model)))
    out = ["--out", tmp_path / "out"]
    whole, bad = path.read_bytes(), tmp_path / "bad.ckpt"
    bad.write_bytes(whole[: len(whole) // 2])
    assert "is damaged, or cut off" in refused(capsys, "--ckpt_path", bad, *out)
    foreign = {"state_dict": {}, "pytorch-lightning_version": "2.6", "global_step": 1}
    torch.save(foreign | {"hyper_parameters": {"model": 3}}, bad)
    assert "not a checkpoint of `GRPOModule`" in refused(capsys, "--ckpt_path", bad, *out)
    assert not (tmp_path / "out").exists()


def test_the_newest_readable_checkpoint_of_a_folder(tiny_model, saved, tmp_path, monkeypatch):
    path = Path(saved(GRPOModule(tiny_model)))
    run = tmp_path / "runs" / "mine" / "version_0"
    run.mkdir(parents=True)
    path.rename(run / "old.ckpt")
    (run / "new.ckpt").write_bytes(b"stump")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(match=r"new.ckpt` is not a Lightning checkpoint.*old.ckpt` is used instead"):
        out = export("last", "out")
    assert (out / "model.safetensors").exists()


# Writing.


def test_nothing_is_left_of_an_export_that_was_stopped(tiny_model, saved, tmp_path, monkeypatch):
    path, stopped = saved(GRPOModule(tiny_model)), tmp_path / ".out.1.export-tmp"
    stopped.mkdir()  # by a process that was killed
    with monkeypatch.context() as patched:
        patched.setattr(exporting, "model_card", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export(path, str(tmp_path / "out"))
    assert {p.name for p in tmp_path.iterdir()} == {"some.ckpt"}
    export(path, str(tmp_path / "out"))
    assert {p.name for p in tmp_path.iterdir()} == {"some.ckpt", "out"}
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1


def test_push_to_hub(tiny_model, saved, tmp_path, monkeypatch):
    path, calls = saved(GRPOModule(tiny_model)), []

    def create_repo(self, repo_id, **kwargs):
        calls.append((repo_id, kwargs))
        return type("Url", (), {"repo_id": f"me/{repo_id}"})

    def upload_folder(self, **kwargs):
        calls.append((kwargs["repo_id"], sorted(p.name for p in kwargs["folder_path"].iterdir())))

    with monkeypatch.context() as patched:
        patched.setattr(HfApi, "create_repo", create_repo)
        patched.setattr(HfApi, "upload_folder", upload_folder)
        export(path, str(tmp_path / "out"), push_to_hub="mine")
    created, (repository, files) = calls
    assert created == ("mine", {"exist_ok": True}) and repository == "me/mine"
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= {*files}
    with pytest.raises(
        RuntimeError, match=r"is complete. Upload it with `hf upload mine .*offline"
    ):
        export(path, str(tmp_path / "again"), push_to_hub="mine")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "qwen3"
