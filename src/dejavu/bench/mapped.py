"""The rival that needs no code of ours: all weights in a mapped file, pages come when touched.

A system keeps what fits of a mapped file in memory and drops the rest. Decoding passes through the
file from end to end, again for every token, so that least recently used, which drops what is needed
next but one, keeps next to nothing. Here the mapping gets more than any system would give it: as
many of its bytes as the limit allows are locked in memory, and only the rest is dropped after every
token. No control group is needed for that, and the outcome does not depend on one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from dejavu.errors import DejavuError
from dejavu.flash.store import placeholders
from dejavu.kernels.compiled import extension, register_handle
from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.weights.bundle import Bundle

__all__ = ["MappedNeurons"]

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Residency:
    """Bytes of the mapping that were in memory. locked: kept there throughout."""

    locked: int
    after_dropping: int


class MappedNeurons:
    """A bundle's neurons as matrices over a mapping of the file, for `NativeOps`.

    limit: bytes of it that may stay in memory. matrices: by weight name, as `placeholders` names
    them. To be closed, after everything that reads the matrices is gone.

    Raises DejavuError where the file cannot be mapped or so much memory not be locked.
    """

    def __init__(self, bundle: Bundle, limit: int) -> None:
        description = bundle.description
        self._file = os.open(bundle.path, os.O_RDONLY | os.O_CLOEXEC)
        self._start = description.offsets[0] // _PAGE * _PAGE
        size = description.tail - self._start
        try:
            self._map = mmap.mmap(
                self._file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=self._start
            )
        except OSError as error:
            os.close(self._file)
            raise DejavuError(
                f"{bundle.path} cannot be mapped into memory: {error.strerror}; raise the limit on "
                "address space (ulimit -v)"
            ) from error
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data)
        self._size = size
        self._locked = min(limit, size) // _PAGE * _PAGE
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Before anything is locked, or what packing left in the page cache would stay there.
        self.drop(everything=True)
        if self._libc.mlock(ctypes.c_void_p(self._address), ctypes.c_size_t(self._locked)):
            number = ctypes.get_errno()
            self.close()
            raise DejavuError(
                f"{self._locked / 1e6:.0f} MB of a mapped file cannot be locked in memory: "
                f"{os.strerror(number)}; raise the limit on locked memory (ulimit -l)"
            )
        self._places = {
            layer: self._slots(bundle, layer).contiguous() for layer in range(bundle.layers)
        }
        self.matrices: Mapping[str, Matrix] = placeholders(bundle)
        stride = description.stride // WEIGHT_DTYPES[bundle.dtype].itemsize
        for layer in range(bundle.layers):
            for index, part in enumerate(bundle.parts):
                matrix = self.matrices[f"layers.{layer}.mlp.{part}.weight"]
                first = description.offsets[layer] - self._start + index * bundle.row_bytes
                handle = extension().Matrix(
                    self._address + first,
                    0 if matrix.scale is None else matrix.scale.data_ptr(),
                    getattr(extension().Dtype, matrix.dtype),
                    matrix.rows,
                    matrix.columns,
                )
                handle.place(self._places[layer].data_ptr(), stride)
                register_handle(matrix, handle)

    def drop(self, *, everything: bool = False) -> None:
        """Give up all pages that are not locked, here and in the page cache."""
        begin = 0 if everything else self._locked
        if begin < self._size:
            self._map.madvise(mmap.MADV_DONTNEED, begin, self._size - begin)
            os.posix_fadvise(
                self._file, self._start + begin, self._size - begin, os.POSIX_FADV_DONTNEED
            )

    def residency(self) -> Residency:
        """What is in memory now, locked or not."""
        pages = -(-self._size // _PAGE)
        found = (ctypes.c_ubyte * pages)()
        self._libc.mincore(ctypes.c_void_p(self._address), ctypes.c_size_t(self._size), found)
        resident = int((np.ctypeslib.as_array(found) & 1).sum())
        return Residency(self._locked, resident * _PAGE)

    def close(self) -> None:
        """Unlock and unmap."""
        self._libc.munlock(ctypes.c_void_p(self._address), ctypes.c_size_t(self._size))
        del self._bytes
        self._map.close()
        os.close(self._file)

    def __enter__(self) -> MappedNeurons:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @staticmethod
    def _slots(bundle: Bundle, layer: int) -> torch.Tensor:
        d = bundle.description
        return ((bundle.offsets(layer) - d.offsets[layer]) // d.stride).int()
