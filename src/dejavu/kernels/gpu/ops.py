"""`Ops` on a GPU: Triton kernels for decode steps of 1 to 16 rows, fit to be captured in a graph.

Nothing here waits for the device, and memory comes from torch's allocator, which a graph's pool
replaces while a step is captured. Kernels run on the device of their tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.gpu.attention import attention_kernel
from dejavu.kernels.gpu.lazy import lazy_kernel
from dejavu.kernels.gpu.norm import norm_kernel, rope_kernel
from dejavu.kernels.gpu.rows import project_kernel, up_kernel
from dejavu.kernels.gpu.select import select_kernel, sign_kernel, tally_kernel
from dejavu.kernels.gpu.sums import sum_rows_kernel
from dejavu.kernels.gpu.tuning import Tuning, power_of_two
from dejavu.kernels.lazy import RING, DeferredView
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, CacheView, Projection, T, at_once
from dejavu.kernels.selection import Selection

MAX_ROWS = 16
_EVERYTHING = 1 << 30  # a window no context reaches
_COPY = 2048  # elements of an input that a program keeps for later
_ARRIVALS = 1 << 14  # places where programs count themselves


class TritonOps:
    """See `kernels.ops.Ops` for the contract.

    dtype: of norm outputs, the inputs of projections: the weights' own for half-precision weights
    (as in transformers), fp32 for fp32 and in tests. Everything else between kernels is fp32.
    """

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        tuning: Tuning | None = None,
        pdl: bool | None = None,
    ) -> None:
        """pdl: programmatic dependent launch; default: where the device has it (9.0 on)."""
        self.device = torch.device(device)
        self.dtype = dtype
        self.tuning = Tuning.of(self.device) if tuning is None else tuning
        if pdl is None:
            pdl = (
                self.device.type == "cuda"
                and torch.cuda.get_device_capability(self.device) >= (9, 0)
                and os.environ.get("TRITON_INTERPRET") != "1"
            )
        self.pdl = pdl
        # Selections made ahead run on this stream; None (not a GPU): at once.
        self._beside: Any = None
        if self.device.type == "cuda":
            self._beside = torch.cuda.Stream(self.device)
        self._plain = False
        self._arrived = torch.zeros(_ARRIVALS, dtype=torch.int32, device=self.device)

    def embed(self, ids: Tensor, table: Matrix) -> Tensor:
        return table.gather(ids)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return self._norm(x, weight, bias, eps, centred=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, None, eps, centred=False)

    def linear(self, x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
        x = x.contiguous()
        rows, width = x.shape
        outputs = [self._empty(rows, p.weight.rows) for p in projections]
        for some in _launches(projections):
            chosen = [projections[i] for i in some]
            self._project(x, rows, width, chosen, [outputs[i] for i in some])
        return outputs

    def combine(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        return self._sum_rows(x.contiguous(), weight, bias, selection, residual)

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
        self._launch(
            lazy_kernel, (3 * heads * parts + rows * -(-width // _COPY),),
            x, deferred.inputs, deferred.missing, deferred.slots, cache.lengths, rows, width,
            q.weight.data, q.weight.scale, q.bias, queries,
            k.weight.data, k.weight.scale, k.bias, cache.keys,
            v.weight.data, v.weight.scale, v.bias, cache.values,
            cache.block_table, cache.block_table.stride(0), heads, head_dim, parts,
            *_lists(selection), COMPLETE=deferred.complete, RING=RING,
            BLOCK_TOKENS=cache.keys.shape[1], TILE=_tile(selection),
            COLUMNS=RING * power_of_two(rows), BLOCK=block, WIDTH=config.width,
            EVEN=width % config.width == 0, STAGES=config.stages, COPY=_COPY,
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
        y = self._empty(rows, heads, head_dim)
        partial = self._empty(rows * kv_heads, splits, queries, dim + 2) if splits > 1 else None
        self._launch(
            attention_kernel, (rows, kv_heads, splits),
            q, k, v, cache.keys, cache.values, cache.block_table, lengths, y, scale,
            _EVERYTHING if window is None else window, kv_heads, head_dim,
            cache.block_table.stride(0), *_lists(selection),
            None if deferred is None else deferred.missing,
            None if deferred is None else deferred.slots, partial, self._arrived,
            BLOCK_TOKENS=cache.keys.shape[1], GROUP=group, QUERIES=queries, DIM=dim,
            TOKENS=config.block, SPLITS=splits, SELECTED=selection is not None,
            TILE=_tile(selection), RING=RING, COMPLETE=deferred is not None and deferred.complete,
            STAGES=config.stages, num_warps=config.warps,
        )  # fmt: skip
        return y

    def mlp(
        self,
        x: Tensor,
        up: Projection,
        gate: Projection | None,
        down: Matrix,
        down_bias: Tensor | None,
        activation: Activation,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        neurons = up.weight.rows
        a = self._empty(rows, neurons)
        listed = selection is not None
        tiles = selection.indices.shape[0] if selection is not None else 0
        flat = torch.empty(neurons, dtype=torch.int32, device=x.device) if listed else None
        total = torch.empty(1, dtype=torch.int32, device=x.device) if listed else None
        config = self.tuning.up(rows, neurons, width, up.weight.data.element_size(), listed)
        programs = tiles * config.shares if listed else -(-neurons // config.block)
        self._launch(
            up_kernel, (programs,),
            x, rows, width, up.weight.data, up.weight.scale, up.bias,
            None if gate is None else gate.weight.data,
            None if gate is None else gate.weight.scale,
            None if gate is None else gate.bias,
            a, flat, total, neurons, *_lists(selection),
            None if selection is None else selection.active, tiles, config.shares,
            activation.threshold, LISTED=listed, ACTIVATION=activation.name,
            TILES=power_of_two(tiles),
            TILE=_tile(selection), ROWS=_rows(rows), BLOCK=config.block, WIDTH=config.width,
            EVEN=width % config.width == 0, STAGES=config.stages,
            num_warps=config.warps,
        )  # fmt: skip
        return self._sum_rows(
            a, down, down_bias, None, residual, flat=flat, total=total, skip=listed
        )

    def select(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, *, out: Selection | None = None
    ) -> Selection:
        hidden = hidden.contiguous()
        rows, rank = hidden.shape
        out = self._selection(weight.rows, rows) if out is None else out
        tiles, tile = out.indices.shape
        config = self.tuning.select(rows, rank)
        self._launch(
            select_kernel, (tiles,),
            hidden, rows, weight.data, weight.scale, bias, *_lists(out), weight.rows,
            RANK=rank, TILE=tile, ROWS=_rows(rows), WIDTH=config.width,
            EVEN=rank % config.width == 0,
            STAGES=config.stages, num_warps=config.warps,
        )  # fmt: skip
        return out

    def select_signs(
        self, x: Tensor, signs: Tensor, thresholds: Tensor, *, out: Selection | None = None
    ) -> Selection:
        x = x.contiguous()
        rows, width = x.shape
        out = self._selection(len(signs), rows) if out is None else out
        tiles, tile = out.indices.shape
        self._launch(
            sign_kernel, (tiles,),
            x, rows, width, signs, signs.shape[1], thresholds, *_lists(out), len(signs),
            TILE=tile, ROWS=_rows(rows), num_warps=4,
        )  # fmt: skip
        return out

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(dim=-1)

    def tally(
        self, selection: Selection, rows: int, counter: Tensor, *, live: Tensor | None = None
    ) -> None:
        tiles = selection.indices.shape[0]
        self._launch(
            tally_kernel, (1,), selection.counts, selection.mask, counter, live, tiles, rows,
            selection.entries, TILES=power_of_two(tiles), WIDTH=4096, num_warps=4,
        )  # fmt: skip

    def ahead(self, work: Callable[[], T]) -> Callable[[], T]:
        """On a stream of its own. `work` is `linear`, `select` and `tally` only: sums and attention
        share a workspace with the main stream's."""
        if self._beside is None:
            return at_once(work)
        with torch.cuda.device(self.device):
            pending = self._plain
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):
                self._plain = True
                result = work()
                done = self._beside.record_event()
            self._plain = pending

        def wait() -> T:
            torch.cuda.current_stream(self.device).wait_event(done)
            self._plain = True
            return result

        return wait

    def _norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
    ) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        y = torch.empty_like(x, dtype=self.dtype)
        if x.numel():
            self._launch(
                norm_kernel, (x.numel() // width,), x, weight, bias, y, width, eps,
                CENTRED=centred, WIDTH=power_of_two(width),
                num_warps=min(16, max(1, power_of_two(width) // 512)),
            )  # fmt: skip
        return y

    def _project(
        self,
        x: Tensor,
        rows: int,
        width: int,
        projections: Sequence[Projection],
        outputs: Sequence[Tensor],
    ) -> None:
        total = sum(p.weight.rows for p in projections)
        config = self.tuning.project(rows, total, width, projections[0].weight.data.element_size())
        selections = [p.selection for p in projections if p.selection is not None]
        selection = selections[0] if selections else None
        entries = 1 if selection is None else selection.entries
        arguments: list[Any] = []
        grid = 0
        for i in range(3):
            if i >= len(projections):
                arguments += [None] * 4 + [0, 0]
                continue
            weight, bias, _ = projections[i]
            programs = -(-weight.rows // config.block)
            grid += programs
            arguments += [weight.data, weight.scale, bias, outputs[i], weight.rows, programs]
        if grid == 0 or rows == 0:
            return
        kinds = [i < len(projections) and projections[i].selection is not None for i in range(3)]
        channels = [max(1, (p.weight.rows if p else 1) // entries) for p in _three(projections)]
        self._launch(
            project_kernel, (grid,), x, rows, width, *arguments[:-1], *_lists(selection), entries,
            *channels, SELECTED0=kinds[0], SELECTED1=kinds[1], SELECTED2=kinds[2],
            TILE=_tile(selection), ROWS=_rows(rows), BLOCK=config.block, WIDTH=config.width,
            EVEN=width % config.width == 0, STAGES=config.stages,
            num_warps=config.warps,
        )  # fmt: skip

    def _sum_rows(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        selection: Selection | None,
        residual: Tensor | None,
        *,
        flat: Tensor | None = None,
        total: Tensor | None = None,
        skip: bool = False,
    ) -> Tensor:
        rows, width = x.shape
        columns = weight.columns
        out = self._empty(rows, columns)
        if out.numel() == 0:
            return out
        kind = "flat" if flat is not None else "all" if selection is None else "tiles"
        tiles = 0 if selection is None else selection.indices.shape[0]
        entries = 1 if selection is None else selection.entries
        config = self.tuning.sums(rows, width, columns, weight.data.element_size(), kind)
        blocks = -(-columns // config.width)
        assert blocks <= _ARRIVALS
        partial = self._empty(config.shares, rows, columns) if config.shares > 1 else None
        self._launch(
            sum_rows_kernel, (blocks, config.shares),
            x, rows, width, weight.data, weight.scale, bias,
            None if residual is None else residual.contiguous(), out, columns,
            flat, total, *_lists(selection), tiles, entries,
            partial, self._arrived, config.shares,
            LIST=kind, SKIP=skip, CHANNELS=max(1, width // entries), JOIN=16 if rows == 1 else 2,
            TILES=power_of_two(tiles), TILE=_tile(selection),
            ROWS=_rows(rows), BLOCK=config.block, COLUMNS=config.width,
            EVEN=columns % config.width == 0, STAGES=config.stages,
            num_warps=config.warps,
        )  # fmt: skip
        return out

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """On the device of the tensors, whichever is current.

        After a wait for another stream a launch is a plain one: what it depends on is then not only
        the kernel before it.
        """
        pdl = self.pdl and not self._plain
        self._plain = False
        if pdl:
            options["launch_pdl"] = True
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            kernel[grid](*arguments, PDL=pdl, **options)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _selection(self, entries: int, rows: int) -> Selection:
        return Selection.empty(entries, rows, device=self.device)


def _rows(rows: int) -> int:
    assert rows <= MAX_ROWS, f"decode steps have up to {MAX_ROWS} rows, not {rows}"
    return 1 if rows == 1 else MAX_ROWS


def _lists(selection: Selection | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if selection is None:
        return None, None, None
    return selection.indices, selection.counts, selection.mask


def _tile(selection: Selection | None) -> int:
    return 1 if selection is None else selection.indices.shape[1]


def _launches(projections: Sequence[Projection]) -> list[list[int]]:
    """Up to three projections a launch, with one selection among them."""
    launches: list[list[int]] = []
    selection: Selection | None = None
    for i, projection in enumerate(projections):
        other = projection.selection
        full = not launches or len(launches[-1]) == 3
        if full or (other is not None and selection is not None and other is not selection):
            launches.append([])
            selection = None
        launches[-1].append(i)
        selection = selection if other is None else other
    return launches


def _three(projections: Sequence[Projection]) -> list[Projection | None]:
    return [*projections, *[None] * (3 - len(projections))]


__all__ = ["MAX_ROWS", "TritonOps"]
