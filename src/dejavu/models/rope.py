"""Rotary position tables (placeholder for the kinds beyond default)."""

from __future__ import annotations

import torch

from dejavu.config import ModelConfig


class RopeTable:
    """cos and sin fp32 `[max_position_embeddings, head_dim / 2]`."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.rope is not None
        channels = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position_embeddings).float(), config.rope.theta**-channels
        )
        self.cos, self.sin = angles.cos(), angles.sin()

    def prepare(self, length: int) -> None:
        """Nothing changes with length for the default kind."""
