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
from dejavu.kernels.ops import Ops, Projection


@dataclass(frozen=True, eq=False)
class Predictor:
    """first `[rank, D]`, second `[entries, rank]`: int8 with scales; bias fp32 `[entries]`."""

    first: Matrix
    second: Matrix
    bias: Tensor

    @property
    def rank(self) -> int:
        """Width of the bottleneck."""
        return self.first.rows

    @property
    def entries(self) -> int:
        """Neurons or KV groups it chooses among."""
        return self.second.rows

    @property
    def nbytes(self) -> int:
        """Bytes a step reads to choose."""
        return self.first.nbytes + self.second.nbytes + self.bias.nbytes

    def to(self, device: torch.device) -> Predictor:
        """The same on a device; itself where it is there already."""
        if self.first.device == device:
            return self
        return Predictor(self.first.to(device), self.second.to(device), self.bias.to(device))

    def project(self, x: Tensor, ops: Ops) -> Tensor:
        """First stage: fp32 `[N, D]` -> `[N, rank]`."""
        return ops.linear(x, [Projection(self.first)])[0]

    def scores(self, x: Tensor, ops: Ops) -> Tensor:
        """Both stages: fp32 `[N, D]` -> `[N, entries]`; selected is what exceeds a threshold."""
        return ops.linear(self.project(x, ops), [Projection(self.second, self.bias)])[0]
