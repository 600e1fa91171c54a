"""Published models: all names and shapes are the reference's, without a byte of weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from dejavu.load import checkpoint_name
from dejavu.models.slots import slots
from dejavu.registry import architecture

# hidden size, layers, heads, neurons, and what else stands in the file
OPT_SHAPES = {
    "125m": (768, 12, 12, 3072, {}),
    "350m": (1024, 24, 16, 4096, {"do_layer_norm_before": False, "word_embed_proj_dim": 512}),
    "1.3b": (2048, 24, 32, 8192, {}),
    "2.7b": (2560, 32, 32, 10240, {}),
    "6.7b": (4096, 32, 32, 16384, {}),
    "13b": (5120, 40, 40, 20480, {}),
    "30b": (7168, 48, 56, 28672, {}),
    "66b": (9216, 64, 72, 36864, {}),
    "galactica-1.3b": (
        2048,
        24,
        32,
        8192,
        {"enable_bias": True, "activation_function": "gelu", "vocab_size": 50000},
    ),
    "galactica-plain": (
        1024,
        12,
        16,
        4096,
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "vocab_size": 50000,
        },
    ),
    "no-final-norm": (768, 12, 12, 3072, {"_remove_final_layer_norm": True}),
}


@pytest.mark.parametrize("name", OPT_SHAPES)
def test_published_opt_shapes(name: str) -> None:
    hidden, layers, heads, neurons, more = OPT_SHAPES[name]
    assert_slots_match(
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ffn_dim": neurons,
            "max_position_embeddings": 2048,
            **more,
        },
    )


# model_type, vocabulary, hidden size, layers, heads, key/value heads, neurons, and the rest
GATED_SHAPES: dict[str, tuple[str, int, int, int, int, int, int, dict[str, Any]]] = {
    "llama-2-7b": ("llama", 32000, 4096, 32, 32, 32, 11008, {"pretraining_tp": 1}),
    "llama-2-70b": ("llama", 32000, 8192, 80, 64, 8, 28672, {}),
    "llama-3.2-1b": (
        "llama",
        128256,
        2048,
        16,
        32,
        8,
        8192,
        {"head_dim": 64, "tie_word_embeddings": True, "eos_token_id": [128001, 128008, 128009]},
    ),
    "mistral-7b-v0.3": ("mistral", 32768, 4096, 32, 32, 8, 14336, {"sliding_window": None}),
    "mistral-nemo": ("mistral", 131072, 5120, 40, 32, 8, 14336, {"head_dim": 128}),
    "qwen2.5-0.5b": ("qwen2", 151936, 896, 24, 14, 2, 4864, {"tie_word_embeddings": True}),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 28, 28, 4, 18944, {}),
    "qwen3-0.6b": (
        "qwen3",
        151936,
        1024,
        28,
        16,
        8,
        3072,
        {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "qwen3-4b": ("qwen3", 151936, 2560, 36, 32, 8, 9728, {"head_dim": 128}),
}


@pytest.mark.parametrize("name", GATED_SHAPES)
def test_published_gated_shapes(name: str) -> None:
    model_type, vocabulary, hidden, layers, heads, kv_heads, neurons, more = GATED_SHAPES[name]
    assert_slots_match(
        model_type,
        {
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": neurons,
            "max_position_embeddings": 4096,
            **more,
        },
    )


def assert_slots_match(model_type: str, fields: dict[str, Any]) -> None:
    """Names and shapes of all tensors are the reference's."""
    hf = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    module = architecture(model_type)
    config = module.config_from_hf(json.loads(hf.to_json_string(use_diff=False)))
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    ours = {
        checkpoint_name(name, module.CHECKPOINT_NAMES): slot.shape
        for name, slot in slots(config).items()
    }
    assert ours == expected
