"""A GGUF file becomes a folder with the same model, tokenizer and template."""

from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lit_rlsched.cli.main import main
from lit_rlsched.run.saving import gguf as converting
from lit_rlsched.run.saving.gguf import convert
from lit_rlsched.settings import UsageError

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "lm_head": "output",
}
"""What llama.cpp calls the weights of a Llama."""
HEADS = 4


def llama_cpp_order(weight: torch.Tensor) -> torch.Tensor:
    """The rows of queries and keys, as llama.cpp's rotary positions want them."""
    rows = weight.shape[0] // HEADS
    return weight.view(HEADS, 2, rows // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, architecture: str = "llama", tied: bool = False) -> LlamaForCausalLM:
    """Write a file as llama.cpp's converter does, in float32, and return its model."""
    vocabulary = ["<unk>", "<s>", "</s>", *"abcdefghi<>", "ab"]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    file = gguf.GGUFWriter(path, architecture)
    file.add_block_count(2)
    file.add_context_length(128)
    file.add_embedding_length(32)
    file.add_feed_forward_length(64)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_vocab_size(len(vocabulary))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(vocabulary)
    file.add_token_types([3, 3, 3, *[1] * 12])
    file.add_token_merges(["a b"])
    file.add_unk_token_id(0)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            weight = llama_cpp_order(weight)
        for theirs, of_llama_cpp in NAMES.items():
            name = name.replace(theirs, of_llama_cpp)
        file.add_tensor(name, weight.numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_has_the_model_of_the_file(tmp_path: Path, capsys, tied: bool) -> None:
    model, out = write_gguf(tmp_path / "m.gguf", tied=tied), tmp_path / "out"
    main(["convert", "--file", str(tmp_path / "m.gguf"), "--out", str(out)])
    assert f"is in `{out}`" in capsys.readouterr().out
    read = AutoModelForCausalLM.from_pretrained(out)
    assert not hasattr(read.config, "quantization_config")
    ids = torch.arange(3, 13)[None]
    with torch.inference_mode():
        assert torch.equal(read(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == 128 and tokenizer.eos_token == "</s>"
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<a>"


def test_the_weights_may_have_half_the_precision(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    out = convert(str(tmp_path / "m.gguf"), str(tmp_path / "out"), dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_what_cannot_be_converted_is_refused(tmp_path: Path, monkeypatch) -> None:
    good, out = tmp_path / "good.gguf", tmp_path / "out"
    write_gguf(good)
    write_gguf(tmp_path / "other.gguf", architecture="wavtokenizer-dec")
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
