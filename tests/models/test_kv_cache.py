"""Memory of the key/value cache."""

from __future__ import annotations

import pytest
import torch

from dejavu.models.kv_cache import BLOCK_SIZE, KVCache
from engine.stub import config


@pytest.mark.parametrize(("blocks", "taken"), [(0, 0), (2, 2), (9, 3)])
def test_the_blocks_taken_are_those_handed_out_first(blocks: int, taken: int) -> None:
    shape = config()
    cache = KVCache(shape, 3)
    for tensor in (*cache.keys, *cache.values):
        tensor[: cache.scratch].fill_(torch.nan)
    one = BLOCK_SIZE * KVCache.token_bytes(shape)
    cache.take_memory(blocks * one + one // 2)
    order = cache.allocate(3)
    for tensor in (*cache.keys, *cache.values):
        assert not tensor[order[:taken]].any()
        assert tensor[order[taken:]].isnan().all()
