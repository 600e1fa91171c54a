"""Ops of prompts: int8 weights on the decode kernels, 16 tokens at a time, all else on torch.

torch multiplies no int8 rows by fp32 inputs, so `TorchOps` makes an fp32 copy of every matrix for
every piece of a prompt: of relu-30m that alone takes 15 ms, as much as 16 tokens. The kernels read
the int8 rows as they lie. A token's result is that of any other row of theirs, so where a prompt is
cut changes no product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import MAX_ROWS, NativeOps
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection


class PromptRows(TorchOps):
    """`Ops` for any number of rows on the CPU. threads: of the kernels; torch's are its own."""

    def __init__(self, threads: int | None = None) -> None:
        self._kernels = NativeOps(threads)

    def linear(self, x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
        if not all(_suits(p.weight, p.selection) for p in projections):
            return super().linear(x, projections)
        pieces = [self._kernels.linear(rows, projections) for rows in _rows(x)]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def combine(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        if not _suits(weight, selection):
            return super().combine(x, weight, bias, selection, residual)
        return torch.cat(
            [
                self._kernels.combine(rows, weight, bias, None, beside)
                for rows, beside in _pieces(x, residual)
            ]
        )

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
        weights = (up.weight, down) if gate is None else (up.weight, gate.weight, down)
        if not all(_suits(weight, selection) for weight in weights):
            return super().mlp(x, up, gate, down, down_bias, activation, selection, residual)
        return torch.cat(
            [
                self._kernels.mlp(rows, up, gate, down, down_bias, activation, None, beside)
                for rows, beside in _pieces(x, residual)
            ]
        )


def _suits(weight: Matrix, selection: Selection | None) -> bool:
    return weight.data.dtype == torch.int8 and selection is None


def _pieces(x: Tensor, residual: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    if residual is None:
        return [(rows, None) for rows in _rows(x)]
    return list(zip(_rows(x), _rows(residual), strict=True))


def _rows(x: Tensor) -> list[Tensor]:
    """As many at a time as the kernels take."""
    return [x[start : start + MAX_ROWS] for start in range(0, len(x), MAX_ROWS)]
