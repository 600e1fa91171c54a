"""Rotary tables against transformers' own rotary modules, for every kind and spelling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, StableLmConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dejavu.config import ModelConfig, RopeConfig
from dejavu.errors import ConfigError
from dejavu.models.config_fields import ROPE_KEYS, Fields, rope_from_hf
from dejavu.models.rope import KINDS, RopeTable

ORIGINAL = 64
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL_KEY = {"original_max_position_embeddings": ORIGINAL}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-int": {"rope_type": "linear", "factor": 3},
    "llama3": {"rope_type": "llama3", **LLAMA3, **ORIGINAL_KEY},
    "llama3-narrow": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.5, **ORIGINAL_KEY},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL_KEY},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-factor-null": {"rope_type": "yarn", "factor": None, **ORIGINAL_KEY},
    "yarn-factor-1": {"rope_type": "yarn", "factor": 1.0, **ORIGINAL_KEY},
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0, **ORIGINAL_KEY},
    "yarn-attention-0.7": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-mscale-pair": {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn-mscale-alone": {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0},
    "yarn-mscale-0": {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.0},
    "yarn-both": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.5,
        "mscale": 2.0,
        "mscale_all_dim": 0.5,
    },
    "yarn-betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-beta-0": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": None},
    "yarn-step": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 4.0},
    # long enough for the default beta_fast of 32 turns to lie within the pairs
    "yarn-long": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn-no-truncate": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL_KEY},
}


def hf_config(parameters: dict[str, Any], limit: int, theta: float, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=limit,
        rope_parameters={"rope_theta": theta, **copy.deepcopy(parameters)},
    )


def table(hf: dict[str, Any], head_dim: int = 16) -> RopeTable:
    """Ours of a `config.json`'s rotary fields."""
    return RopeTable(
        ModelConfig(
            model_type="llama",
            vocab_size=1,
            hidden_size=4 * head_dim,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=head_dim,
            intermediate_size=1,
            max_position_embeddings=hf["max_position_embeddings"],
            activation="silu",
            rope=rope_from_hf(Fields(hf)),
        )
    )


def reference(module: LlamaRotaryEmbedding, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin `[positions, head_dim / 2]` of the reference (which repeats the half)."""
    cos, sin = module(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def assert_close(ours: Tensor, theirs: Tensor, longest: int) -> None:
    """Frequencies agree within a few roundings; at position `longest` that is this much."""
    bound = 8 * torch.finfo(torch.float32).eps * longest
    assert float((ours - theirs).abs().max()) <= bound


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 50.0])
@pytest.mark.parametrize("head_dim", [2, 16, 80])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_match(name: str, head_dim: int, theta: float) -> None:
    limit = 3 * ORIGINAL
    config = hf_config(SCALINGS[name], limit, theta, head_dim)
    ours = table(
        {"max_position_embeddings": limit, "rope_parameters": config.rope_parameters}, head_dim
    )
    positions = torch.arange(limit)
    cos, sin = reference(LlamaRotaryEmbedding(config), positions)
    assert_close(ours.cos[:limit], cos, limit)
    assert_close(ours.sin[:limit], sin, limit)


@pytest.mark.parametrize("name", SCALINGS)
def test_every_spelling_gives_the_same_table(name: str) -> None:
    limit = 3 * ORIGINAL
    scaling = SCALINGS[name]
    kind = scaling["rope_type"]
    rest = {k: v for k, v in scaling.items() if k != "rope_type"}
    expected = table(
        {
            "max_position_embeddings": limit,
            "rope_parameters": {"rope_theta": 50.0, "rope_type": kind, **rest},
        }
    )
    for spelt in ({"type": kind}, {"rope_type": kind}, {"type": kind, "rope_type": kind}):
        for extra in ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}):
            old = {
                "max_position_embeddings": limit,
                "rope_theta": 50.0,
                "rope_scaling": {**spelt, **rest},
                **extra,
            }
            assert torch.equal(table(old).cos, expected.cos)


def test_theta_inside_goes_before_theta_beside_and_the_default_is_10000() -> None:
    def theta(hf: dict[str, Any]) -> float:
        return rope_from_hf(Fields({"max_position_embeddings": 8} | hf)).theta

    assert theta({}) == 10_000.0
    assert theta({"rope_theta": 5.0, "rope_scaling": None}) == 5.0
    assert theta({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7}}) == 7.0
    assert theta({"rope_parameters": {"rope_type": "default"}}) == 10_000.0


def test_original_length_beside_goes_before_the_one_inside() -> None:
    """The reference's order, for configs that carry both (Phi-3's layout)."""
    hf = {
        "max_position_embeddings": 3 * ORIGINAL,
        "original_max_position_embeddings": 20,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL_KEY},
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, **copy.deepcopy(hf))
    cos, _ = reference(LlamaRotaryEmbedding(config), torch.arange(100))
    assert_close(table(hf).cos[:100], cos, 100)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_partial_rotary_factor(kind: str, share: float) -> None:
    hf = {
        "max_position_embeddings": 3 * ORIGINAL,
        "rope_theta": 50.0,
        "partial_rotary_factor": share,
        "rope_scaling": SCALINGS[kind],
    }
    config = StableLmConfig(hidden_size=128, num_attention_heads=4, **copy.deepcopy(hf))
    frequencies, attention = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    angles = torch.outer(torch.arange(3 * ORIGINAL).float(), frequencies)
    ours = table(hf, head_dim=32)
    assert ours.cos.shape[1] == int(32 * share) // 2
    assert_close(ours.cos[: 3 * ORIGINAL], angles.cos() * attention, 3 * ORIGINAL)


def test_frequencies_keep_their_last_bit_at_long_contexts() -> None:
    """At position 131 071 one rounding of a frequency moves an angle by 0.008."""
    config = hf_config(
        SCALINGS["llama3"] | {"original_max_position_embeddings": 8192}, 131_072, 5e5, 128
    )
    ours = table(
        {"max_position_embeddings": 131_072, "rope_parameters": config.rope_parameters}, 128
    )
    last = torch.arange(131_000, 131_072)
    cos, _ = reference(LlamaRotaryEmbedding(config), last)
    assert float((ours.cos[last] - cos).abs().mean()) < 1e-4


DYNAMIC = {"max_position_embeddings": ORIGINAL, "rope_scaling": {"type": "dynamic", "factor": 2.0}}


def dynamic_reference() -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        hf_config({"rope_type": "dynamic", "factor": 2.0}, ORIGINAL, 10_000.0, 16)
    )


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 127, 128])
def test_dynamic_matches_at_every_length(length: int) -> None:
    ours = table(DYNAMIC)
    ours.prepare(length)
    positions = torch.arange(length)
    cos, sin = reference(dynamic_reference(), positions)
    assert_close(ours.cos[:length], cos, length)
    assert_close(ours.sin[:length], sin, length)


def test_dynamic_follows_a_growing_sequence() -> None:
    """As in decoding: every step past the original length has a theta of its own."""
    ours, theirs = table(DYNAMIC), dynamic_reference()
    for length in (50, 64, 65, 66, 90, 91, 128):
        ours.prepare(length)
        cos, _ = reference(theirs, torch.tensor([length - 1]))
        assert_close(ours.cos[length - 1 : length], cos, length)


def test_dynamic_scales_all_rows_of_a_step_by_the_longest() -> None:
    ours = table(DYNAMIC)
    ours.prepare(100)
    cos, _ = reference(dynamic_reference(), torch.tensor([9, 99]))
    assert_close(ours.cos[[9, 99]], cos, 100)


def test_dynamic_does_not_remember_long_sequences() -> None:
    ours = table(DYNAMIC)
    cos, sin = ours.cos, ours.sin
    addresses = cos.data_ptr(), sin.data_ptr()
    fresh = cos[:ORIGINAL].clone()
    seen = {}
    for length in (10, 128, 10, 100, 64, 128, 100):
        ours.prepare(length)
        rows = max(length, ORIGINAL)
        assert torch.equal(cos[:rows], seen.setdefault(length, cos[:rows].clone()))
        if length <= ORIGINAL:
            assert torch.equal(cos[:ORIGINAL], fresh)
    assert ours.cos is cos
    assert ours.sin is sin
    assert (cos.data_ptr(), sin.data_ptr()) == addresses


@pytest.mark.parametrize(
    ("scaling", "limit", "expected"),
    [
        (None, 100, 100),
        ({"type": "linear", "factor": 2.5}, 100, 250),
        ({"type": "dynamic", "factor": 2.0}, 100, 200),
        ({"type": "llama3", **LLAMA3, "original_max_position_embeddings": 50}, 100, 100),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 100, 400),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400, 400),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 300, 300),
    ],
)
def test_context_length(scaling: dict[str, Any] | None, limit: int, expected: int) -> None:
    ours = table({"max_position_embeddings": limit, "rope_scaling": scaling})
    assert ours.cos.shape == ours.sin.shape == (expected, 8)


def test_kinds_and_their_keys_agree() -> None:
    assert KINDS.keys() == ROPE_KEYS.keys()


def test_unknown_kind_in_a_config_made_by_hand() -> None:
    hf = {"max_position_embeddings": 8}
    config = table(hf)
    assert config.cos.shape == (8, 8)
    with pytest.raises(ConfigError, match=r"'longrope'.*known: default, dynamic, linear"):
        RopeTable(
            ModelConfig("llama", 1, 64, 1, 4, 4, 16, 1, 8, "silu", rope=RopeConfig(1e4, "longrope"))
        )


@pytest.mark.parametrize(
    ("head_dim", "scaling"),
    [(15, None), (2, {"type": "dynamic", "factor": 2.0})],
    ids=["odd", "dynamic-2"],
)
def test_impossible_head_dim(head_dim: int, scaling: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        table({"max_position_embeddings": 8, "rope_scaling": scaling}, head_dim)
