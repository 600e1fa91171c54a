"""A predictor: two small matrices that say which entries of a site a token needs.

score = second (first x) + bias; an entry whose score is above the level's threshold is selected.
No non-linearity stands between the two (as in the paper's code), so the pair is a low-rank stand-in
for the layer's own first matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.nibbles import Nibbles, half_steps, sums
from dejavu.kernels.ops import Ops, Projection


@dataclass(frozen=True, eq=False)
class Predictor:
    """first `[rank, D]`, second `[entries, rank]`: both 4-bit, or both int8 with scales; bias fp32
    `[entries]`."""

    first: Matrix | Nibbles
    second: Matrix | Nibbles
    bias: Tensor

    def __post_init__(self) -> None:
        assert isinstance(self.first, Nibbles) == isinstance(self.second, Nibbles)

    @property
    def rank(self) -> int:
        """Width of the bottleneck."""
        return self.first.rows

    @property
    def entries(self) -> int:
        """Neurons or KV groups it chooses among."""
        return self.second.rows

    @property
    def bits(self) -> int:
        """Of a stored weight: 4, else 8 (or what a matrix in floating point has)."""
        return 4 if isinstance(self.first, Nibbles) else 8 * self.first.data.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes a step reads to choose: the steps of a 4-bit second stage are in its limits."""
        second = self.second.data if isinstance(self.second, Nibbles) else self.second
        return self.first.nbytes + second.nbytes + self.bias.nbytes

    def to(self, device: torch.device) -> Predictor:
        """The same on a device; only the CPU keeps 4 bits. Itself where it is there already."""
        if self.first.device == device:
            return self
        first, second = (
            m.int8() if isinstance(m, Nibbles) else m for m in (self.first, self.second)
        )
        return Predictor(first.to(device), second.to(device), self.bias.to(device))

    def limits(self, threshold: float) -> Tensor:
        """What the sums of a 4-bit predictor have to exceed, see `NibbleOps.select_nibbles`."""
        assert isinstance(self.second, Nibbles)
        return (threshold - self.bias) / half_steps(self.second)

    def scores(self, x: Tensor, ops: Ops) -> Tensor:
        """Both stages: fp32 `[N, D]` -> `[N, entries]`; selected is what exceeds a threshold."""
        if isinstance(self.first, Nibbles):
            assert isinstance(self.second, Nibbles)
            found, unit = sums(x, self.first.int8(), self.second.int8())
            return (found * unit).mul_(half_steps(self.second)).add_(self.bias)
        assert isinstance(self.second, Matrix)
        hidden = ops.linear(x, [Projection(self.first)])[0]
        return ops.linear(hidden, [Projection(self.second, self.bias)])[0]
