"""What every compiled op needs: the recorder that runs or records calls, checks, results."""

from __future__ import annotations

import torch
from torch import Tensor

from dejavu.errors import BackendError, InputError
from dejavu.kernels.compiled import (
    Program,
    available_isas,
    default_threads,
    extension,
    raise_fault,
    require,
)

MAX_ROWS = 16
MAX_THREADS = 1024  # above it a typing error is likelier than a machine


class NativeCalls:
    """Threads, an instruction set, and calls that run at once or are put down in a program."""

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        isas = available_isas()
        self.isa = isas[-1] if isa is None else isa
        self.threads = default_threads() if threads is None else threads
        if self.isa not in isas:
            raise BackendError(f"isa {self.isa!r} is not available here; choose from {isas}")
        if not 1 <= self.threads <= MAX_THREADS:
            raise InputError(f"threads must lie in 1..{MAX_THREADS}, got {threads}")
        self._recorder = extension().Recorder(self.threads, self.isa, eager=True)
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """What was recorded so far."""
        if self._program is None:
            raise InputError("these ops run at once; record a program with ops.recorder()")
        return self._program

    def _input(
        self, name: str, x: Tensor, *shape: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Checked input; -1 in a shape means any size. Copied when strided, kept when recorded."""
        require(x.dtype == dtype, f"{name} must be {dtype}, not {x.dtype}")
        require(x.device.type == "cpu", f"{name} must be on the CPU, not {x.device}")
        require(
            x.ndim == len(shape)
            and all(want in (-1, have) for want, have in zip(shape, x.shape, strict=True)),
            f"{name} must have shape {shape}, not {tuple(x.shape)}",
        )
        if not x.is_contiguous():
            require(
                self._program is None,
                f"{name} must be contiguous to be recorded: a copy would not see later values",
            )
            x = x.contiguous()
        if self._program is not None:
            self._program.keep(x)
        return x

    def _optional(self, name: str, x: Tensor | None, *shape: int) -> Tensor | None:
        return None if x is None else self._input(name, x, *shape)

    def _output(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        if self._program is not None:
            self._program.keep(out)
        return out

    def _done(self, fault: int, *kept: object) -> None:
        raise_fault(fault)
        if self._program is not None:
            self._program.keep(*kept)

    def _rows(self, name: str, x: Tensor) -> int:
        rows = len(x)
        require(1 <= rows <= MAX_ROWS, f"{name} has {rows} rows, supported are 1 to {MAX_ROWS}")
        return rows
