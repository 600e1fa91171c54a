"""`Ops` on a GPU: Triton kernels for decode steps of 1 to 16 rows, fit to be captured in a graph.

Nothing here waits for the device, and memory comes from torch's allocator, which a graph's pool
replaces while a step is captured. Kernels run on the device of their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.gpu.beside import Rider
from dejavu.kernels.gpu.heads import HeadOps
from dejavu.kernels.gpu.launch import ARRIVALS, MAX_ROWS, lists, padded_rows, tile_of
from dejavu.kernels.gpu.norm import norm_kernel
from dejavu.kernels.gpu.pick import follow_kernel, pick_kernel
from dejavu.kernels.gpu.rows import first_kernel, project_kernel, up_kernel
from dejavu.kernels.gpu.select import select_kernel, sign_kernel, tally_kernel
from dejavu.kernels.gpu.sums import sum_rows_kernel
from dejavu.kernels.gpu.tuning import power_of_two
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.selection import Selection

_PICKED = 8192  # logits that a program looks at together
_FIRST_ROWS = 512
_RIDDEN = 8  # tiles of a selection for each column block of the sum that takes them along
_TALLIED, _TALLIERS = 4096, 32  # bytes of a mask that a program counts at once; programs at most


class TritonOps(HeadOps):
    """See `kernels.ops.Ops` for the contract.

    dtype: of norm outputs, the inputs of projections: the weights' own for half-precision weights
    (as in transformers), fp32 for fp32 and in tests. Everything else between kernels is fp32.
    """

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
        if self._collecting:
            return self._collect_first(x, list(projections))
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
        first, constants, firsts = self._ride_first(x)
        self._launch(
            up_kernel, (programs + firsts,),
            x, rows, width, up.weight.data, up.weight.scale, up.bias,
            None if gate is None else gate.weight.data,
            None if gate is None else gate.weight.scale,
            None if gate is None else gate.bias,
            a, flat, total, neurons, *lists(selection),
            None if selection is None else selection.active, tiles, config.shares,
            activation.threshold, *first, **constants, LISTED=listed, ACTIVATION=activation.name,
            TILES=power_of_two(tiles),
            TILE=tile_of(selection), ROWS=padded_rows(rows), BLOCK=config.block, WIDTH=config.width,
            EVEN=width % config.width == 0, STAGES=config.stages,
            EARLY=self._early(selection), num_warps=config.warps,
        )  # fmt: skip
        return self._sum_rows(
            a, down, down_bias, selection, residual, flat=flat, total=total, skip=listed,
        )  # fmt: skip

    def select(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, *, out: Selection | None = None
    ) -> Selection:
        if self._collecting:
            return self._collect_second(hidden, weight, bias, out)
        hidden = hidden.contiguous()
        rows, rank = hidden.shape
        out = self._selection(weight.rows, rows) if out is None else out
        self._fresh.add(out.counts.data_ptr())
        tiles, tile = out.indices.shape
        config = self.tuning.select(rows, rank)
        self._launch(
            select_kernel, (tiles,),
            hidden, rows, weight.data, weight.scale, bias, *lists(out), weight.rows,
            RANK=rank, TILE=tile, ROWS=padded_rows(rows), WIDTH=config.width,
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
        self._fresh.add(out.counts.data_ptr())
        tiles, tile = out.indices.shape
        self._launch(
            sign_kernel, (tiles,),
            x, rows, width, signs, signs.shape[1], thresholds, *lists(out), len(signs),
            TILE=tile, ROWS=padded_rows(rows), num_warps=4,
        )  # fmt: skip
        return out

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(dim=-1)

    def pick(self, logits: Tensor, out: Tensor) -> None:
        """out int64 `[N]` = `argmax` of logits fp32 `[N, V]`; -1 where one is not finite."""
        logits = logits.contiguous()
        rows, entries = logits.shape
        self._launch(
            pick_kernel, (rows,), logits, out, entries,
            BLOCK=min(_PICKED, power_of_two(entries)), num_warps=16,
        )  # fmt: skip

    def follow(self, ids: Tensor, picked: Tensor) -> None:
        """Where ids, int64 `[B]`, are below 0: those picked, int64 `[N]`, row for row and from N on
        the last one's; 0 where that is below 0, too."""
        bucket = len(ids)
        self._launch(
            follow_kernel, (1,), ids, picked, len(picked), bucket,
            BLOCK=power_of_two(bucket), num_warps=1,
        )  # fmt: skip

    def tally(
        self, selection: Selection, rows: int, counter: Tensor, *, live: Tensor | None = None
    ) -> None:
        if self._collecting:
            self._collect_count(selection, counter)
            return
        tiles = selection.indices.shape[0]
        places = 0 if selection.mask is None else selection.mask.numel()
        programs = max(1, min(_TALLIERS, -(-places // _TALLIED)))
        self._launch(
            tally_kernel, (programs,), selection.counts, selection.mask, counter, live, tiles, rows,
            selection.entries, TILES=power_of_two(tiles), WIDTH=_TALLIED, num_warps=4,
        )  # fmt: skip

    def _norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
    ) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        y = torch.empty_like(x, dtype=self.dtype)
        rows = x.numel() // max(1, width)
        if rows:
            if rows == 1:
                self._join()  # here and not at the MLP, which then may come early
            late = bool(self._fresh) or self._joined < self._begun
            self._fresh.clear()
            self._launch(
                norm_kernel, (rows,), x, weight, bias, y, width, eps,
                CENTRED=centred, WIDTH=power_of_two(width), LATE=late,
                num_warps=min(8, max(1, power_of_two(width) // 512)),
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
        if rows > 1 and len(projections) == 1 and self._is_first_stage(projections[0]):
            one, y = projections[0].weight, outputs[0]
            block = power_of_two(max(1, min(4, one.rows // 128)))
            padded = power_of_two(rows)
            step = max(64, 8192 // (block * padded))
            self._launch(
                first_kernel, (-(-one.rows // block),),
                x, rows, width, one.data, one.scale, y, one.rows, ROWS=padded, BLOCK=block,
                WIDTH=step, EVEN=width % step == 0, STAGES=3, num_warps=8,
            )  # fmt: skip
            return
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
        first, constants, firsts = self._ride_first(x)
        channels = [max(1, (p.weight.rows if p else 1) // entries) for p in _three(projections)]
        self._launch(
            project_kernel, (grid + firsts,),
            x, rows, width, *arguments[:-1], *lists(selection), entries, *channels, *first,
            **constants, SELECTED0=kinds[0], SELECTED1=kinds[1], SELECTED2=kinds[2],
            TILE=tile_of(selection), ROWS=padded_rows(rows), BLOCK=config.block, WIDTH=config.width,
            EVEN=width % config.width == 0, STAGES=config.stages,
            EARLY=self._early(selection), num_warps=config.warps,
        )  # fmt: skip

    def _is_first_stage(self, projection: Projection) -> bool:
        weight, bias, selection = projection
        return (
            weight.data.dtype == torch.int8
            and weight.rows <= _FIRST_ROWS
            and bias is None
            and selection is None
        )

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
        indices, counts, mask = lists(selection)
        config = self.tuning.sums(rows, width, columns, weight.data.element_size(), kind)
        blocks = -(-columns // config.width)
        assert blocks <= ARRIVALS
        partial = self._empty(config.shares, rows, columns) if config.shares > 1 else None
        second, constants, ridden = self._ride_second(_RIDDEN * blocks if rows == 1 else 0)
        self._launch(
            sum_rows_kernel, (blocks, config.shares + -(-ridden // blocks)),
            x, rows, width, weight.data, weight.scale, bias,
            None if residual is None else residual.contiguous(), out, columns,
            flat, total, indices, counts, None if kind == "flat" else mask, tiles, entries,
            partial, self._arrived, config.shares, *second, **constants,
            LIST=kind, SKIP=skip, GUARD=selection is not None, CHANNELS=max(1, width // entries),
            JOIN=16 if rows == 1 else 2, TILES=power_of_two(tiles), TILE=tile_of(selection),
            ROWS=padded_rows(rows), BLOCK=config.block, COLUMNS=config.width,
            EVEN=columns % config.width == 0, STAGES=config.stages,
            EARLY=self._early(selection), num_warps=config.warps,
        )  # fmt: skip
        return out

    def _launch_rider(self, rider: Rider) -> None:
        if not rider.started:
            rider.started = True
            one, width = [Projection(rider.first)], rider.first.columns
            self._project(rider.x, 1, width, one, [rider.hidden])
        if rider.done or rider.second is None or rider.bias is None:
            return
        rider.done = True
        out = self.select(rider.hidden, rider.second, rider.bias, out=rider.out)
        if rider.counter is not None:
            self.tally(out, 1, rider.counter)

    def _selection(self, entries: int, rows: int) -> Selection:
        return Selection.empty(entries, rows, device=self.device)


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
