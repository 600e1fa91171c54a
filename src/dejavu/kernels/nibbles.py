"""4-bit matrices of predictors, and the whole-number arithmetic that scores with them.

An activation is rounded to 8 bits with one step a row of the batch, a weight to 4 with one step a
stored row; their products are summed exactly. Only the sign of `score - threshold` matters, so the
steps of a second stage are folded into its thresholds and never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.selection import Selection

_STEP = 0.335  # of a normal distribution's spread: least squared error of 16 even levels
_TOP = 7.5
_MOST = 127.0  # magnitude of an 8-bit activation
_EXACT_IN_FLOAT = 1 << 24
_BLOCK = 8  # rows and columns that the CPU kernel keeps together


@dataclass(frozen=True, eq=False)
class Nibbles:
    """Weights `[rows, columns]`: (nibble - 7.5) * step of the row.

    data: uint8 `[rows, ceil(columns / 2)]`, column 2k in the low and 2k + 1 in the high nibble.
    step: fp32 `[rows]`, above 0.
    """

    data: Tensor
    step: Tensor
    columns: int

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.uint8
        assert self.data.shape == (len(self.step), -(-self.columns // 2))
        assert self.data.is_contiguous()
        assert self.step.dtype == torch.float32
        assert self.step.is_contiguous()

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes a full read costs, steps included."""
        return self.data.nbytes + self.step.nbytes

    def codes(self) -> Tensor:
        """uint8 `[rows, columns]`, 0 to 15."""
        pairs = torch.stack((self.data & 15, self.data >> 4), dim=2)
        return pairs.flatten(1)[:, : self.columns]

    def int8(self) -> Matrix:
        """The same numbers, exactly: odd ones from -15 to 15 of half the step."""
        data = self.codes().to(torch.int8).mul_(2).sub_(15)
        return Matrix(data.contiguous(), half_steps(self))

    @staticmethod
    def from_float(weight: Tensor) -> Nibbles:
        """Round a float matrix `[rows, columns]`; the step follows each row's spread."""
        step = step_of(weight)
        codes = (weight / step).sub_(0.5).round_().add_(8).clamp_(0, 15).to(torch.uint8)
        rows, columns = codes.shape
        padded = codes.new_zeros(rows, columns + columns % 2)
        padded[:, :columns] = codes
        data = padded[:, 0::2] | padded[:, 1::2] << 4
        return Nibbles(data.contiguous(), step[:, 0].contiguous(), columns)


def step_of(weight: Tensor) -> Tensor:
    """fp32 `[rows, 1]`: the step that `Nibbles.from_float` takes."""
    spread = weight.float().square().mean(dim=1, keepdim=True).sqrt()
    return (spread * _STEP).clamp_min(torch.finfo(torch.float32).tiny)


def rounded(weight: Tensor) -> Tensor:
    """What is left of a float matrix once it is stored in 4 bits; same shape and dtype."""
    step = step_of(weight)
    return (weight / step).sub_(0.5).round_().add_(0.5).clamp_(-_TOP, _TOP).mul_(step)


def sums(x: Tensor, first: Matrix, second: Matrix) -> tuple[Tensor, Tensor]:
    """Both stages in whole numbers: sums fp32 `[N, entries]` and their unit, fp32 `[N, 1]`.

    first, second: from `Nibbles.int8`. A sum times its unit times the second stage's scale is the
    score without its bias.
    """
    q, unit = _whole(x)
    assert first.scale is not None
    hidden = _dots(q, first) * first.scale
    p, inner = _whole(hidden)
    return _dots(p, second), inner * unit


def _whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded to -127..127, and the unit; a row that is not finite has the unit NaN."""
    peak = x.abs().amax(dim=1, keepdim=True)
    finite = torch.isfinite(peak)
    factor = torch.where(finite & (peak > 0), _MOST / peak, 0.0)
    q = torch.where(finite, x, 0.0).mul_(factor).round_().clamp_(-_MOST, _MOST)
    return q, torch.where(finite, peak / _MOST, torch.nan)


def _dots(q: Tensor, weight: Matrix) -> Tensor:
    exact = weight.columns * _MOST * 15 < _EXACT_IN_FLOAT
    if exact:
        return q @ weight.data.float().t()
    return (q.double() @ weight.data.double().t()).float()


class NibbleOps(Protocol):
    """Backends that choose by 4-bit predictors; others take `Nibbles.int8`."""

    def select_nibbles(
        self,
        x: Tensor,
        first: Nibbles,
        second: Nibbles,
        limits: Tensor,
        *,
        out: Selection | None = None,
    ) -> Selection:
        """Entries of which `sums` times unit exceed the limit: both stages at once.

        x fp32 `[N, D]`; first `[r, D]`, second `[entries, r]`; limits fp32 `[entries]`:
        (threshold - bias) / half the step of the second stage's row.
        """
        ...


_blocks: WeakKeyDictionary[Nibbles, Tensor] = WeakKeyDictionary()
_halves: WeakKeyDictionary[Nibbles, Tensor] = WeakKeyDictionary()


def blocks(weight: Nibbles) -> Tensor:
    """The order in which the CPU kernel reads, uint8 `[blocks of rows, blocks of columns, 32]`;
    made once (see cpu/nibbles.cpp)."""
    found = _blocks.get(weight)
    if found is None:
        down, across = -(-weight.rows // _BLOCK), -(-weight.columns // _BLOCK)
        codes = torch.zeros(down * _BLOCK, across * _BLOCK, dtype=torch.uint8)
        codes[: weight.rows, : weight.columns] = weight.codes()
        lines = codes.view(down, _BLOCK, across, 2, _BLOCK // 2).permute(3, 0, 2, 1, 4)
        found = _blocks[weight] = (lines[0] | lines[1] << 4).flatten(2).contiguous()
    return found


def half_steps(weight: Nibbles) -> Tensor:
    """fp32 `[rows]`, what `Nibbles.int8` has for scales; made once."""
    found = _halves.get(weight)
    if found is None:
        found = _halves[weight] = weight.step / 2
    return found
