"""Llama 1 to 3.2 (Touvron et al., 2023, https://arxiv.org/abs/2302.13971) and its many relatives.

RMSNorm, rotary positions, a gated MLP, grouped key/value heads. `pretraining_tp` is accepted and
without effect, as in transformers: it split sums during training and changes rounding only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dejavu.config import ModelConfig
from dejavu.errors import ConfigError
from dejavu.models.config_fields import Fields, rope_from_hf

CHECKPOINT_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "final_norm": "model.norm",
    "lm_head": "lm_head.weight",
    "layers": "model.layers",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
}


def sanitize(name: str) -> str:
    """Checkpoint name in today's spelling: a file saved without its head lacks the `model.`."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Llama `config.json`. Raises ConfigError naming a bad field."""
    f = Fields(hf)
    config = gated_decoder(f, "llama", **f.special_tokens(bos=1, eos=2))
    bias = f.boolean("attention_bias", False)
    f.only("sliding_window", None, "by a llama model; use model_type mistral")
    f.only("layer_types", ["full_attention"] * config.num_hidden_layers, "by a llama model")
    return replace(
        config,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=f.boolean("mlp_bias", False),
    )


def gated_decoder(
    f: Fields,
    model_type: str,
    *,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    **fixed: Any,
) -> ModelConfig:
    """What Llama's relatives read alike: RMSNorm, rotary positions, gated MLP, no biases.

    num_key_value_heads, head_dim: where the file does not mention them; None: as many as query
    heads, and `hidden_size / num_attention_heads`. fixed: further fields of ModelConfig.
    """
    hidden = f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    kv_heads = f.optional_integer("num_key_value_heads", num_key_value_heads) or heads
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    explicit = f.optional_integer("head_dim", head_dim)
    rope = rope_from_hf(f)
    if rope.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor {rope.parameters['partial_rotary_factor']} is not "
            f"supported by a {model_type} model, which turns whole heads"
        )
    return ModelConfig(
        model_type=model_type,
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=f.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=explicit or f.exact_division("hidden_size", "num_attention_heads"),
        intermediate_size=f.integer("intermediate_size"),
        max_position_embeddings=f.integer("max_position_embeddings"),
        **f.activation("hidden_act", default="silu"),
        gated_mlp=True,
        norm="rms_norm",
        norm_eps=f.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=f.boolean("tie_word_embeddings", False),
        **fixed,
    )
