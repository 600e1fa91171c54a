"""Lazy-kv: keys and values of a head are computed when some query needs them.

A head that a row leaves out at a step costs it no row of q, k, v or o. The step's input is kept in
a ring instead, and the head's next use multiplies all inputs that it lacks at once: its rows of k
and v are being read anyway. Every `RING`-th step of a row must complete all heads, before the ring
comes round. Results are those of computing all keys and values at every step, up to rounding.

Without rotary positions, norms of keys and shared key/value heads; see `DeferredKV`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dejavu.kernels.ops import CacheView, Ops, Projection
from dejavu.kernels.selection import Selection

RING = 16  # inputs kept; a bit each in an int32, and what one tensor core product takes at once


@dataclass(frozen=True, eq=False)
class DeferredView:
    """What one layer owes its cache. Place p of a ring belongs to the latest position that is p
    modulo `RING`.

    inputs: `[slots, RING, D]`, of fp32 or the weights' half dtype. missing: int32 `[slots, H]`, bit
    p where a head lacks the key and value of place p. slots: int32 `[N]`, each row's; two rows with
    one slot are the same row twice. complete: all heads get what they lack, also those that the
    selection leaves out.
    """

    inputs: Tensor
    missing: Tensor
    slots: Tensor
    complete: bool


@runtime_checkable
class LazyOps(Protocol):
    """Ops with kernels for it."""

    def attend_lazily(
        self,
        x: Tensor,
        q: Projection,
        k: Projection,
        v: Projection,
        cache: CacheView,
        deferred: DeferredView,
        *,
        scale: float,
        window: int | None,
        selection: Selection,
    ) -> Tensor:
        """`Ops.linear` of x `[N, D]` and `Ops.attention` in one: fp32 `[N, H, d]`, 0 where a row
        does not use a head. The selection's is the only one; those of the projections are None."""
        ...


def attend_lazily(
    ops: Ops,
    x: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    cache: CacheView,
    deferred: DeferredView,
    *,
    scale: float,
    window: int | None,
    selection: Selection,
) -> Tensor:
    """See `LazyOps`; other ops do it row by row, waiting for the device."""
    if isinstance(ops, LazyOps):
        return ops.attend_lazily(
            x, q, k, v, cache, deferred, scale=scale, window=window, selection=selection
        )
    used = selection.to_mask(len(x))
    heads, block_size = used.shape[1], cache.keys.shape[1]
    for row, (slot, length) in enumerate(
        zip(deferred.slots.tolist(), cache.lengths.tolist(), strict=True)
    ):
        inputs, missing = deferred.inputs[slot], deferred.missing[slot]
        now = (length - 1) % RING
        inputs[now] = x[row].to(inputs.dtype)
        missing |= 1 << now
        served = torch.ones_like(used[row]) if deferred.complete else used[row]
        for position in range(max(0, length - RING), length):
            owed = served & (missing >> position % RING & 1).bool()
            if not owed.any():
                continue
            source = inputs[None, position % RING].to(x.dtype)
            block = int(cache.block_table[row, position // block_size])
            made = ops.linear(source, [k, v])
            for memory, new in zip((cache.keys, cache.values), made, strict=True):
                memory[block, position % block_size][owed] = new.view(heads, -1)[owed].to(
                    memory.dtype
                )
        missing.masked_fill_(served, 0)
    last = (cache.lengths - 1).long()
    blocks = cache.block_table.gather(1, (last // block_size)[:, None]).long()[:, 0]
    places = blocks, last % block_size
    (queries,) = ops.linear(x, [q._replace(selection=selection)])
    return ops.attention(
        queries.view(len(x), heads, -1),
        cache.keys[places].float(),
        cache.values[places].float(),
        cache,
        scale=scale,
        window=window,
        selection=selection,
    )
