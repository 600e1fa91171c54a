"""Named shapes, so that speed can be measured where no weights are at hand."""

from __future__ import annotations

from typing import Any

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.registry import architecture, unknown


def _opt(hidden_size: int, layers: int, heads: int) -> dict[str, Any]:
    """Table 1 of the OPT paper (Zhang et al., 2022, https://arxiv.org/abs/2205.01068)."""
    return {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }


_SHAPES: dict[str, dict[str, Any]] = {
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    # Four of the 96 layers, which exceed any cache many times.
    "opt-175b-layer": _opt(12288, 4, 96),
    # As Llama 3.2 1B, with the ReLU that makes its gate sparse (ProSparse, arXiv 2402.13516).
    "llama-1b-relu": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "hidden_act": "relu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}

SHAPES = tuple(_SHAPES)


def hf_config(name: str) -> dict[str, Any]:
    """The `config.json` of a named shape. Raises InputError for a name that does not exist."""
    if name not in _SHAPES:
        raise unknown("shape", name, _SHAPES, InputError)
    return dict(_SHAPES[name])


def model_config(name: str) -> ModelConfig:
    """`ModelConfig` of a named shape. Raises InputError for a name that does not exist."""
    hf = hf_config(name)
    config: ModelConfig = architecture(hf["model_type"]).config_from_hf(hf)
    return config
