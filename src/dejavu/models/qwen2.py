"""Qwen2 and Qwen2.5, dense (Yang et al., 2024, https://arxiv.org/abs/2407.10671).

Llama with biases on q, k and v, and windows (off unless asked for) in the upper layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dejavu.config import ModelConfig
from dejavu.errors import ConfigError
from dejavu.models.config_fields import Fields, layer_windows
from dejavu.models.llama import CHECKPOINT_NAMES, gated_decoder, sanitize

__all__ = ["CHECKPOINT_NAMES", "config_from_hf", "sanitize", "windows_from_hf"]


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2 `config.json`. Raises ConfigError naming a bad field."""
    f = Fields(hf)
    config = gated_decoder(f, "qwen2", num_key_value_heads=32, **f.special_tokens())
    return replace(config, attention_bias=True, windows=windows_from_hf(f))


def windows_from_hf(f: Fields) -> tuple[int | None, ...] | None:
    """Windows of Qwen's layers: by `layer_types`, else from layer `max_window_layers` on.

    `use_sliding_window` false or `sliding_window` null mean full attention whatever else is set.
    """
    layers = f.integer("num_hidden_layers")
    window = f.optional_integer("sliding_window", 4096)
    if not f.boolean("use_sliding_window", False):
        window = None
    types = f.hf.get("layer_types")
    if types is None:
        first = 28 if f.hf.get("max_window_layers") is None else f.hf["max_window_layers"]
        if not isinstance(first, int) or first < 0:
            raise ConfigError(f"config.json: max_window_layers must be 0 or more, not {first!r}")
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"config.json: layer_types must list all {layers} layers, not {types!r}")
    return layer_windows(types, window)
