"""The table of configurations every parity test runs over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .tiny import Case

# What `original_max_position_embeddings` and the unscaled length are in the rope cases; prompts
# are three times as long.
ORIGINAL = 20
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}


def rope(name: str, limit: int = 128, **parameters: Any) -> Case:
    """A llama with rotary scaling; base 50 makes even slow pairs turn within a tiny prompt."""
    fields = {
        "rope_parameters": {"rope_theta": 50.0, **parameters},
        "max_position_embeddings": limit,
    }
    off = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    return Case(f"llama-rope-{name}", "llama", fields, off=off, prompt=3 * ORIGINAL)


def yarn(name: str, **more: Any) -> Case:
    """YaRN with some of its options, of which the proof drops just those."""
    plain = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    }
    case = rope(f"yarn-{name}", **plain | more)
    return replace(case, off=rope("", **plain).fields) if more else case


OPT = [
    Case("opt", "opt", neutral=("bias",)),
    Case(
        "opt-350m",
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
        off={"do_layer_norm_before": True},
    ),
    Case(
        "opt-post-norm", "opt", {"do_layer_norm_before": False}, off={"do_layer_norm_before": True}
    ),
    Case(
        "opt-galactica",
        "opt",
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
        off={"activation_function": "relu"},
    ),
    Case(
        "opt-no-final-norm",
        "opt",
        {"_remove_final_layer_norm": True},
        off={"_remove_final_layer_norm": False},
    ),
    Case("opt-untied", "opt", {"tie_word_embeddings": False}, off={"tie_word_embeddings": True}),
]
LLAMA = [
    Case("llama", "llama", neutral=("norm",)),
    Case("llama-mha", "llama", {"num_key_value_heads": 4}),
    Case(
        "llama-biases",
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        off={"attention_bias": False, "mlp_bias": False},
    ),
    Case("llama-head-dim", "llama", {"head_dim": 16}),
    Case("llama-tied", "llama", {"tie_word_embeddings": True}),
    # transformers refuse heads that do not divide hidden_size for llama: a mistral without a
    # window is the same model
    Case(
        "llama-odd-heads",
        "mistral",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
        edits={"model_type": "llama"},
    ),
    Case("llama-relu", "llama", {"hidden_act": "relu"}, off={"hidden_act": "silu"}),
    Case("llama-relu2", "llama", {"hidden_act": "relu2"}, off={"hidden_act": "relu"}),
    Case("llama-gelu", "llama", {"hidden_act": "gelu"}, off={"hidden_act": "relu"}),
    Case(
        "llama-gelu-tanh",
        "llama",
        {"hidden_act": "gelu_pytorch_tanh"},
        off={"hidden_act": "gelu"},
    ),
    Case(
        "llama-fatrelu",
        "llama",
        {"hidden_act": "relu"},
        edits={"hidden_act": "fatrelu", "hidden_act_param": 0.3},
        off={"hidden_act": "relu"},
        fatrelu=0.3,
    ),
    Case("llama-pretraining-tp", "llama", {"pretraining_tp": 2}),
]
ROPE = [
    Case("llama-theta", "llama", {"rope_parameters": {"rope_theta": 50.0}}, off=DEFAULT_ROPE),
    Case(
        "llama-theta-beside",
        "llama",
        {"rope_parameters": {"rope_theta": 50.0}},
        edits={"rope_parameters": None, "rope_theta": 50.0, "rope_scaling": ...},
        off=DEFAULT_ROPE,
    ),
    rope("linear", rope_type="linear", factor=4.0),
    rope("linear-type", type="linear", factor=4.0),
    rope("dynamic", ORIGINAL, rope_type="dynamic", factor=5.0),
    rope(
        "llama3",
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    ),
    yarn("plain"),
    yarn("attention-factor", attention_factor=1.0),
    yarn("mscale", mscale=1.0, mscale_all_dim=1.0),
    yarn("mscale-pair", mscale=2.0, mscale_all_dim=0.5),
    yarn("not-truncated", truncate=False),
    yarn("betas", beta_fast=8.0, beta_slow=2.0),
]
MISTRAL = [
    Case("mistral-full", "mistral", off={"sliding_window": 8}),
    Case("mistral-window", "mistral", {"sliding_window": 8}, off={"sliding_window": None}),
    Case(
        "mistral-odd-heads",
        "mistral",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ),
]
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
QWEN = [
    Case("qwen2", "qwen2", neutral=("bias",)),
    Case(
        "qwen2-flag-off",
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        edits={"layer_types": None, "sliding_window": 8},  # as published files have it
        off={"use_sliding_window": True},
    ),
    Case("qwen2-window", "qwen2", QWEN_WINDOW, off={"use_sliding_window": False}),
    Case(
        "qwen2-max-window-layers",
        "qwen2",
        QWEN_WINDOW,
        edits={"layer_types": None},
        off={"max_window_layers": 0},
    ),
    Case(
        "qwen2-layer-types",
        "qwen2",
        QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
        off={"layer_types": None},
    ),
    Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", "qwen3", neutral=("q_norm", "k_norm")),
    Case("qwen3-biases", "qwen3", {"attention_bias": True}, off={"attention_bias": False}),
    Case("qwen3-window", "qwen3", QWEN_WINDOW, off={"use_sliding_window": False}),
    Case("qwen3-relu", "qwen3", {"hidden_act": "relu"}, off={"hidden_act": "silu"}),
]
CASES = [*OPT, *LLAMA, *ROPE, *MISTRAL, *QWEN]
