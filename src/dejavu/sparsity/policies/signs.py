"""Training-free selection by sign bits (SparseInfer, arXiv 2411.12692).

A neuron of a ReLU model is likely active when the signs of the input and of its row agree often:
one XOR and a population count for each 64 channels, a sixteenth of the row's bf16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dejavu.errors import InputError
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.model_view import Cache, ModelView
from dejavu.sparsity.policy import Points, Selector, Site


class Signs(MeteredSelector):
    """signs: int64 `[F, ceil(D / 64)]` a layer; agree_min: int32 `[F]`, agreements needed."""

    def __init__(self, signs: list[Tensor], agree_min: Tensor) -> None:
        super().__init__(len(signs), agree_min.device)
        self._signs, self._agree_min = signs, agree_min
        self._buffers: dict[tuple[int, int], Selection] = {}
        self.predictor_bytes = sum(s.nbytes for s in signs) + agree_min.nbytes * len(signs)

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS:
            return None
        x = points.source(site, layer)
        key = layer, len(x)
        if key not in self._buffers:
            empty = Selection.empty(len(self._agree_min), len(x), device=x.device)
            self._buffers[key] = self.meter.watch(layer, empty)
        selection = self._buffers[key]
        ops.select_signs(x, self._signs[layer], self._agree_min, out=selection)
        self.meter.tally(site, layer, selection, len(x), ops)
        return selection


def signs(model: ModelView[Cache], *, alpha: float = 1.0) -> Selector:
    """Neurons with more than `alpha` agreeing signs for each disagreeing one.

    Larger selects fewer. The signs are those of the matrix before the activation: gate where there
    is one, else up. Raises InputError for a model whose activation has no exact zeros.
    """
    if not alpha > 0:
        raise InputError(f"policy signs: alpha must be above 0, not {alpha:g}")
    if not model.activation.is_sparse:
        raise InputError(
            f"policy signs needs an activation with exact zeros, not {model.activation.name}"
        )
    width = model.config.hidden_size
    needed = int(alpha * width / (1.0 + alpha)) + 1
    rows = [
        (block.mlp.up if block.mlp.gate is None else block.mlp.gate).weight.data
        for block in model.weights.blocks
    ]
    neurons, device = model.config.intermediate_size, rows[0].device
    agree_min = torch.full((neurons,), needed, dtype=torch.int32, device=device)
    return Signs([pack_signs(weight) for weight in rows], agree_min)


def pack_signs(x: Tensor) -> Tensor:
    """int64 `[rows, ceil(columns / 64)]`: bit c % 64 of word c // 64 is 1 where x[:, c] < 0."""
    rows, columns = x.shape
    bits = torch.zeros(rows, -(-columns // 64) * 64, dtype=torch.int64, device=x.device)
    bits[:, :columns] = x < 0
    weights = torch.ones_like(bits[0, :64]) << torch.arange(64, device=x.device)
    return (bits.view(rows, -1, 64) * weights).sum(dim=2)
