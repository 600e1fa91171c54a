"""What the ops mean, in fp64 and independent of both backends, with bounds on fp32 rounding.

`Bounded` carries a value and how far an fp32 result may lie from it: a sum of n products in any
order is off by at most (n + 2) * 2^-24 * sum |a||b| (Higham, Accuracy and Stability, 3.1).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.selection import Selection, tile_size

EPS = 2.0**-24


class Bounded(NamedTuple):
    value: Tensor
    bound: Tensor

    def check(self, result: Tensor) -> None:
        assert result.shape == self.value.shape
        assert result.dtype == torch.float32
        error = (result.double() - self.value).abs()
        worst = (error - self.bound).max() if error.numel() else torch.tensor(0.0)
        assert not result.isnan().any()
        assert worst <= 0, f"off by {error.max():.3g}, allowed {self.bound.max():.3g}"


def exact(x: Tensor) -> Bounded:
    return Bounded(x.double(), torch.zeros(x.shape, dtype=torch.float64))


def product(x: Bounded, weight: Tensor, *extra: Tensor | None) -> Bounded:
    """x `[N, n]` @ weight `[n, out]` plus the extra terms."""
    weight = weight.double()
    value, size = x.value @ weight, x.value.abs() @ weight.abs()
    for term in extra:
        if term is not None:
            value, size = value + term.double(), size + term.double().abs()
    # int8 scales round twice more; 1.01 covers products of roundings.
    bound = (len(weight) + 6) * EPS * 1.01 * size + x.bound @ weight.abs()
    return Bounded(value, bound + 1e-37)


def dotted(x: Bounded, weight: Matrix, *extra: Tensor | None) -> Bounded:
    """x `[N, n]` times stored rows, `[out, n]`, plus the extra terms.

    Inputs of int8 rows may be whole numbers of a step of at most 2^-15 of the largest one of a
    block of 512 (kernels/cpu/whole.h).
    """
    truth = product(x, weight64(weight).T, *extra)
    if weight.scale is None:
        return truth
    bound = truth.bound
    inputs = (x.value.abs() + x.bound).split(512, dim=1)
    for block, part in zip(inputs, weight64(weight).abs().split(512, dim=1), strict=True):
        if block.numel():
            bound = bound + 2.0**-15 * block.amax(dim=1, keepdim=True) * part.sum(dim=1)
    return Bounded(truth.value, bound)


def summed(x: Bounded, weight: Matrix, *extra: Tensor | None) -> Bounded:
    """x `[N, n]` times rows that are added up, `[n, out]`, plus the extra terms.

    Coefficients of int8 rows may be whole numbers of a step of at most 2^-15 of the largest one of
    their tile (of up to 512 rows; kernels/cpu/sums.h).
    """
    truth = product(x, weight64(weight), *extra)
    if weight.scale is None:
        return truth
    coefficients = (x.value.abs() + x.bound) * weight.scale.double()
    bound, tile = truth.bound, tile_size(weight.rows)
    assert tile <= 512
    for c, rows in zip(coefficients.split(tile, 1), weight.data.double().split(tile), strict=True):
        bound = bound + 2.0**-15 * c.amax(dim=1, keepdim=True) * rows.abs().sum(dim=0)
    return Bounded(truth.value, bound)


def weight64(matrix: Matrix) -> Tensor:
    dense = matrix.data.double()
    return dense if matrix.scale is None else dense * matrix.scale.double()[:, None]


def masked(x: Bounded, used: Tensor | None) -> Bounded:
    if used is None:
        return x
    used = used.bool().repeat_interleave(x.value.shape[1] // used.shape[1], dim=1)
    return Bounded(torch.where(used, x.value, 0), torch.where(used, x.bound, 0))


def activated(x: Bounded, name: str, threshold: float) -> Bounded:
    v = x.value
    sigmoid = torch.sigmoid
    match name:
        case "relu":
            y, slope = v.clamp(min=0), 1.0
        case "relu2":
            y, slope = v.clamp(min=0) ** 2, 2 * (v.abs() + x.bound)
        case "silu":
            y, slope = v * sigmoid(v), 1.1
        case "gelu":
            y, slope = 0.5 * v * torch.special.erfc(-v * 2**-0.5), 1.13
        case "gelu_tanh":
            y, slope = v * sigmoid(2 * (2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3)), 1.13
        case "fatrelu":
            y, slope = torch.where(v > threshold, v, 0.0), 1.0
    bound = slope * x.bound
    if name in ("silu", "gelu", "gelu_tanh"):
        bound = bound + 8 * EPS * v.abs()
    if name == "relu2":
        bound = bound + 2 * EPS * y
    if name == "fatrelu":  # next to the step either side is right
        bound = bound + torch.where((v - threshold).abs() <= x.bound, v.abs(), 0.0)
    return Bounded(y, bound)


def times(x: Bounded, y: Bounded) -> Bounded:
    bound = x.bound * (y.value.abs() + y.bound) + x.value.abs() * y.bound
    return Bounded(x.value * y.value, bound + EPS * (x.value * y.value).abs())


def random_weight(rows: int, columns: int, dtype: str, generator: torch.Generator) -> Matrix:
    return Matrix.from_float(torch.randn(rows, columns, generator=generator), dtype)


def whole_weight(rows: int, columns: int, dtype: str, generator: torch.Generator) -> Matrix:
    """Small whole numbers: every sum is exact in fp32, so backends must agree in every bit."""
    data = torch.randint(-2, 3, (rows, columns), generator=generator)
    if dtype == "int8":
        powers = torch.randint(-1, 2, (rows,), generator=generator)
        return Matrix(data.to(torch.int8), torch.exp2(powers.float()))
    return Matrix.from_float(data.float(), dtype)


def misaligned(x: Tensor) -> Tensor:
    """The same values, contiguous, one element into a buffer."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype)
    return buffer[1:].view(x.shape).copy_(x)


def selection_of(mask: Tensor | None) -> Selection | None:
    """Built by hand, entry by entry, so as not to trust Selection.from_mask."""
    if mask is None:
        return None
    rows, entries = mask.shape
    tile = tile_size(entries)
    selection = Selection.empty(entries, rows)
    for t in range(len(selection.counts)):
        listed = [
            e for e in range(t * tile, min(entries, (t + 1) * tile)) if bool(mask[:, e].any())
        ]
        selection.counts[t] = len(listed)
        selection.indices[t, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
        selection.indices[t, len(listed) :] = 2**30  # never to be read
    if selection.mask is not None:
        selection.mask.copy_(mask)
    return selection


def mask_of(kind: str, rows: int, entries: int, generator: torch.Generator) -> Tensor | None:
    """bool `[rows, entries]`: "none", "empty", "all", or "random" with a row that uses nothing."""
    if kind == "none":
        return None
    if kind in ("empty", "all"):
        return torch.full((rows, entries), kind == "all")
    mask = torch.rand(rows, entries, generator=generator) < 0.3
    if rows > 1:
        mask[1] = False
    return mask
