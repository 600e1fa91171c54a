"""What a disk can do: random reads of one size at one depth, and sequential reads, both direct.

The yardstick for reading neurons from flash: the same file, size of read and depth as the reader's,
but nobody looks at the bytes. Direct reads, because a file that was just written is in the page
cache and would measure memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dejavu.errors import DejavuError, InputError
from dejavu.kernels.compiled import extension
from dejavu.weights.bundle import Bundle

__all__ = [
    "DiskRate",
    "measure_disk",
    "measure_random",
    "measure_reader",
    "random_read_rate",
    "sequential_read_rate",
]

_SEQUENTIAL = 1 << 20  # bytes of a read
_BATCH = 8  # reads that an io_uring starts together


@dataclass(frozen=True)
class DiskRate:
    """A measured rate. size: bytes of a read. depth: reads outstanding. direct: False where the
    file system has no direct reads, and then it may be memory that was measured. backend: what
    kept the reads outstanding, "io_uring" or "threads"."""

    size: int
    depth: int
    gigabytes_per_second: float
    reads_per_second: float
    direct: bool
    backend: str


def random_read_rate(
    path: str | os.PathLike[str],
    size: int,
    *,
    depth: int = 32,
    seconds: float = 1.0,
    align: int = 512,
    span: tuple[int, int] | None = None,
    seed: int = 0,
) -> DiskRate:
    """Random reads of `size` bytes, aligned to `align`, in an existing file: the fastest of threads
    and io_uring, one by one and in batches as our reader does; `seconds` each.

    span: part of the file to read in (first byte, byte after the last); default, all of it.

    Raises InputError for a file or span smaller than 64 reads, DejavuError where reading fails.
    """
    path = Path(path)
    first, last = span or (0, _size(path))
    first = -(-first // align) * align
    places = (last - first - size) // align + 1
    if places < 64:
        raise InputError(f"{path} is too small to measure random reads of {size} bytes in it")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randint(places, (1 << 16,), generator=generator) * align + first
    return _best(path, offsets, size, depth, seconds)


def sequential_read_rate(
    path: str | os.PathLike[str], *, depth: int = 8, seconds: float = 1.0
) -> DiskRate:
    """Reads of 1 MiB one after the other through an existing file, again from its start.

    Raises InputError for a file smaller than 1 MiB, DejavuError where reading fails.
    """
    path = Path(path)
    offsets = torch.arange(_size(path) // _SEQUENTIAL) * _SEQUENTIAL
    if not len(offsets):
        raise InputError(f"{path} is too small to measure sequential reads: it has under 1 MiB")
    return _best(path, offsets, _SEQUENTIAL, depth, seconds)


def measure_disk(
    bundle: Bundle, *, depth: int = 32, seconds: float = 1.0
) -> tuple[DiskRate, DiskRate]:
    """(random, sequential) of the disk that a bundled weights file is on, in that file; random
    reads of the size and alignment of its blocks."""
    random = measure_random(bundle, depth=depth, seconds=seconds)
    return random, sequential_read_rate(bundle.path, seconds=seconds)


def measure_random(bundle: Bundle, *, depth: int = 32, seconds: float = 1.0) -> DiskRate:
    """The first of `measure_disk`."""
    d = bundle.description
    return random_read_rate(
        bundle.path,
        d.block,
        depth=depth,
        seconds=seconds,
        align=4096 if d.block % 4096 == 0 else 512,
        span=(bundle.blocks.start, d.tail),
    )


def measure_reader(
    bundle: Bundle, *, depth: int = 32, neurons: int = 512, seconds: float = 1.0, seed: int = 0
) -> DiskRate:
    """The same random reads by the bundle's reader: checked, copied, and waited for `neurons` at a
    time with the next ones already submitted, as a decode step that looks ahead does.

    Layers take turns; neurons of one request are random ones that are no neighbours, so that a
    read is one record, as in `random_read_rate`.
    """
    reader = bundle.reader(queue_depth=depth)
    generator = torch.Generator().manual_seed(seed)
    memory = torch.empty(2 * neurons, bundle.record_bytes, dtype=torch.uint8)
    addresses = memory.data_ptr() + torch.arange(2 * neurons) * bundle.record_bytes
    requests = []
    for turn in range(64):
        layer = turn % bundle.layers
        every = max(2, bundle.description.block // bundle.description.stride + 1)
        apart = torch.arange(0, bundle.neurons[layer], every)
        chosen = apart[torch.randperm(len(apart), generator=generator)[:neurons]]
        requests.append(bundle.offsets(layer, chosen))
    waiting = None
    turn = 0
    while reader.counters().busy_seconds < seconds:
        offsets = requests[turn % len(requests)]
        to = addresses[turn % 2 * neurons :][: len(offsets)]
        ticket = reader.submit(offsets, bundle.record_bytes, to)
        if waiting is not None:
            reader.wait(waiting)
        waiting, turn = ticket, turn + 1
    if waiting is not None:
        reader.wait(waiting)
    counted = reader.counters()
    return DiskRate(
        size=bundle.block_bytes,
        depth=depth,
        gigabytes_per_second=counted.bytes_read / counted.busy_seconds / 1e9,
        reads_per_second=counted.reads / counted.busy_seconds,
        direct=reader.direct,
        backend=reader.backend,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be measured: {error.strerror}") from error


def _best(path: Path, offsets: torch.Tensor, size: int, depth: int, seconds: float) -> DiskRate:
    rates = []
    for backend, batch in (("io_uring", 1), ("io_uring", _BATCH), ("threads", 1)):
        try:
            reads, took, direct = extension().read_rate(
                os.fspath(path),
                offsets.data_ptr(),
                len(offsets),
                size,
                depth,
                True,
                backend == "io_uring",
                seconds,
                batch,
            )
        except OSError as error:
            raise DejavuError(f"{path} cannot be read: {error.strerror}; check the disk") from error
        speed = reads / took
        rates.append(DiskRate(size, depth, speed * size / 1e9, speed, direct, backend))
    return max(rates, key=lambda rate: rate.reads_per_second)
