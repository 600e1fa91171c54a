"""Input sparsity: small channels of a projection's input are skipped, with their column of weights.

For `y = W x` a channel counts by `|x_i|` times the norm of column i of W (WINA, arXiv 2505.19427),
and is skipped below a calibrated threshold (TEAL, arXiv 2408.14690): no training, no predictor, and
no activation that has zeros. Projections of one input share one choice. What is skipped must lie
together, so q, k, v and gate, up are held once more, by input channel; o and down always are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dejavu.kernels.channels import Stacked, channel_ops
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import MAX_ROWS
from dejavu.kernels.ops import Activation, Ops
from dejavu.kernels.selection import Selection
from dejavu.sparsity.accounting import LayerReads
from dejavu.sparsity.meter import Meter, MeteredSelector
from dejavu.sparsity.model_view import AffineView, BlockView, Cache, ModelView
from dejavu.sparsity.policy import Points


class InputSite(StrEnum):
    """Inputs whose channels can be skipped: of q, k and v; of o; of gate and up; of down (there a
    channel is a neuron, and the input its activation)."""

    QKV = "qkv"
    O = "o"  # noqa: E741
    GATE_UP = "gate_up"
    DOWN = "down"


_INDEX = {site: number for number, site in enumerate(InputSite)}
Thresholds = Mapping[InputSite, float]
"""Of the weight-aware score at each site; 0 keeps everything."""


@dataclass(frozen=True, eq=False)
class ByInput:
    """The matrices of one block, each by input channel."""

    qkv: Stacked
    o: Stacked
    gate_up: Stacked
    down: Stacked

    @staticmethod
    def of(block: BlockView) -> ByInput:
        """Copies of q, k, v and gate, up in the other orientation; o and down are the model's own.

        int8 matrices are quantised anew, with a scale an input channel. All selectors of a model
        share them.
        """
        found = _made.get(block)
        if found is None:
            found = _made[block] = ByInput._copied(block)
        return found

    @staticmethod
    def _copied(block: BlockView) -> ByInput:
        a, mlp = block.attention, block.mlp
        assert mlp.gate is not None, "checked when the plan was made"
        return ByInput(
            _stacked(a.q, a.k, a.v),
            Stacked(a.o.weight, (a.o.weight.columns,), a.o.bias),
            _stacked(mlp.gate, mlp.up),
            Stacked(mlp.down.weight, (mlp.down.weight.columns,), mlp.down.bias),
        )

    def at(self, site: InputSite) -> Stacked:
        """The projections that read a site's input."""
        found: Stacked = getattr(self, site.value)
        return found

    def norms(self, site: InputSite) -> Tensor:
        """fp32 `[channels]`: how strongly the projections of a site answer to each channel."""
        norms: Tensor = torch.linalg.vector_norm(self.at(site).weight.float(), dim=1)
        return norms


_made: WeakKeyDictionary[BlockView, ByInput] = WeakKeyDictionary()


def _stacked(*parts: AffineView) -> Stacked:
    dtype = parts[0].weight.dtype
    wide = [p.weight.float() if dtype == "int8" else p.weight.data for p in parts]
    weight = Matrix.from_float(torch.cat([w.t() for w in wide], dim=1), dtype)
    bias = None
    if any(p.bias is not None for p in parts):
        rows = [(p.weight.rows, p.bias) for p in parts]
        bias = torch.cat([torch.zeros(n) if b is None else b for n, b in rows])
    return Stacked(weight, tuple(p.weight.rows for p in parts), bias)


def _even(value: float, stacked: Stacked) -> Tensor:
    return torch.full((stacked.weight.rows,), value)


class InputMeter(Meter):
    """Channels read and used at each input site, beside what `Meter` counts."""

    def __init__(self, layers: int, device: torch.device | None = None) -> None:
        super().__init__(layers, device)
        self.channels = torch.zeros(layers, len(InputSite), 3, dtype=torch.int64, device=device)
        self.rows = 1  # of the last step that went through Python

    def reset(self) -> None:
        """Start anew."""
        super().reset()
        self.channels.zero_()

    def snapshot(self) -> list[Tensor]:
        """The counts as they are, for `restore`."""
        return [*super().snapshot(), self.channels.clone()]

    def restore(self, counts: list[Tensor]) -> None:
        """Forget what was counted since a snapshot."""
        super().restore(counts[:-1])
        self.channels.copy_(counts[-1])

    def reads(self, steps: int | None = None) -> list[LayerReads]:
        """Mean over the steps since the last reset, by layer: channels that any row of a step read.

        steps: how many there were; default: as if all had as many rows as the last one.
        """
        return self._means(
            lambda read, used, rows: read / (max(rows // self.rows, 1) if steps is None else steps)
        )

    def used_channels(self) -> list[LayerReads]:
        """Channels that one row used, mean over rows and steps, by layer."""
        return self._means(lambda read, used, rows: used / rows)

    def _means(self, mean: Callable[[int, int, int], float]) -> list[LayerReads]:
        found = []
        for layer in self.channels.tolist():
            counted = {
                str(site): mean(*c) for site, c in zip(InputSite, layer, strict=True) if c[2]
            }
            found.append(LayerReads(inputs=counted))
        return found


class LayerInputs:
    """How one block reads its projections; what `DecoderLM` asks in place of dense projections."""

    def __init__(
        self,
        matrices: ByInput,
        floors: Mapping[InputSite, Tensor],
        activation: Activation,
        meter: InputMeter,
        layer: int,
    ) -> None:
        """floors: fp32 `[channels]` of the magnitudes that are kept, for sites that skip."""
        self.matrices, self._activation = matrices, activation
        self._floors, self._meter, self._layer = floors, meter, layer
        self._buffers: dict[tuple[InputSite, int], Selection] = {}

    def qkv(self, x: Tensor, points: Points, ops: Ops) -> list[Tensor]:
        """q, k, v of the attention's input fp32 `[N, D]`."""
        chosen = self.choose(InputSite.QKV, x, points, ops)
        return channel_ops(ops).project(x, self.matrices.qkv, chosen)

    def o(self, heads: Tensor, residual: Tensor, points: Points, ops: Ops) -> Tensor:
        """residual + output projection of the heads' outputs fp32 `[N, H * d]`."""
        return self._combine(InputSite.O, heads, residual, points, ops)

    def mlp(self, x: Tensor, residual: Tensor, points: Points, ops: Ops) -> Tensor:
        """residual + MLP of its input fp32 `[N, D]`."""
        chosen = self.choose(InputSite.GATE_UP, x, points, ops)
        neurons = channel_ops(ops).gated(x, self.matrices.gate_up, self._activation, chosen)
        return self._combine(InputSite.DOWN, neurons, residual, points, ops)

    def choose(self, site: InputSite, x: Tensor, points: Points, ops: Ops) -> Selection | None:
        """The channels of a site's input that are read; None: all. The first tokens of a text read
        all, see `channels.WHOLE`."""
        floors = self._floors.get(site)
        if floors is None:
            return None
        rows, counter = len(x), self._meter.channels[self._layer, _INDEX[site]]
        self._meter.rows = rows
        if rows > MAX_ROWS:  # a prompt: nothing to replay
            return channel_ops(ops).choose(x, floors, counter, None, points.positions)
        out = self._buffers.get((site, rows))
        if out is None:
            out = self._buffers[site, rows] = Selection.empty(len(floors), rows, device=x.device)
        return channel_ops(ops).choose(x, floors, counter, out, points.positions)

    def _combine(
        self, site: InputSite, x: Tensor, residual: Tensor, points: Points, ops: Ops
    ) -> Tensor:
        chosen, stacked = self.choose(site, x, points, ops), self.matrices.at(site)
        return ops.combine(x, stacked.weight, stacked.bias, chosen, residual)


class InputSelector(MeteredSelector):
    """Skips small input channels of all projections of the blocks, at thresholds a layer."""

    def __init__(
        self, model: ModelView[Cache], thresholds: Sequence[Thresholds], *, weighted: bool = True
    ) -> None:
        """thresholds: of each layer; a site without one, or with 0, reads everything. weighted:
        off, they are of the magnitudes alone, for comparison."""
        self.meter: InputMeter = InputMeter(len(thresholds), model.device)
        blocks = model.weights.blocks
        assert len(blocks) == len(thresholds)
        self.layers: list[LayerInputs | None] = []
        for layer, (block, wanted) in enumerate(zip(blocks, thresholds, strict=True)):
            if not any(wanted.values()):
                self.layers.append(None)
                continue
            matrices = ByInput.of(block)
            floors = {
                site: value / matrices.norms(site) if weighted else _even(value, matrices.at(site))
                for site, value in wanted.items()
                if value > 0
            }
            self.layers.append(LayerInputs(matrices, floors, model.activation, self.meter, layer))

    def inputs(self, layer: int) -> LayerInputs | None:
        return self.layers[layer]
