"""The paged key/value cache: blocks of token slots, shared by all sequences of an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.kernels.ops import CacheView

BLOCK_SIZE = 32  # tokens


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


class KVCache:
    """fp32 keys and values of every layer, `[blocks, BLOCK_SIZE, num_key_value_heads, head_dim]`.

    Memory is taken lazily by the operating system: untouched blocks cost address space only.
    """

    def __init__(self, config: ModelConfig, num_blocks: int) -> None:
        shape = (num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.keys = [torch.empty(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.empty(shape) for _ in range(config.num_hidden_layers)]
        self._free = list(range(num_blocks - 1, -1, -1))

    def view(self, layer: int, block_table: Tensor, lengths: Tensor) -> CacheView:
        """What attention of one layer sees: block_table int32 `[B, max_blocks]`, lengths `[B]`."""
        return CacheView(self.keys[layer], self.values[layer], block_table, lengths)

    @property
    def free_blocks(self) -> int:
        """Blocks not handed out."""
        return len(self._free)

    def allocate(self, blocks: int) -> list[int]:
        """Hand out blocks; the caller checks `free_blocks` first."""
        assert blocks <= len(self._free)
        return [self._free.pop() for _ in range(blocks)]

    def release(self, blocks: list[int]) -> None:
        """Take blocks back."""
        self._free.extend(reversed(blocks))
