"""OPT (Zhang et al., 2022, https://arxiv.org/abs/2205.01068), every published shape.

Learned positions start at row 2 of their table; OPT-350M normalises after each sublayer and has
token embeddings of 512 under a hidden size of 1024; Galactica drops biases and norm weights.
"""

from __future__ import annotations

from typing import Any

from dejavu.config import ModelConfig
from dejavu.models.config_fields import Fields

CHECKPOINT_NAMES = {
    "embed_tokens": "model.decoder.embed_tokens.weight",
    "embed_positions": "model.decoder.embed_positions.weight",
    "project_in": "model.decoder.project_in.weight",
    "project_out": "model.decoder.project_out.weight",
    "final_norm": "model.decoder.final_layer_norm",
    "lm_head": "lm_head.weight",
    "layers": "model.decoder.layers",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "mlp_norm": "final_layer_norm",
}


def sanitize(name: str) -> str:
    """Checkpoint name in today's spelling: older files lack the leading `model.`."""
    return f"model.{name}" if name.startswith("decoder.") else name


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of an OPT `config.json`. Raises ConfigError naming a bad field."""
    f = Fields(hf)
    hidden = f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    pre_norm = f.boolean("do_layer_norm_before", True)
    bias = f.boolean("enable_bias", True)
    return ModelConfig(
        model_type="opt",
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=f.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=f.exact_division("hidden_size", "num_attention_heads"),
        intermediate_size=f.integer("ffn_dim"),
        max_position_embeddings=f.integer("max_position_embeddings"),
        position_offset=2,
        **f.activation("activation_function", default="relu"),
        norm="layer_norm",
        norm_affine=f.boolean("layer_norm_elementwise_affine", True),
        pre_norm=pre_norm,
        final_norm=pre_norm and not f.boolean("_remove_final_layer_norm", False),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        embed_dim=f.integer("word_embed_proj_dim", hidden),
        tie_word_embeddings=f.boolean("tie_word_embeddings", True),
        **f.special_tokens(bos=2, eos=2, pad=1),
    )
