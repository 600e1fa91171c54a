"""A weight matrix as the kernels read it: rows that lie together, one dtype, perhaps scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,  # on a GPU only: the CPU kernels have bf16, which costs the same
    "int8": torch.int8,
}
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights `[rows, columns]`, row-major and contiguous; what a selection skips is whole rows.

    A projection that is *selected by output* (q, k, v, up, gate, lm_head, a predictor's stages)
    stores one output a row; one that is *selected by input* (o, down) is stored transposed, one
    input channel a row, so that a skipped head or neuron is contiguous in both (Deja Vu, section
    4.3). The kernels never care: `ops.linear` takes dot products with rows, `ops.combine` adds up
    rows.

    data: fp32, bf16, fp16 or int8 `[rows, columns]`.
    scale: fp32 `[rows]` for int8 (weight = data * scale of its row), else None.
    """

    data: Tensor
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.data.ndim == 2
        assert self.data.is_contiguous()
        assert self.data.dtype in WEIGHT_DTYPES.values()
        assert (self.scale is not None) == (self.data.dtype == torch.int8)
        assert self.scale is None or (
            self.scale.shape == (self.rows,)
            and self.scale.dtype == torch.float32
            and self.scale.is_contiguous()
        )

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    @property
    def dtype(self) -> str:
        """ "fp32", "bf16", "fp16" or "int8"."""
        return next(name for name, dtype in WEIGHT_DTYPES.items() if dtype == self.data.dtype)

    @property
    def device(self) -> torch.device:
        """Where its data (and scales) lie."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes a full read costs, scales included."""
        scale = 0 if self.scale is None else self.scale.nbytes
        return self.data.nbytes + scale

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Matrix:
        """The same on a device; itself where it is there already."""
        if self.device == device:
            return self
        data, scale = self.data.to(device, non_blocking=non_blocking), self.scale
        return Matrix(data, None if scale is None else scale.to(device, non_blocking=non_blocking))

    def float(self) -> Tensor:
        """fp32 `[rows, columns]`; a copy unless the matrix is fp32 already."""
        dense = self.data.float()
        return dense if self.scale is None else dense.mul_(self.scale[:, None])

    def gather(self, rows: Tensor) -> Tensor:
        """fp32 `[len(rows), columns]` of the numbered rows."""
        dense = self.data[rows].float()
        return dense if self.scale is None else dense * self.scale[rows][:, None]

    @staticmethod
    def from_float(weight: Tensor, dtype: str) -> Matrix:
        """Store a float matrix `[rows, columns]` as `dtype`.

        int8 is symmetric, -127..127, scale = largest magnitude of the row / 127, 1 for a row of
        zeros. A search for the clipping ratio of least squared error was measured and left out: on
        a ReLU model of 30M and a SwiGLU model of 135M it lowers the error by under 1 % of itself.
        """
        if dtype != "int8":
            return Matrix(weight.to(WEIGHT_DTYPES[dtype]).contiguous())
        weight = weight.float()
        largest = weight.abs().amax(dim=1) if weight.numel() else weight.new_zeros(len(weight))
        # Below the smallest normal number a quotient by 127 would lose its digits or become 0.
        scale = (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)
        scale = torch.where(largest > 0, scale, 1.0)
        data = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return Matrix(data.contiguous(), scale)
