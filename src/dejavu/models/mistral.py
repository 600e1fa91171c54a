"""Mistral 7B and its dense successors (Jiang et al., 2023, https://arxiv.org/abs/2310.06825).

Llama with a sliding window in every layer; from version 0.2 on the window is null.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dejavu.config import ModelConfig
from dejavu.models.config_fields import Fields, layer_windows
from dejavu.models.llama import CHECKPOINT_NAMES, gated_decoder, sanitize

__all__ = ["CHECKPOINT_NAMES", "config_from_hf", "sanitize"]


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Mistral `config.json`. Raises ConfigError naming a bad field."""
    f = Fields(hf)
    config = gated_decoder(f, "mistral", num_key_value_heads=8, **f.special_tokens(bos=1, eos=2))
    window = f.optional_integer("sliding_window", 4096)
    types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    f.only("layer_types", types, "by a mistral model, whose layers are all alike")
    return replace(config, windows=layer_windows(types, window))
