"""The compiled kernels as Python sees them: the extension, handles, recorded programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dejavu.errors import BackendError, InputError
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.selection import Selection, tile_size

try:
    import dejavu.kernels._native as _native
except ImportError:  # installed without a compiler: everything but NativeOps works
    _native = None


def extension() -> Any:
    """The compiled module; BackendError tells what to do where it is missing."""
    if _native is None:
        raise BackendError(
            "the compiled kernels are missing from this installation of dejavu-llm: reinstall it "
            "where a C++17 compiler (g++ or clang++) and OpenMP are available"
        )
    return _native


def available_isas() -> list[str]:
    """Instruction sets that this build has and this machine can run, the best last."""
    isas: list[str] = extension().available_isas()
    return isas


def default_threads() -> int:
    """Physical cores this process may run on (a second hyper-thread adds no memory bandwidth)."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)


def measure_read_bandwidth(
    threads: int | None = None, *, size: int = 1 << 28, repeats: int = 10
) -> float:
    """Best rate in GB/s at which `threads` threads read `size` bytes; size well above any cache."""
    rates: list[float] = extension().read_bandwidth(size, threads or default_threads(), repeats)
    return max(rates)


class Program:
    """Recorded calls over fixed tensors: `run` reads the same inputs and refills the same outputs.

    Everything the calls read or write is kept alive. Not for two threads at a time: outputs are
    shared (the calls themselves are serialised).
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._kept: list[object] = []

    def keep(self, *things: object) -> None:
        """Keep tensors and handles alive as long as the program."""
        self._kept.extend(things)

    def run(self) -> None:
        """Run every call in order, in one parallel region.

        Raises InputError when an id, a position, a length or a block lies outside its table.
        """
        raise_fault(self._recorder.run())

    def profile(self) -> list[tuple[str, float]]:
        """Run once; each call's name and seconds."""
        times: list[tuple[str, float]] = self._recorder.profile()
        return times


_FAULTS = {
    1: "a token id lies outside the embedding table",
    2: "a position lies outside the rotary table",
    3: "a sequence length is negative or above max_blocks * block_size of its block table",
    4: "a block table names a block that the cache does not have",
}


def raise_fault(fault: int) -> None:
    """InputError for a fault that a kernel met in the data; 0 is none."""
    if fault:
        raise InputError(_FAULTS[fault])


def require(condition: bool, message: str) -> None:
    """InputError with the message unless the condition holds."""
    if not condition:
        raise InputError(f"native kernels: {message}")


_handles: WeakKeyDictionary[Matrix | Selection, Any] = WeakKeyDictionary()


def matrix_handle(weight: Matrix) -> Any:
    """The C++ handle; a Matrix is frozen, so its addresses hold as long as it lives."""
    handle = _handles.get(weight)
    if handle is None:
        data, scale = weight.data, weight.scale
        require(data.device.type == "cpu", f"weights must be on the CPU, not {data.device}")
        handle = _native.Matrix(
            data.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            getattr(_native.Dtype, weight.dtype),
            weight.rows,
            weight.columns,
        )
        _native.use_large_pages(data.data_ptr(), data.nbytes)
        _handles[weight] = handle
    return handle


def register_handle(weight: Matrix, handle: Any) -> None:
    """Give a matrix whose rows lie elsewhere the C++ handle that finds them."""
    _handles[weight] = handle


def selection_handle(selection: Selection | None, entries: int, rows: int, *, block: bool) -> Any:
    """Handle of a selection among `entries` things (or among blocks of them), None for None."""
    if selection is None:
        return None
    s = selection
    require(
        s.entries > 0 and (entries % s.entries == 0 if block else entries == s.entries),
        f"a selection has {s.entries} entries, the op {entries} channels",
    )
    require(
        s.mask is None or s.mask.shape[0] == rows,
        f"a selection was made for {0 if s.mask is None else len(s.mask)} rows, the op has {rows}",
    )
    handle = _handles.get(s)
    if handle is None:
        tile = tile_size(s.entries)
        shape = (-(-s.entries // tile), tile)
        for name, tensor, dtype, expected in (
            ("indices", s.indices, torch.int32, shape),
            ("counts", s.counts, torch.int32, shape[:1]),
            ("mask", s.mask, torch.uint8, (-1, s.entries)),
            ("active", s.active, torch.int64, (1,)),
        ):
            if tensor is not None:
                require(
                    tensor.dtype == dtype
                    and tensor.is_contiguous()
                    and tensor.device.type == "cpu"
                    and tensor.shape[-len(expected) :][-1] == expected[-1]
                    and tensor.ndim == len(expected)
                    and expected[0] in (-1, tensor.shape[0]),
                    f"selection.{name} must be a contiguous {dtype} tensor {expected} on the CPU",
                )
        handle = _native.Selection(
            s.entries,
            tile,
            s.indices.data_ptr(),
            s.counts.data_ptr(),
            0 if s.mask is None else s.mask.data_ptr(),
            0 if s.active is None else s.active.data_ptr(),
        )
        _handles[s] = handle
    return handle
