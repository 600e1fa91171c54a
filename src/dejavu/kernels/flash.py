"""Reading records of one file with many reads outstanding (C++: `cpu/flash.h`).

Reads go past the page cache where the file system allows it, neighbours become one read, and every
block is compared with its CRC-32C before anything of it is copied to where it is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu.errors import CheckpointError, InputError
from dejavu.kernels.compiled import extension

__all__ = ["Blocks", "FlashReader", "ReadCounters", "crc32c", "crc32c_blocks"]

MAX_DEPTH = 256


def crc32c(data: Tensor) -> int:
    """CRC-32C (RFC 3720, appendix B.4) of a contiguous CPU tensor's bytes."""
    assert data.is_contiguous()
    assert data.device.type == "cpu"
    checksum: int = extension().crc32c(data.data_ptr(), data.nbytes)
    return checksum


def crc32c_blocks(data: Tensor, size: int) -> Tensor:
    """CRC-32C of every `size` bytes of contiguous uint8 `[n * size]`; int32 `[n]` (its bits)."""
    assert data.is_contiguous()
    assert data.dtype == torch.uint8
    assert data.numel() % size == 0
    out = torch.empty(data.numel() // size, dtype=torch.int32)
    extension().crc32c_blocks(data.data_ptr(), size, len(out), out.data_ptr())
    return out


@dataclass(frozen=True)
class Blocks:
    """What of a file can be read: from byte `start` on, blocks of `size` bytes.

    checksums: int32 `[blocks]`, the bits of each block's CRC-32C.
    """

    start: int
    size: int
    checksums: Tensor


@dataclass(frozen=True)
class ReadCounters:
    """Since the reader was opened or its counters were reset.

    requests, bytes_wanted: what was asked for. reads, bytes_read: what the device did for it.
    busy_seconds: at least one read was outstanding. wait_seconds: callers stood still in `wait`.
    depth_seconds: reads outstanding (or waiting for their turn, `queue_depth` at most) times how
    long.
    """

    requests: int
    bytes_wanted: int
    bytes_read: int
    reads: int
    busy_seconds: float
    wait_seconds: float
    depth_seconds: float = 0.0

    @property
    def depth(self) -> float | None:
        """Reads outstanding, mean over the time that any were; None: none were."""
        return self.depth_seconds / self.busy_seconds if self.depth_seconds else None

    @property
    def gigabytes_per_second(self) -> float | None:
        """While reads were outstanding; None: none were."""
        return self.bytes_read / self.busy_seconds / 1e9 if self.busy_seconds else None


class FlashReader:
    """Outstanding reads of records of one file. Any number of readers and processes may share it.

    path: the file. blocks: where records may lie. stat: of the file as it was when `blocks` was
    read from it; a file that was replaced or written to since is refused, here and in `wait`.
    queue_depth: reads outstanding at most. direct: past the page cache (O_DIRECT); the property
    `direct` is False where the file system refuses (tmpfs, some overlays) and reads go through the
    page cache. uring: io_uring where the kernel allows it; the property `backend` is "io_uring" or
    "threads". gap: records so many bytes apart or less become one read. max_read: bytes of one
    read at most, also the largest record (at least one block). describe: names the record at a
    file offset in errors.

    Raises InputError for a bad option, CheckpointError for a file that cannot be opened or is not
    the one that `stat` was taken of, BackendError without the compiled extension.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        blocks: Blocks,
        stat: os.stat_result,
        *,
        queue_depth: int = 32,
        direct: bool = True,
        uring: bool = True,
        gap: int = 0,
        max_read: int = 1 << 16,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        if not 1 <= queue_depth <= MAX_DEPTH:
            raise InputError(f"queue_depth must lie in 1..{MAX_DEPTH}, got {queue_depth}")
        if gap < 0 or max_read < 1:
            raise InputError(f"gap must be 0 or more and max_read 1 or more, got {gap}, {max_read}")
        checksums = blocks.checksums
        assert checksums.dtype == torch.int32
        assert checksums.is_contiguous()
        self.path = Path(path)
        self.queue_depth = queue_depth
        self._describe = describe or (lambda offset: f"the record at byte {offset}")
        self._checksums = checksums
        try:
            self._reader = extension().FlashReader(
                os.fspath(path),
                blocks.start,
                blocks.size,
                len(checksums),
                checksums.data_ptr(),
                (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns),
                queue_depth,
                direct,
                uring,
                gap,
                max(max_read, blocks.size),
            )
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        except RuntimeError as error:
            raise CheckpointError(self._replaced()) from error

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return bool(self._reader.direct)

    @property
    def backend(self) -> str:
        """ "io_uring" or "threads"."""
        return str(self._reader.backend)

    @property
    def handle(self) -> Any:
        """The C++ reader."""
        return self._reader

    def fileno(self) -> int:
        """The file's descriptor."""
        return int(self._reader.fileno())

    def submit(self, offsets: Tensor, lengths: Tensor | int, destinations: Tensor) -> int:
        """Start reading records; returns a ticket at once.

        offsets: int64 `[n]`, bytes in the file, in any order; n may be 0. lengths: int64 `[n]`, or
        one length for all, in bytes. destinations: int64 `[n]`, addresses to copy each record to.
        The three tensors may be reused at once; the memory at the addresses must stay until `wait`
        has returned, and holds a record only then. Not waiting for a ticket leaks its bookkeeping.

        Raises InputError for a record outside the file's blocks or longer than `max_read`.
        """
        count = len(offsets)
        if isinstance(lengths, int):
            lengths = torch.full((count,), lengths, dtype=torch.int64)
        for name, tensor in (
            ("offsets", offsets),
            ("lengths", lengths),
            ("destinations", destinations),
        ):
            if tensor.dtype != torch.int64 or tensor.shape != (count,):
                raise InputError(f"{name} must be int64 [{count}], is {tensor.dtype}")
        offsets, destinations = offsets.contiguous(), destinations.contiguous()
        try:
            ticket: int = self._reader.submit(
                offsets.data_ptr(),
                lengths.contiguous().data_ptr(),
                destinations.data_ptr(),
                count,
            )
        except ValueError as error:
            raise InputError(
                f"{self.path}: byte {error} does not begin a record that could be read"
            ) from error
        return ticket

    def wait(self, ticket: int) -> None:
        """Return when every record of a ticket lies at its destination; once for each ticket.

        Raises CheckpointError naming file, offset and record when a read failed or was short, a
        block is not what was written, or the file was replaced underneath. Destinations then hold
        nothing unchecked, but some records may be missing: use none of them.
        """
        try:
            outcome: tuple[int, int, int] = self._reader.wait(ticket)
        except IndexError as error:
            raise InputError(
                f"ticket {ticket} is not one of this reader's, or waited for"
            ) from error
        self.check(outcome)

    def check(self, outcome: tuple[int, int, int]) -> None:
        """Raise what `wait` raises of a C++ outcome: fault, errno, offset."""
        error = self.error(outcome)
        if error is not None:
            raise error

    def error(self, outcome: tuple[int, int, int]) -> CheckpointError | None:
        """What `check` raises."""
        fault, number, offset = outcome
        if fault == 0:
            return None
        where = f"{self.path}: {self._describe(offset)}, at byte {offset},"
        if fault == 1:
            return CheckpointError(
                f"{where} cannot be read: {os.strerror(number)}; check the disk, then copy or "
                "pack the file again"
            )
        if fault == 2:
            return CheckpointError(f"{where} is cut off: the file is truncated; pack it again")
        if fault == 3:
            return CheckpointError(
                f"{where} is damaged: its checksum does not match; pack the file again"
            )
        return CheckpointError(self._replaced())

    def counters(self) -> ReadCounters:
        """What was wanted and read so far."""
        return ReadCounters(*self._reader.counters())

    def reset_counters(self) -> None:
        """Start counting at 0."""
        self._reader.reset_counters()

    def _replaced(self) -> str:
        return (
            f"{self.path} was replaced or written to while it was in use; open it again, and leave "
            "a file alone that a running model reads"
        )
