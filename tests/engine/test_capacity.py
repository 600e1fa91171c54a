"""What an engine may hold is settled, or refused by name, before anything is allocated."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from dejavu.engine.capacity import GPU_PREFILL_CHUNK, PREFILL_CHUNK, Capacity
from dejavu.errors import InputError
from dejavu.models.base import DecoderLM
from dejavu.models.kv_cache import BLOCK_SIZE, KVCache

from .stub import ScriptedLM, config

TOKEN = KVCache.token_bytes(config())


def model(context: int = 256, device: str = "cpu") -> DecoderLM:
    stub = ScriptedLM(config(context=context), lambda ids: [])
    stub.device = torch.device(device)
    return cast(DecoderLM, stub)


def blocks(count: int) -> int:
    """Bytes of so many."""
    return count * BLOCK_SIZE * TOKEN


def test_every_sequence_gets_its_whole_context_where_memory_allows() -> None:
    assert Capacity.of(model(), rows=3, memory=blocks(1000)) == Capacity(3, 256, 24, PREFILL_CHUNK)
    found = Capacity.of(model(), rows=3, length=33, memory=blocks(1000), chunk=7)
    assert found == Capacity(3, 33, 6, 7)


def test_memory_bounds_first_the_blocks_and_then_the_length() -> None:
    assert Capacity.of(model(), rows=3, memory=blocks(10)).blocks == 10
    assert Capacity.of(model(), rows=3, memory=blocks(10)).length == 256
    short = Capacity.of(model(), rows=3, memory=blocks(3) - 1)
    assert (short.length, short.blocks) == (64, 2)
    assert Capacity.of(model(), length=64, memory=blocks(2)).blocks == 2


def test_a_gpu_reads_longer_pieces() -> None:
    assert Capacity.of(model(device="cuda"), memory=blocks(9)).chunk == GPU_PREFILL_CHUNK
    assert Capacity.of(model(device="cuda"), memory=blocks(9), chunk=5).chunk == 5


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rows": 0}, r"max_batch must lie in 1\.\.16, not 0"),
        ({"rows": 17}, r"max_batch must lie in 1\.\.16, not 17"),
        ({"chunk": 0}, "prefill_chunk must be at least 1, not 0"),
        ({"length": 1}, r"max_model_len must lie in 2\.\.256, the context.* not 1"),
        ({"length": 257}, r"max_model_len must lie in 2\.\.256, the context.* not 257"),
        ({"memory": blocks(1) - 1}, f"does not hold one block of {BLOCK_SIZE} tokens"),
        ({"memory": blocks(2), "length": 65}, "max_model_len 65 needs a cache of .* 64 tokens fit"),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_name(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Capacity.of(model(), **asked)
