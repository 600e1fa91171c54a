"""What leaving an entry out costs, in nats, and the price at which reading it pays.

The damage of a neuron left out is taken as `sensitivity / 2 * c^2`, c its contribution
`|a_j| * ||W_down[:, j]||` (of a head: the norm of its output after its slice of the projection):
errors of many entries point in many directions, so their squares add up. One sensitivity a layer is
measured on the model itself; gradients for every neuron were tried and brought nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu.kernels.ops import Activation, Ops
from dejavu.kernels.selection import Selection
from dejavu.sparsity.model_view import MLPView
from dejavu.sparsity.policy import Points, Selector, Site
from dejavu.sparsity.record import down_norms, neuron_activations

_OCTAVE = 4  # bins
_LOW, _HIGH = -80, 60  # powers of two that squared contributions are told apart in
_BINS = (_HIGH - _LOW) * _OCTAVE
PROBE_SHARE = 0.05  # of the sum of c^2 left out where a sensitivity is measured
_MIN_SENSITIVITY = 1e-12


@dataclass(frozen=True, eq=False)
class Neurons:
    """Contributions of one layer's neurons from the MLP's input."""

    mlp: MLPView
    activation: Activation
    norms: Tensor

    @staticmethod
    def of(mlp: MLPView, activation: Activation) -> Neurons:
        """norms: `||W_down[:, j]||`, fp32 `[F]`."""
        return Neurons(mlp, activation, down_norms(mlp))

    def activations(self, x: Tensor, ops: Ops) -> Tensor:
        """fp32 `[N, D]` -> `[N, F]`."""
        return neuron_activations(x, self.mlp, self.activation, ops)

    def squares(self, x: Tensor, ops: Ops) -> Tensor:
        """Squared contributions, fp32 `[N, F]`."""
        return self.activations(x, ops).mul_(self.norms).square_()


class Squares:
    """Histogram of squared contributions of a site and layer, bins a quarter of an octave wide."""

    def __init__(self) -> None:
        self._counts = torch.zeros(_BINS, dtype=torch.float64)
        self._sums = torch.zeros(_BINS, dtype=torch.float64)
        self.rows = 0
        self.finite = True

    def add(self, squares: Tensor) -> None:
        """Count fp32 `[N, entries]`; zeros are left out, they cost nothing."""
        self.rows += len(squares)
        self.finite &= bool(torch.isfinite(squares).all())
        values = squares[squares > 0]
        bins = (values.log2().sub_(_LOW).mul_(_OCTAVE)).long().clamp_(0, _BINS - 1)
        self._counts += torch.bincount(bins, minlength=_BINS).cpu()
        self._sums += torch.bincount(bins, weights=values.double(), minlength=_BINS).cpu()

    @property
    def total(self) -> float:
        """Mean over rows of their sum."""
        return float(self._sums.sum()) / self.rows

    def below(self, limit: float) -> float:
        """Mean over rows of the sum of those below a limit."""
        return float(self._sums[: self._bin(limit)].sum()) / self.rows

    def above(self, limit: float) -> float:
        """Mean over rows of the number of those above a limit."""
        return float(self._counts[self._bin(limit) :].sum()) / self.rows

    def limit_for(self, share: float) -> float:
        """The limit below which lies this share of the sum (or the least more)."""
        reached = (self._sums.cumsum(0) < share * self._sums.sum()).sum()
        return float(2.0 ** (_LOW + (float(reached) + 1) / _OCTAVE))

    @staticmethod
    def _bin(limit: float) -> int:
        if limit <= 0:
            return 0
        return min(max(round((math.log2(limit) - _LOW) * _OCTAVE), 0), _BINS)


class WithoutSmall(Selector):
    """Leaves out one layer's neurons below a limit of squared contribution; the rest is dense."""

    capturable = False

    def __init__(self, layer: int, neurons: Neurons, limit: float) -> None:
        self._layer, self._neurons, self._limit = layer, neurons, limit
        self.left_out = 0.0
        self.rows = 0

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site != Site.NEURONS or layer != self._layer:
            return None
        squares = self._neurons.squares(points.source(site, layer), ops)
        kept = squares >= self._limit
        self.left_out += float(squares.masked_fill_(kept, 0.0).sum(dtype=torch.float64))
        self.rows += len(squares)
        return Selection.from_mask(kept)


def sensitivity(divergence: float, left_out: float) -> float:
    """Nats per half square: from a measured KL divergence and the mean square left out for it."""
    return max(2 * divergence / left_out, _MIN_SENSITIVITY) if left_out > 0 else _MIN_SENSITIVITY


@dataclass(frozen=True, eq=False)
class Entries:
    """One site and layer in the market for bytes. row_bytes: what reading one entry costs."""

    squares: Squares
    sensitivity: float
    row_bytes: float


def find_price(entries: Sequence[Entries], nats: float) -> float:
    """Nats a byte at which perfect selection would lose `nats` a token in all.

    An entry is read where `sensitivity / 2 * c^2` exceeds price times bytes.
    """
    low, high = -140.0, 60.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(lost(e, 2.0**middle) for e in entries) > nats:
            high = middle
        else:
            low = middle
    return float(2.0**low)


def lost(entry: Entries, price: float) -> float:
    """Nats a token that perfect selection at a price loses at one site and layer."""
    limit = 2 * price * entry.row_bytes / entry.sensitivity
    return entry.sensitivity / 2 * entry.squares.below(limit)


def saved_bytes(entry: Entries, price: float, entries: int) -> float:
    """Bytes a token that perfect and free selection at a price would not read."""
    limit = 2 * price * entry.row_bytes / entry.sensitivity
    return (entries - entry.squares.above(limit)) * entry.row_bytes
