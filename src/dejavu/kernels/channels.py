"""Ops of input sparsity: choose the channels of an input that are read, project through those.

Beside `ops.Ops`, with which they share all conventions: plain PyTorch is the truth and the path of
prefill and evaluation, the compiled kernels those of decode steps. A GPU has none yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dejavu.errors import BackendError
from dejavu.kernels.compiled import extension, matrix_handle, require, selection_handle
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Activation, Ops
from dejavu.kernels.reference import TorchOps, activate
from dejavu.kernels.selection import Selection, tile_size

# Attention puts a large part of its weight on the first tokens of a text, whatever they are
# (Xiao et al., arXiv 2309.17453): an error there reaches every token behind them.
WHOLE = 4  # tokens


class Stacked(NamedTuple):
    """Projections of one input, stored by input channel: `[in, sum of widths]`, side by side.

    bias: fp32 `[sum of widths]` or None.
    """

    weight: Matrix
    widths: tuple[int, ...]
    bias: Tensor | None = None


class ChannelOps(Protocol):
    """N rows, D input channels; activations are fp32."""

    def choose(
        self,
        x: Tensor,
        floors: Tensor,
        counter: Tensor,
        out: Selection | None,
        positions: Tensor | None = None,
    ) -> Selection:
        """Channels of `x` `[N, D]` whose magnitude is not below `floors` fp32 `[D]` (NaN is kept).

        positions: int64 `[N]`, places of the rows in their texts; those before `WHOLE` keep all.
        counter: int64 `[3]` += (channels read, channels used summed over rows, rows). out: buffers
        to fill; default: new ones.
        """
        ...

    def project(self, x: Tensor, stacked: Stacked, selection: Selection | None) -> list[Tensor]:
        """bias + sum over the chosen channels i of `x[:, i] * weight row i`, fp32 `[N, width]` for
        each part."""
        ...

    def gated(
        self, x: Tensor, gate_up: Stacked, activation: Activation, selection: Selection | None
    ) -> Tensor:
        """activation(gate) * up, fp32 `[N, F]`, from a stack of gate and up, F wide each."""
        ...


def channel_ops(ops: Ops) -> ChannelOps:
    """The channel ops on the same backend. Raises BackendError for one that has none."""
    if isinstance(ops, NativeOps):
        return _Native(ops)
    if isinstance(ops, TorchOps):
        return _Torch(ops)
    raise BackendError("input sparsity decodes on the CPU only; use --device cpu or another plan")


class _Torch:
    """Plain PyTorch, any number of rows."""

    def __init__(self, ops: TorchOps) -> None:
        self._ops = ops

    def choose(
        self,
        x: Tensor,
        floors: Tensor,
        counter: Tensor,
        out: Selection | None,
        positions: Tensor | None = None,
    ) -> Selection:
        small = x.abs() < floors
        if positions is not None:
            small &= positions[:, None] >= WHOLE
        chosen = Selection.from_mask(~small)
        self._ops.tally(chosen, len(x), counter)
        if out is not None:
            out.indices.copy_(chosen.indices)
            out.counts.copy_(chosen.counts)
            if out.mask is not None:
                out.mask.copy_(chosen.to_mask(len(x)))
        return chosen if out is None else out

    def project(self, x: Tensor, stacked: Stacked, selection: Selection | None) -> list[Tensor]:
        y = self._ops.combine(x, stacked.weight, stacked.bias, selection, None)
        return [part.contiguous() for part in torch.split(y, list(stacked.widths), dim=1)]

    def gated(
        self, x: Tensor, gate_up: Stacked, activation: Activation, selection: Selection | None
    ) -> Tensor:
        gate, up = self.project(x, gate_up, selection)
        return activate(gate, activation) * up


class _Native:
    """The compiled kernels, at once or recorded as the ops they belong to."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def choose(
        self,
        x: Tensor,
        floors: Tensor,
        counter: Tensor,
        out: Selection | None,
        positions: Tensor | None = None,
    ) -> Selection:
        ops = self._ops
        rows, width = ops._rows("x", x), x.shape[-1]
        x = ops._input("x", x, rows, width)
        floors = ops._input("floors", floors, width)
        require(counter.is_contiguous(), "counter must be contiguous: it is added to in place")
        counter = ops._input("counter", counter, 3, dtype=torch.int64)
        out, chosen = ops._chosen(width, rows, out)
        if positions is not None:
            positions = ops._input("positions", positions, rows, dtype=torch.int64)
        fault = ops._recorder.choose(
            x.data_ptr(),
            rows,
            floors.data_ptr(),
            0 if positions is None else positions.data_ptr(),
            WHOLE,
            chosen,
            counter.data_ptr(),
        )
        ops._done(fault, chosen, out)
        return out

    def project(self, x: Tensor, stacked: Stacked, selection: Selection | None) -> list[Tensor]:
        return self._project(x, stacked, selection, stacked.widths, None)

    def gated(
        self, x: Tensor, gate_up: Stacked, activation: Activation, selection: Selection | None
    ) -> Tensor:
        gate, up = gate_up.widths
        require(gate == up, f"gate is {gate} wide, up {up}")
        (out,) = self._project(x, gate_up, selection, (up,), activation)
        return out

    def _project(
        self,
        x: Tensor,
        stacked: Stacked,
        selection: Selection | None,
        widths: Sequence[int],
        activation: Activation | None,
    ) -> list[Tensor]:
        ops, weight = self._ops, stacked.weight
        require(
            sum(stacked.widths) == weight.columns and len(stacked.widths) <= 3,
            f"a stack of {stacked.widths} does not fit {weight.columns} columns",
        )
        rows = ops._rows("x", x)
        x = ops._input("x", x, rows, weight.rows)
        bias = ops._optional("bias", stacked.bias, weight.columns)
        handle = matrix_handle(weight)
        chosen = selection_handle(selection, weight.rows, rows, block=False)
        outs = [ops._output(rows, width) for width in widths]
        fault = ops._recorder.project(
            x.data_ptr(),
            rows,
            handle,
            0 if bias is None else bias.data_ptr(),
            chosen,
            tile_size(weight.rows),
            activation is not None,
            getattr(extension().Activation, activation.name if activation else "relu"),
            activation.threshold if activation else 0.0,
            [(width, out.data_ptr()) for width, out in zip(widths, outs, strict=True)],
        )
        ops._done(fault, handle, chosen, bias, weight, selection)
        return outs
