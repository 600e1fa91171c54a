"""The ops of attention: rotary positions, attention of single tokens, lazy-kv."""

from __future__ import annotations

import torch
from torch import Tensor

from dejavu.kernels.gpu.attention import attention_kernel
from dejavu.kernels.gpu.beside import Riding
from dejavu.kernels.gpu.launch import lists, tile_of
from dejavu.kernels.gpu.lazy import lazy_kernel
from dejavu.kernels.gpu.norm import rope_kernel
from dejavu.kernels.gpu.tuning import power_of_two
from dejavu.kernels.lazy import RING, DeferredView
from dejavu.kernels.ops import CacheView, Projection
from dejavu.kernels.selection import Selection

_EVERYTHING = 1 << 30  # a window no context reaches
_COPY = 2048  # elements of an input that a program keeps for later


class HeadOps(Riding):
    """The part of `kernels.ops.Ops` that is about heads, and `kernels.lazy.LazyOps`."""

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, positions = x.contiguous(), positions.contiguous()
        rows, heads, head_dim = x.shape
        y = torch.empty_like(x)
        if x.numel():
            self._launch(
                rope_kernel, (rows, heads), x, positions, cos, sin, y, heads, head_dim,
                cos.shape[1], DIM=power_of_two(head_dim), num_warps=1,
            )  # fmt: skip
        return y

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: CacheView,
        *,
        scale: float,
        window: int | None,
        selection: Selection | None,
    ) -> Tensor:
        k, v = k.contiguous(), v.contiguous()
        return self._attend(q.contiguous(), k, v, cache, scale, window, selection)

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
        """See `kernels.lazy.LazyOps`."""
        x = x.contiguous()
        rows, width = x.shape
        heads, head_dim = cache.keys.shape[2:]
        queries = self._empty(rows, heads, head_dim)
        config = self.tuning.lazy(rows, heads * head_dim, width, q.weight.data.element_size())
        block = min(config.block, max(16, power_of_two(head_dim)))
        parts = -(-head_dim // block)
        first, constants, firsts = self._ride_first(x)
        self._launch(
            lazy_kernel, (3 * heads * parts + rows * -(-width // _COPY) + firsts,),
            x, deferred.inputs, deferred.missing, deferred.slots, cache.lengths, rows, width,
            q.weight.data, q.weight.scale, q.bias, queries,
            k.weight.data, k.weight.scale, k.bias, cache.keys,
            v.weight.data, v.weight.scale, v.bias, cache.values,
            cache.block_table, cache.block_table.stride(0), heads, head_dim, parts,
            *lists(selection), *first, **constants, COMPLETE=deferred.complete, RING=RING,
            BLOCK_TOKENS=cache.keys.shape[1], TILE=tile_of(selection),
            COLUMNS=RING * power_of_two(rows), BLOCK=block, WIDTH=config.width,
            EVEN=width % config.width == 0, STAGES=config.stages, COPY=_COPY,
            EARLY=self._early(selection),
            num_warps=config.warps,
        )  # fmt: skip
        return self._attend(queries, None, None, cache, scale, window, selection, deferred)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: CacheView,
        scale: float,
        window: int | None,
        selection: Selection | None,
        deferred: DeferredView | None = None,
    ) -> Tensor:
        rows, heads, head_dim = q.shape
        kv_heads = cache.keys.shape[2]
        lengths = cache.lengths.contiguous()
        assert len(lengths) == rows, "prefill runs on TorchOps"
        assert cache.block_table.stride(1) == 1
        assert cache.keys.is_contiguous()
        assert cache.values.is_contiguous()
        group = heads // kv_heads
        queries = 1 if group == 1 else max(16, power_of_two(group))
        dim = max(16, power_of_two(head_dim))
        config = self.tuning.attention(rows, kv_heads, head_dim)
        splits = config.shares
        if rows == 1 and deferred is not None:
            # So few programs read used heads that a selection beside them has ended by now. Joined
            # here, it leaves norm and MLP free to come, and to ask for weights, early.
            self._join()
        y = self._empty(rows, heads, head_dim)
        partial = self._empty(rows * kv_heads, splits, queries, dim + 2) if splits > 1 else None
        second, constants, tiles = self._ride_second(_EVERYTHING if rows == 1 else 0)
        self._launch(
            attention_kernel, (rows + -(-tiles // (kv_heads * splits)), kv_heads, splits),
            q, k, v, cache.keys, cache.values, cache.block_table, lengths, y, scale,
            _EVERYTHING if window is None else window, kv_heads, head_dim,
            cache.block_table.stride(0), *lists(selection),
            None if deferred is None else deferred.missing,
            None if deferred is None else deferred.slots, partial, self._arrived,
            *second, **constants,
            BLOCK_TOKENS=cache.keys.shape[1], GROUP=group, QUERIES=queries, DIM=dim,
            TOKENS=config.block, SPLITS=splits, SELECTED=selection is not None,
            TILE=tile_of(selection), RING=RING, COMPLETE=deferred is not None and deferred.complete,
            STAGES=config.stages, EARLY=self._early(selection), num_warps=config.warps,
        )  # fmt: skip
        return y
