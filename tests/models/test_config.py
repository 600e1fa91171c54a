"""What a `config.json` may say: defaults as in transformers, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from dejavu.config import ModelConfig
from dejavu.errors import ConfigError
from dejavu.kernels.ops import Activation
from dejavu.kernels.reference import activate
from dejavu.models.config_fields import ACTIVATIONS
from dejavu.registry import architecture, architectures

BARE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
OPT_BARE = {k: v for k, v in BARE.items() if k != "intermediate_size"} | {"ffn_dim": 53}
ROTARY = ["llama", "mistral", "qwen2", "qwen3"]


def parse(model_type: str, /, **fields: Any) -> ModelConfig:
    bare = OPT_BARE if model_type == "opt" else BARE
    hf = {k: v for k, v in (bare | fields).items() if v is not ...}
    config: ModelConfig = architecture(model_type).config_from_hf({"model_type": model_type} | hf)
    return config


def test_five_architectures_are_known() -> None:
    assert architectures() == ["llama", "mistral", "opt", "qwen2", "qwen3"]


@pytest.mark.parametrize(
    "model_type",
    [
        *("gemma3_text", "falcon", "RefinedWeb", "bloom", "gpt_neo", "gpt_neox", "phi3", "mixtral"),
        *("Llama", "", None, ["llama"], "base", "slots", "rope", "../opt", "dejavu.errors"),
    ],
)
def test_unknown_model_type_is_refused_by_name(model_type: object) -> None:
    with pytest.raises(ConfigError) as error:
        architecture(model_type)
    assert repr(model_type) in str(error.value)
    assert "known: llama, mistral, opt, qwen2, qwen3" in str(error.value)


@pytest.mark.parametrize("model_type", ["opt", *ROTARY])
def test_absent_fields_mean_what_transformers_take_them_for(model_type: str) -> None:
    """num_key_value_heads aside, whose defaults (8 and 32) fit no small model."""
    sizes = {"num_key_value_heads": 2} if model_type != "opt" else {}
    ours = parse(model_type, **sizes)
    bare = OPT_BARE if model_type == "opt" else BARE
    theirs = transformers.AutoConfig.for_model(model_type, **bare, **sizes)
    spelt_out = parse(model_type, **json.loads(theirs.to_json_string(use_diff=False)))
    assert ours == spelt_out
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.pad_token_id == theirs.pad_token_id
    if model_type != "opt":
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.head_dim == getattr(theirs, "head_dim", 16)
        assert ours.rope is not None
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    if model_type == "mistral":
        assert ours.windows == (theirs.sliding_window,) * 3


def test_key_value_heads() -> None:
    assert parse("llama").num_key_value_heads == 4
    assert parse("llama", num_key_value_heads=None).num_key_value_heads == 4
    assert parse("mistral", num_attention_heads=16).num_key_value_heads == 8
    assert parse("mistral", num_attention_heads=16, num_key_value_heads=None).group_size == 1
    assert parse("qwen2", num_key_value_heads=2).group_size == 2
    with pytest.raises(ConfigError, match=r"num_attention_heads 4 is not a multiple of .* 3"):
        parse("llama", num_key_value_heads=3)


def test_explicit_head_dim_wins() -> None:
    assert parse("llama", head_dim=24).head_dim == 24
    assert parse("qwen2", num_key_value_heads=4, head_dim=24).head_dim == 24
    assert parse("llama", num_attention_heads=3, head_dim=16, hidden_size=40).head_dim == 16
    with pytest.raises(
        ConfigError, match="hidden_size 40 is not a multiple of num_attention_heads 3"
    ):
        parse("llama", num_attention_heads=3, hidden_size=40)


def test_windows() -> None:
    kv = {"num_key_value_heads": 2}
    on = {"use_sliding_window": True, "sliding_window": 8, **kv}
    assert parse("mistral", sliding_window=8, **kv).windows == (8, 8, 8)
    assert parse("mistral", sliding_window=None, **kv).windows is None
    assert parse("mistral", **kv).windows == (4096,) * 3
    assert parse("qwen2", sliding_window=8, max_window_layers=1, **kv).windows is None
    assert parse("qwen2", **on).windows is None  # max_window_layers is 28
    assert parse("qwen2", **on | {"sliding_window": None, "max_window_layers": 0}).windows is None
    assert parse("qwen3", **on, max_window_layers=1).windows == (None, 8, 8)
    assert parse("qwen3", **on, max_window_layers=0).windows == (8, 8, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse("qwen2", **on, max_window_layers=0, layer_types=types).windows == (8, None, 8)
    off = on | {"use_sliding_window": False}
    assert parse("qwen2", **off, layer_types=types).windows is None
    assert parse("mistral", sliding_window=8, layer_types=types[:1] * 3, **kv).windows == (8, 8, 8)
    assert parse("llama", layer_types=["full_attention"] * 3).windows is None


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "fatrelu"])
def test_activations_are_what_transformers_call_them(name: str) -> None:
    config = parse("llama", hidden_act=name)
    x = torch.linspace(-6, 6, 1001)
    ours = activate(x, Activation(config.activation, config.activation_threshold))
    torch.testing.assert_close(ours, transformers.activations.ACT2FN[name](x), atol=2e-6, rtol=1e-5)


def test_fatrelu() -> None:
    config = parse("llama", hidden_act="fatrelu", hidden_act_param=0.01)
    assert (config.activation, config.activation_threshold) == ("fatrelu", 0.01)
    x = torch.tensor([-1.0, 0.0, 0.009, 0.01, 0.011, 2.0])
    kept = activate(x, Activation(config.activation, config.activation_threshold))
    assert kept.tolist() == [0, 0, 0, 0, x[4].item(), 2.0]
    at_zero = parse("llama", hidden_act="fatrelu", hidden_act_param=0)
    assert torch.equal(activate(x, Activation("fatrelu", at_zero.activation_threshold)), x.relu())
    assert parse("llama", hidden_act="relu", hidden_act_param=0.5).activation_threshold == 0.0


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("llama", {"hidden_size": ...}, "'hidden_size' is missing"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ("llama", {"vocab_size": True}, "vocab_size must be a positive integer, not True"),
        ("llama", {"max_position_embeddings": ...}, "'max_position_embeddings' is missing"),
        ("llama", {"hidden_act": "foo"}, "unknown hidden_act in config.json 'foo'.*fatrelu, gelu"),
        ("llama", {"hidden_act": ["relu"]}, "unknown hidden_act"),
        ("opt", {"activation_function": "foo"}, "unknown activation_function in config.json 'foo'"),
        ("llama", {"hidden_act": "fatrelu", "hidden_act_param": "x"}, "hidden_act_param"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false, not 1"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be an id or ids"),
        ("llama", {"bos_token_id": [1]}, "bos_token_id must be one id"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            "qwen3",
            {"num_key_value_heads": 4, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("opt", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("llama", {"is_causal": False}, "is_causal False"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("opt", {"quantization_config": {}}, "quantization_config"),
        ("llama", {"sliding_window": 8}, "sliding_window 8 .*mistral"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": 0, "num_key_value_heads": 2}, "sliding_window must be"),
        (
            "mistral",
            {"num_key_value_heads": 2, "layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types",
        ),
        ("qwen2", {"num_key_value_heads": 2, "layer_types": ["full_attention"]}, "all 3 layers"),
        (
            "qwen2",
            {"num_key_value_heads": 2, "layer_types": ["linear_attention"] * 3},
            "linear_att",
        ),
        ("qwen2", {"num_key_value_heads": 2, "max_window_layers": -1}, "max_window_layers"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object or null"),
        (
            "llama",
            {"rope_scaling": {"type": "foo"}},
            "'foo'.*default, dynamic, linear, llama3, yarn",
        ),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "unknown rope_type.*'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, "unknown rope_type"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": None}}, "factor is missing"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": "2"}}, "factor must be"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be positive"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor must be positive"),
        ("llama", {"rope_scaling": {"type": "yarn", "atention_factor": 1.0}}, "attention_factor"),
        ("llama", {"rope_scaling": {"type": "yarn", "truncate": None}}, "truncate must be"),
        (
            "llama",
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "high_freq_factor is missing",
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            "high_freq_factor must be above",
        ),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention",
        ),
        ("llama", {"rope_theta": 0}, "rope_theta must be above 1"),
        ("llama", {"rope_theta": "1e4"}, "rope_theta must be a finite number"),
        ("opt", {"ffn_dim": ...}, "'ffn_dim' is missing"),
        ("opt", {"hidden_size": 65}, "hidden_size 65 is not a multiple of num_attention_heads 4"),
    ],
)
def test_errors_name_the_field(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(model_type, **fields)
