"""Norms that the kernel after them computes, in place of a launch of their own.

One row: the kernel that writes the residual leaves each column block's mean and squared distances
from it (combined as by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979), and the projection after it norms what it reads. One program
more writes the normed row for whoever reads it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.gpu.launch import Launcher
from dejavu.kernels.gpu.norm import norm_kernel
from dejavu.kernels.gpu.tuning import power_of_two
from dejavu.kernels.ops import T


@dataclass(frozen=True, eq=False)
class Moments:
    """Of a row, fp32 `[blocks, 2]`: of each block of `span` columns the mean, and the summed
    squares of the distances from it."""

    row: Tensor
    found: Tensor
    span: int


@dataclass(frozen=True, eq=False)
class Pending:
    """A norm that no kernel has computed yet; y is its result."""

    x: Tensor
    y: Tensor
    moments: Moments
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool


@dataclass(frozen=True, eq=False)
class Fused:
    """What a launch reads in place of a normed row: arguments, constants, programs to add."""

    x: Tensor
    arguments: list[Any]
    constants: dict[str, Any]
    programs: int


class Norming(Launcher):
    """fuse_norms: whether norms may wait for the kernel after them, within `deferring`."""

    fuse_norms = False

    def __init__(self, device: str | torch.device, *arguments: Any, **options: Any) -> None:
        """As `Launcher`."""
        super().__init__(device, *arguments, **options)
        self._deferring = False
        self._moments: Moments | None = None
        self._pending: Pending | None = None

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within, norms may wait: nothing reads their results but these ops."""
        self._deferring = self.fuse_norms
        try:
            yield
            self._settle()
        finally:
            self._deferring, self._moments, self._pending = False, None, None

    def ahead(self, work: Callable[[], T]) -> Callable[[], T]:
        """See `Launcher.ahead`; another stream reads finished norms only."""
        self._settle()
        return super().ahead(work)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        pending = self._pending
        if pending is not None:
            address = pending.y.data_ptr()
            if any(isinstance(a, Tensor) and a.data_ptr() == address for a in arguments):
                self._settle()
        super()._launch(kernel, grid, *arguments, **options)

    def _norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
    ) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x, dtype=self.dtype)
        if not x.numel():
            return y
        self._settle()
        moments = self._moments
        if moments is not None and moments.row is x:
            self._pending = Pending(x, y, moments, weight, bias, eps, centred)
        else:
            self._launch_norm(x, y, weight, bias, eps, centred)
        return y

    def _launch_norm(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> None:
        width = x.shape[-1]
        self._fresh.clear()
        super()._launch(
            norm_kernel, (x.numel() // width,), x, weight, bias, y, width, eps,
            CENTRED=centred, WIDTH=power_of_two(width),
            num_warps=min(16, max(1, power_of_two(width) // 512)),
        )  # fmt: skip

    def _settle(self) -> None:
        """Compute a norm that waits."""
        p, self._pending = self._pending, None
        if p is not None:
            self._launch_norm(p.x, p.y, p.weight, p.bias, p.eps, p.centred)

    def _note_moments(self, row: Tensor, span: int) -> Tensor | None:
        """Where a kernel that writes `row`, fp32 `[N, columns]`, in blocks of `span` columns leaves
        what a norm needs of it; None: nobody asks.

        That kernel announces the one after it late, as a norm does, so lists are old from then on.
        """
        self._moments = None
        if not self._deferring or len(row) != 1:
            return None
        found = self._empty(-(-row.shape[1] // span), 2)
        self._moments = Moments(row, found, span)
        self._fresh.clear()
        return found

    def _take_norm(self, x: Tensor) -> Fused:
        """For a launch whose programs norm what they read, if x is a norm that waits."""
        p = self._pending
        if p is None or p.y.data_ptr() != x.data_ptr():
            nothing: dict[str, Any] = {"CENTRED": False, "MOMENTS": 1}
            return Fused(x, [None, 0, 0, None, None, None, 0.0], nothing, 0)
        self._pending = None
        blocks = len(p.moments.found)
        arguments = [p.moments.found, blocks, p.moments.span, p.weight, p.bias, p.y, p.eps]
        constants = {"CENTRED": p.centred, "MOMENTS": power_of_two(blocks)}
        return Fused(p.x, arguments, constants, 1)
