"""Packing: from a model's MLPs to a bundled weights file, layer by layer, resumable."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dejavu.errors import CheckpointError, DejavuError, InputError
from dejavu.kernels.flash import crc32c, crc32c_blocks
from dejavu.kernels.matrix import Matrix
from dejavu.weights.bundle_format import (
    Description,
    align,
    describe,
    preamble_for,
    read_description,
)

__all__ = ["LayerNeurons", "NeuronSource", "write_bundle"]

_LOGICAL_BLOCK = 512  # of nearly every disk; a coarser one costs larger reads, nothing else
_CHUNK = 1 << 25  # bytes of records made and written at a time


@dataclass(frozen=True, eq=False)
class LayerNeurons:
    """One layer's MLP. parts: "up", "down" and perhaps "gate", each a Matrix `[neurons, hidden]`
    with one neuron a row (down transposed, as the kernels store it), all of one dtype. biases:
    fp32, up and gate `[neurons]`, down `[hidden]`; only those there are.
    """

    parts: Mapping[str, Matrix]
    biases: Mapping[str, Tensor] = field(default_factory=dict)


class NeuronSource(Protocol):
    """Where neurons come from: a checkpoint (`load.CheckpointNeurons`), a model in memory
    (`models.neurons.ModelNeurons`).

    name: for messages. dtype: of every matrix. neurons: of each layer. biases: parts that have one.
    """

    name: str
    dtype: str
    hidden_size: int
    gated: bool
    neurons: tuple[int, ...]
    biases: Sequence[str]

    def identity(self) -> str:
        """Which model this is, as `Checkpoint.identity` tells."""

    def layer(self, index: int) -> LayerNeurons:
        """One layer's MLP, read now; kept only as long as the caller keeps it."""


def write_bundle(
    path: str | os.PathLike[str],
    source: NeuronSource,
    *,
    order: Sequence[Tensor] | None = None,
    block: int = _LOGICAL_BLOCK,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the neurons of a model as a bundled weights file.

    The file grows under the name PATH.partial and is renamed when it is complete and on the disk;
    an existing file at `path` stays until then. Interrupted or killed, the same call continues
    there after the last whole layer. Holds one layer of the source in memory.

    order: per layer a permutation, int64 `[neurons]`: which neuron stands at each place, e.g. such
    that neurons which are active together are neighbours; default, their own order. block: the
    device's logical block in bytes (512 or 4096): smaller records share one, larger ones are
    aligned to it. progress: called with (layers done, layers in all).

    Raises InputError for a bad order or block and where another process is packing to `path`,
    CheckpointError where the source is damaged, DejavuError where the file cannot be written (the
    disk is full: found before anything is written).
    """
    target = Path(path).expanduser().resolve()
    if target.is_dir():
        raise InputError(f"{target} is a folder; name a file for the bundle")
    description = _describe(source, order, block)
    partial = target.with_name(f"{target.name}.partial")
    with _reported(target, description.size):
        target.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(file, partial)
        layers = len(description.neurons)
        with _reported(target, description.size):
            done = _resume(partial, file, description)
        for index in range(layers):
            if progress is not None:
                progress(index, layers)
            layer = None if index < done else source.layer(index)
            with _reported(target, description.size):
                if layer is not None:
                    _write_layer(file, description, index, layer, order)
                    _commit(file, description, index + 1)
        with _reported(target, description.size):
            if order is not None:
                _write_places(file, description, order)
            tail = _read(file, description.tail, description.size - description.tail)
            _commit(file, description, layers, crc32c(tail))
            partial.replace(target)
            _flush(target.parent)
    finally:
        os.close(file)
    if progress is not None:
        progress(layers, layers)


def _describe(source: NeuronSource, order: Sequence[Tensor] | None, block: int) -> Description:
    if block < 512 or block & (block - 1):
        raise InputError(f"block must be a power of two from 512 on, got {block}")
    neurons, width = source.neurons, source.hidden_size
    total, parts = sum(neurons), 3 if source.gated else 2
    tables: dict[str, tuple[str, tuple[int, ...]]] = {}
    if source.dtype == "int8":
        tables["scales"] = ("float32", (parts, total))
    for part in source.biases:
        shape = (len(neurons), width) if part == "down" else (total,)
        tables[f"bias.{part}"] = ("float32", shape)
    digest = ""
    if order is not None:
        tables["places"] = ("int32", (total,))
        digest = _checked(order, neurons)
    return describe(
        identity=source.identity(),
        source=source.name,
        dtype=source.dtype,
        row=width,
        gated=source.gated,
        neurons=neurons,
        tables=tables,
        logical_block=block,
        order=digest,
    )


def _checked(order: Sequence[Tensor], neurons: tuple[int, ...]) -> str:
    if len(order) != len(neurons):
        raise InputError(f"order has {len(order)} layers, the model {len(neurons)}")
    digest = hashlib.sha256()
    for layer, (places, count) in enumerate(zip(order, neurons, strict=True)):
        if places.shape != (count,) or not torch.equal(places.sort().values, torch.arange(count)):
            raise InputError(f"order of layer {layer} is not a permutation of 0..{count - 1}")
        digest.update(places.numpy().tobytes())
    return digest.hexdigest()


def _resume(partial: Path, file: int, description: Description) -> int:
    """Layers that an earlier call left whole; an unfinished file of anything else is emptied."""
    done = 0
    with contextlib.suppress(CheckpointError):
        preamble, found = read_description(partial, file, complete=False)
        if found == description:
            done = preamble.layers_done
    for index in range(done):
        if not _intact(file, description, index):
            done = index
            break
    if done == 0:
        os.ftruncate(file, 0)
        try:
            os.posix_fallocate(file, 0, description.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                partial.unlink(missing_ok=True)
                raise
            os.ftruncate(file, description.size)
    _commit(file, description, done)
    return done


def _intact(file: int, description: Description, index: int) -> bool:
    """Whether a layer's records are what their checksums say: a power cut may have lost some."""
    begin = description.offsets[index]
    end = begin + align(description.neurons[index] * description.stride, description.block)
    step = max(_CHUNK // description.block, 1) * description.block
    for at in range(begin, end, step):
        data = _read(file, at, min(step, end - at))
        blocks = len(data) // description.block
        expected = _read(file, _checksum_at(description, at), 4 * blocks).view(torch.int32)
        if not torch.equal(crc32c_blocks(data, description.block), expected):
            return False
    return True


def _write_layer(
    file: int,
    description: Description,
    index: int,
    layer: LayerNeurons,
    order: Sequence[Tensor] | None,
) -> None:
    d = description
    count, before = d.neurons[index], sum(d.neurons[:index])
    rows = [_checked_part(d, index, layer, part) for part in d.parts]
    places = torch.arange(count) if order is None else order[index]
    step = max(_CHUNK // d.block, 1) * (d.block // d.stride)
    for first in range(0, count, step):
        chosen = places[first : first + step]
        records = torch.zeros(align(len(chosen) * d.stride, d.block), dtype=torch.uint8)
        grid = records[: len(chosen) * d.stride].view(-1, d.stride)
        for number, part in enumerate(rows):
            stored = part.data[chosen].view(torch.uint8)
            grid[:, number * d.row_bytes : (number + 1) * d.row_bytes] = stored
        at = d.offsets[index] + first * d.stride
        _write(file, records, at)
        _write(file, crc32c_blocks(records, d.block), _checksum_at(d, at))
    if "scales" in d.tables:
        offset, total = d.tables["scales"][2], sum(d.neurons)
        for number, part in enumerate(rows):
            assert part.scale is not None
            _write(file, part.scale, offset + 4 * (number * total + before))
    for part_name, bias in layer.biases.items():
        position = index * d.row if part_name == "down" else before
        _write(file, bias.float().contiguous(), d.tables[f"bias.{part_name}"][2] + 4 * position)


def _checked_part(d: Description, index: int, layer: LayerNeurons, part: str) -> Matrix:
    matrix = layer.parts[part]
    assert matrix.dtype == d.dtype
    assert (matrix.rows, matrix.columns) == (d.neurons[index], d.row)
    if matrix.data.is_floating_point() and not matrix.data.isfinite().all():
        raise CheckpointError(
            f"{d.source}: layer {index}, {part} projection holds NaN or infinity; the file is "
            "damaged, download it again"
        )
    return matrix


def _write_places(file: int, d: Description, order: Sequence[Tensor]) -> None:
    """Where each neuron stands in its layer: the inverse of the order."""
    places = [chosen.argsort().int() for chosen in order]
    _write(file, torch.cat(places), d.tables["places"][2])


def _checksum_at(d: Description, offset: int) -> int:
    return d.checksums + 4 * ((offset - d.offsets[0]) // d.block)


def _commit(file: int, description: Description, layers_done: int, tail_crc: int = 0) -> None:
    """Say how far the file is complete, after all of that is on the disk."""
    os.fsync(file)
    head = preamble_for(description, layers_done, tail_crc).pack() + description.to_json()
    assert len(head) <= (description.offsets[0] if description.offsets else description.tail)
    _write(file, torch.frombuffer(bytearray(head), dtype=torch.uint8), 0)
    os.fsync(file)


def _write(file: int, data: Tensor, offset: int) -> None:
    if data.numel() == 0:
        return
    view = memoryview(data.contiguous().view(torch.uint8).numpy().data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _read(file: int, offset: int, size: int) -> Tensor:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size and (count := os.preadv(file, [view[at:]], offset + at)):
        at += count
    return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _lock(file: int, partial: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"another process is writing {partial}; wait for it, or choose another --out"
        ) from error
    except OSError:  # no locks on this file system
        return
    # The other process may have finished, and what was opened here is its complete file by now.
    if not partial.exists() or partial.stat().st_ino != os.fstat(file).st_ino:
        raise InputError(f"another process has just written {partial.with_suffix('')}")


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _reported(target: Path, size: int) -> Iterator[None]:
    """Turn an `OSError` into an error a user can act on."""
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            room = shutil.disk_usage(target.parent).free
            free = f" It takes {size / 1e6:.1f} MB, {room / 1e6:.1f} MB are free there."
        raise DejavuError(
            f"cannot write {target}: {error.strerror or error}.{free} Make room or choose another "
            "--out; what stood there before is unchanged"
        ) from error
