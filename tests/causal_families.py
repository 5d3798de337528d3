"""A tiny model of each causal family of the installed transformers that can be built like that."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # logits far enough from zero for soft caps and factors to show
    "use_cache": False,
    "is_decoder": True,
    "max_position_embeddings": 64,
    "n_positions": 64,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "attn_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    "first_k_dense_replace": 1,
    "type_vocab_size": 2,
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_expand": 2,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("index_head_dim", "index_topk"), 8),
}
"""Under every name that configurations have for them."""
LEFT_OUT: dict[str, set[str]] = {
    "falcon": {"head_dim"},
    "gemma4": {"head_dim"},
    "gemma4_text": {"head_dim"},
    "gemma4_unified": {"head_dim"},
    "gemma4_unified_text": {"head_dim"},
    "xlnet": {"max_position_embeddings"},
    "xlstm": {"head_dim", "v_head_dim"},
}
"""Derived from others there."""
DIFFERENT: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


NOT_TINY: dict[str, str] = {
    "blt": "its local encoder and decoder have configurations of their own",
    "cohere_compass_text": "its rotary embeddings are set for each kind of layer",
    "dbrx": "its default configuration lacks a setting that the model reads",
    "gemma3": "an image encoder comes with it",
    "gemma3n": "an image encoder comes with it, which needs timm",
    "gemma3n_text": "needs a layer of each kind, and more of them",
    "gemma4": "per-layer embeddings have a vocabulary of their own",
    "gemma4_assistant": "drafts for another model, whose states it reads",
    "gemma4_text": "per-layer embeddings have a vocabulary of their own",
    "gemma4_unified_assistant": "drafts for another model, whose states it reads",
    "git": "an image encoder comes with it",
    "got_ocr2": "an image encoder comes with it",
    "musicgen": "an encoder for text and one for audio come with it",
    "musicgen_melody": "an encoder for text and one for audio come with it",
    "phi4_multimodal": "encoders for images and audio come with it",
    "prophetnet": "counts encoder and decoder layers apart, and refuses to be told of both",
    "reformer": "sizes of its axial position embeddings must fit all others",
    "zamba": "needs a layer of each kind",
    "zamba2": "needs a layer of each kind",
}
"""Why a family is not tried."""
LOOK_AHEAD = ("cpmant", "xlnet")
"""A prompt, or all, is attended to in both directions."""
HEADS_OF_LAYERS = (
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("modernbert-decoder", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Their logits are not the last layer's product with the last hidden states, and are refused."""
TEXT_MODELS = ("emu3", "mllama")
"""Families whose text models `AutoModelForCausalLM` saves, but does not load."""


def make_config(family: str) -> Any:
    """Its configuration with small sizes, where it has such settings."""
    config_class = CONFIG_MAPPING[family]
    default = config_class()
    text = getattr(default, "text_config", None)
    own = default if text is None else text
    left_out = LEFT_OUT.get(family, set())
    settings = {k: v for k, v in SIZES.items() if k not in left_out and _has(own, k)}
    if "kv_lora_rank" in settings:  # latent attention has no groups
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    settings |= DIFFERENT.get(family, {})
    return config_class(**(settings if text is None else {"text_config": settings}))


def _has(config: Any, name: str) -> bool:
    return name.endswith("token_id") or getattr(config, name, None) is not None


def make_family(family: str) -> nn.Module:
    """Raises whatever a family raises that needs more than that."""
    config = make_config(family)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > 2e7:
        raise ValueError(f"{parameters / 1e6:.0f}M parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        sharpen(model)
    return model


@torch.no_grad()
def sharpen(model: nn.Module) -> None:
    """Logits of a trained model's size: factors and soft caps hardly show in small ones."""
    spread = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits.std()
    model.get_output_embeddings().weight.mul_(10 / spread)
