"""The paged key/value cache: blocks of token slots, shared by all sequences of an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.kernels.device import free_memory
from dejavu.kernels.ops import CacheView

BLOCK_SIZE = 32  # tokens


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def cache_budget(device: torch.device) -> int:
    """Bytes for a cache where nobody says: the CPU takes memory only as it is written, a GPU at
    once, and prompts need some beside it."""
    free = free_memory(device)
    return free // 2 if device.type == "cpu" else free * 4 // 5


class KVCache:
    """Keys and values of every layer, `[blocks, BLOCK_SIZE, num_key_value_heads, head_dim]`.

    On the CPU memory is taken lazily by the operating system: untouched blocks cost address space
    only. On a GPU it is taken at once.

    shared: all layers in one memory, for forwards over whole sequences, which read no layer but
    the one they are in. scratch: number of one more block, which is never handed out: rows of a
    captured step that belong to no sequence write there.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        shared: bool = False,
    ) -> None:
        self.num_blocks = self.scratch = num_blocks
        shape = (num_blocks + 1, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)

        def layers() -> list[Tensor]:
            made = 1 if shared else depth
            one = [torch.empty(shape, dtype=dtype, device=device) for _ in range(made)]
            return one * depth if shared else one

        depth = config.num_hidden_layers
        self.keys, self.values = layers(), layers()
        for tensor in (*self.keys, *self.values):
            tensor[self.scratch].zero_()  # read before anything was written: finite
        self._free = list(range(num_blocks - 1, -1, -1))

    @staticmethod
    def token_bytes(config: ModelConfig, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that a token takes in all layers."""
        width = config.num_key_value_heads * config.head_dim
        return 2 * dtype.itemsize * config.num_hidden_layers * width

    def view(self, layer: int, block_table: Tensor, lengths: Tensor) -> CacheView:
        """What attention of one layer sees: block_table int32 `[B, max_blocks]`, lengths `[B]`."""
        return CacheView(self.keys[layer], self.values[layer], block_table, lengths)

    def take_memory(self, most: int) -> None:
        """Take the memory of the blocks that are handed out first, up to `most` bytes, now and not
        as they are used. What they hold is lost: for a cache that nobody uses yet."""
        one = sum(tensor[0].nbytes for tensor in (*self.keys, *self.values))
        blocks = min(self.num_blocks, most // one)
        for tensor in (*self.keys, *self.values):
            tensor[:blocks].zero_()

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
