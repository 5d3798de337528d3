"""A GGUF file becomes a folder that computes what the file does, or it is refused by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lit_rlsched.cli.main import main
from lit_rlsched.run.saving import gguf as converting
from lit_rlsched.run.saving.gguf import _llama3, config_of, convert
from lit_rlsched.settings import UsageError

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghi<>", "ab"]
HEADS = 4
SMALL: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = {"head_dim": 256, "sliding_window": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 8}),
    "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "starcoder2": ("starcoder2", {}),
    "gpt2": ("gpt2", {"num_key_value_heads": None}),
}
"""What llama.cpp calls a model, and a small one of transformers."""
KEYS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "n_inner": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "head_dim": "attention.key_length",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
Writes = Callable[[gguf.GGUFWriter], None]


def tensors_of(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """The weights as llama.cpp's converter names and orders them."""
    config = model.config
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            block = ".".join(["blk", name.split(".")[2]])
            gate, up = weight.chunk(2, dim=1)
            found |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
            continue
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        ours += "" if ours.endswith((".weight", ".bias")) else ".weight"
        if architecture == "llama" and ("attn_q." in ours or "attn_k." in ours):
            heads = config.num_attention_heads if "_q." in ours else config.num_key_value_heads
            parts = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
            weight = parts.transpose(1, 2).reshape(weight.shape)
        if architecture.startswith("gemma") and ours.endswith("norm.weight"):
            weight = weight + 1
        if architecture == "gpt2" and weight.ndim == 2 and ".h." in name:
            weight = weight.T
        if ours.endswith("ffn_gate_inp_shexp.weight"):
            weight = weight[0]
        found[ours] = weight
    return found


def write_gguf(path: Path, name: str = "llama", also: Writes | None = None, **values: Any) -> Any:
    """Write a file as llama.cpp's converter does, in float32, and return its model."""
    torch.manual_seed(0)
    kind, own = MODELS[name]
    config = AutoConfig.for_model(kind, **{**SMALL, "intermediate_size": 64, **own, **values})
    if kind == "gpt2":
        config.n_inner = 64
    model = AutoModelForCausalLM.from_config(config).eval()
    for key, weight in model.named_parameters():
        if key.endswith("bias"):
            weight.data.normal_()
    file = gguf.GGUFWriter(path, name)
    for attribute, key in KEYS.items():
        if (value := getattr(config, attribute, None)) is not None:
            add = file.add_float32 if isinstance(value, float) else file.add_uint32
            add(f"{name}.{key}", value)
    if getattr(config, "head_dim", None):
        file.add_value_length(config.head_dim)
    if hasattr(config, "rope_parameters"):
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        file.add_rope_freq_base(rope["rope_theta"])
        head_dim = getattr(config, "head_dim", config.hidden_size // HEADS)
        file.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if own.get("sliding_window"):
        file.add_sliding_window(config.sliding_window)
    file.add_vocab_size(len(WORDS))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(WORDS)
    file.add_token_types([3, 3, 3, *[1] * 12])
    file.add_token_merges(["a b"])
    file.add_unk_token_id(0)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_chat_template(TEMPLATE)
    if also is not None:
        also(file)
    for key, weight in tensors_of(model, name).items():
        file.add_tensor(key, weight.detach().contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


def check_same(out: Path, model: Any) -> None:
    """The folder's model has the logits of the file's."""
    ids = torch.arange(3, 3 + 64)[None] % len(WORDS)
    with torch.inference_mode():
        ours, theirs = (m(ids).logits for m in (AutoModelForCausalLM.from_pretrained(out), model))
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_folder_computes_what_the_file_does(tmp_path: Path, name: str, tied: bool) -> None:
    if name.startswith("gemma") and not tied:
        pytest.skip("llama.cpp's Gemma has no head of its own")
    model = write_gguf(tmp_path / "m.gguf", name, tie_word_embeddings=tied)
    check_same(convert(str(tmp_path / "m.gguf"), str(tmp_path / "out")), model)


def linear(file: gguf.GGUFWriter) -> None:
    file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    file.add_rope_scaling_factor(4.0)


def yarn(file: gguf.GGUFWriter) -> None:
    file.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    file.add_rope_scaling_factor(4.0)
    file.add_rope_scaling_orig_ctx_len(32)
    file.add_rope_scaling_yarn_beta_fast(16.0)


def llama3(file: gguf.GGUFWriter) -> None:
    file.add_tensor("rope_freqs.weight", factors_of(10000.0, 8, 8.0, 1.0, 4.0, 64))


def factors_of(
    theta: float, dims: int, factor: float, low: float, high: float, length: int
) -> np.ndarray[Any, Any]:
    """The tensor, computed as llama.cpp's converter does."""
    found = []
    for at in range(0, dims, 2):
        wave = 2 * math.pi * theta ** (at / dims)
        smooth = (length / wave - low) / (high - low)
        if wave < length / high:
            found.append(1.0)
        elif wave > length / low:
            found.append(factor)
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


LENGTH = {"original_max_position_embeddings": 32}
META = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALED: dict[str, tuple[Writes, dict[str, Any]]] = {
    "linear": (linear, {}),
    "yarn": (yarn, {**LENGTH, "beta_fast": 16.0}),
    "llama3": (llama3, {**META, "factor": 8.0}),
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_rotary_positions_are_scaled_as_in_the_file(tmp_path: Path, name: str, kind: str) -> None:
    writes, more = SCALED[kind]
    rope = {"rope_theta": 10000.0, "rope_type": kind, "factor": 4.0, **more}
    if name == "gemma3":
        plain = {"rope_theta": 10000.0, "rope_type": "default"}
        rope = {"full_attention": rope, "sliding_attention": plain}
    model = write_gguf(tmp_path / "m.gguf", name, writes, rope_parameters=rope)
    if kind == "llama3" and name != "llama":  # llama.cpp reads the tensor for a Llama alone
        with pytest.raises(UsageError, match=r"rope_freqs\.weight"):
            convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"))
        return
    check_same(convert(str(tmp_path / "m.gguf"), str(tmp_path / "out")), model)


@settings(deadline=None, max_examples=50)
@given(
    theta=st.sampled_from([1e4, 5e5]),
    dims=st.sampled_from([8, 64, 128]),
    factor=st.floats(1.5, 64),
    length=st.sampled_from([2**power for power in range(5, 19)]),
)
def test_the_factors_of_a_llama_give_its_parameters(dims, theta, factor, length) -> None:
    factors = factors_of(theta, dims, factor, 1.0, 4.0, length)
    assume(factor == pytest.approx(factors.max()))  # as in every Llama
    found = _llama3(factors.astype(float), theta ** (-np.arange(0, dims, 2) / dims) / 2 / math.pi)
    assert found is not None
    low, high, length = (found.pop(name) for name in META)
    assert np.allclose(factors_of(theta, dims, *found.values(), low, high, length), factors)


@pytest.mark.parametrize(
    ("name", "bias"),
    [("llama", "attention_bias"), ("llama", "mlp_bias"), ("qwen3", "attention_bias")],
)
def test_biases_are_those_of_the_file(tmp_path: Path, name: str, bias: str) -> None:
    model = write_gguf(tmp_path / "m.gguf", name, **{bias: True})
    check_same(convert(str(tmp_path / "m.gguf"), str(tmp_path / "out")), model)


def test_a_bias_that_the_file_lacks_is_zero(tmp_path: Path, monkeypatch) -> None:
    some = {n: None for n in ("blk.0.attn_output.bias", "blk.1.attn_q.bias")}
    whole = tensors_of

    def fewer(model: Any, name: str) -> dict[str, torch.Tensor]:
        for layer, part in zip(model.model.layers, ("o_proj", "q_proj"), strict=True):
            getattr(layer.self_attn, part).bias.data.zero_()
        return {n: w for n, w in whole(model, name).items() if n not in some}

    monkeypatch.setitem(globals(), "tensors_of", fewer)
    model = write_gguf(tmp_path / "m.gguf", attention_bias=True)
    check_same(convert(str(tmp_path / "m.gguf"), str(tmp_path / "out")), model)


def test_each_key_of_llama_cpp_is_used_or_refused(tmp_path: Path) -> None:
    """Whatever gguf knows and the configuration does not depend on has to be named."""
    write_gguf(tmp_path / "m.gguf")
    keys, tensors, _ = converting._read(tmp_path / "m.gguf")
    plain = config_of(keys, tensors, None).to_dict()
    groups = [gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM, gguf.Keys.Split]
    names = {name for group in groups for name in vars(group).values() if isinstance(name, str)}
    names = {name.format(arch="llama", dense="x") for name in names if "." in name}
    harmless = {"llama.rope.scaling.finetuned", "llama.rope.scaling.original_context_length"}
    harmless |= {"split.tensors.count", *(n for n in names if "yarn_beta" in n)}  # of yarn alone
    assert len(names) > 90
    for name in sorted({*names, "llama.anything", "other.anything", "anything"} - harmless):
        value = 16.0 if name.endswith(("epsilon", "capping", "freq_base")) else 16
        try:
            assert config_of({**keys, name: value}, tensors, None).to_dict() != plain, name
        except UsageError as error:
            assert name in str(error) or name.endswith("key_length")  # others contradict it


def extra_key(file: gguf.GGUFWriter) -> None:
    file.add_logit_scale(0.5)


def longrope(file: gguf.GGUFWriter) -> None:
    file.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    file.add_tensor("rope_factors_long.weight", np.ones(4, np.float32))


def other_factors(file: gguf.GGUFWriter) -> None:
    file.add_tensor("rope_freqs.weight", np.array([1, 3, 2, 5], np.float32))


def attention_factor(file: gguf.GGUFWriter) -> None:
    yarn(file)
    file.add_rope_scaling_yarn_attn_factor(1.2)


def extra_tensor(file: gguf.GGUFWriter) -> None:
    file.add_tensor("blk.1.attn_sinks.weight", np.ones(4, np.float32))


def adapter(file: gguf.GGUFWriter) -> None:
    file.add_type("adapter")


@pytest.mark.parametrize(
    ("name", "writes", "named"),
    [
        ("llama", extra_key, r"llama\.logit_scale"),
        ("llama", longrope, r"llama\.rope\.scaling\.type"),
        ("llama", other_factors, r"rope_freqs\.weight"),
        ("llama", attention_factor, r"llama\.rope\.scaling\.yarn_attn_factor"),
        ("llama", extra_tensor, r"blk\.1\.attn_sinks\.weight"),
        ("llama", adapter, r"general\.type"),
        ("gpt2", linear, r"gpt2\.rope\.scaling\.type"),
    ],
)
def test_what_would_be_dropped_is_refused(tmp_path: Path, name: str, writes, named: str) -> None:
    write_gguf(tmp_path / "m.gguf", name, writes)
    with pytest.raises(UsageError, match=rf"m\.gguf`.*{named}"):
        convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_the_file_lacks_is_named(tmp_path: Path, monkeypatch) -> None:
    whole = tensors_of

    def fewer(*args: Any) -> dict[str, torch.Tensor]:
        return {n: w for n, w in whole(*args).items() if n != "blk.1.ffn_up.weight"}

    monkeypatch.setitem(globals(), "tensors_of", fewer)
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"))


def test_the_tokenizer_is_that_of_the_file(tmp_path: Path, capsys) -> None:
    def ends(file: gguf.GGUFWriter) -> None:
        file.add_add_bos_token(True)
        file.add_eot_token_id(5)

    out = tmp_path / "out"
    write_gguf(tmp_path / "m.gguf", also=ends)
    main(["convert", "--file", str(tmp_path / "m.gguf"), "--out", str(out)])
    assert f"is in `{out}`" in capsys.readouterr().out
    read = AutoModelForCausalLM.from_pretrained(out)
    assert not hasattr(read.config, "quantization_config")
    assert read.generation_config.eos_token_id == [2, 5]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == 512 and tokenizer.eos_token == "</s>"
    assert tokenizer("ab").input_ids == [1, 14]
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<a>"


def test_the_weights_may_have_half_the_precision(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    out = convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"), dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_what_cannot_be_converted_is_refused(tmp_path: Path, monkeypatch) -> None:
    good, out = tmp_path / "good.gguf", tmp_path / "out"
    write_gguf(good)
    other = gguf.GGUFWriter(tmp_path / "other.gguf", "wavtokenizer-dec")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    (tmp_path / "short.gguf").write_bytes(good.read_bytes()[:-5000])
    (tmp_path / "none.gguf").write_text("no model")
    for name in ("other", "short", "none"):
        with pytest.raises(UsageError, match=rf"{name}\.gguf`: transformers cannot read"):
            convert(str(tmp_path / f"{name}.gguf"), str(out))
    with pytest.raises(UsageError, match=r"missing\.gguf`: no such file"):
        convert(str(tmp_path / "missing.gguf"), str(out))
    with pytest.raises(UsageError, match="not an empty folder"):
        convert(str(good), str(tmp_path))
    with pytest.raises(UsageError, match="dtype='auto'"):
        convert(str(good), str(out), dtype="auto")
    assert not out.exists() and not [*tmp_path.glob(".out*")]
    monkeypatch.setattr(converting, "is_gguf_available", lambda: False)
    with pytest.raises(UsageError, match=r"lit_rlsched\[gguf\]"):
        convert(str(good), str(out))
