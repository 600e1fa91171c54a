"""Qwen3, dense (Yang et al., 2025, https://arxiv.org/abs/2505.09388).

Llama with an RMSNorm on every query and key head, and a head size of its own (128 by default,
whatever the hidden size).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dejavu.config import ModelConfig
from dejavu.models import llama
from dejavu.models.config_fields import Fields
from dejavu.models.llama import gated_decoder, sanitize
from dejavu.models.qwen2 import windows_from_hf

__all__ = ["CHECKPOINT_NAMES", "config_from_hf", "sanitize"]

CHECKPOINT_NAMES = {
    **llama.CHECKPOINT_NAMES,
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
}


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3 `config.json`. Raises ConfigError naming a bad field."""
    f = Fields(hf)
    config = gated_decoder(f, "qwen3", num_key_value_heads=32, head_dim=128, **f.special_tokens())
    bias = f.boolean("attention_bias", False)
    return replace(
        config,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=windows_from_hf(f),
    )
