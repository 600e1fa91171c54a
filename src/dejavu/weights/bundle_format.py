"""The format of a bundled weights file: what lies where, its header, and how both are checked.

    preamble | description (JSON) | records, layer by layer | tables that stay in memory | checksums

One record is one neuron: its up row, its gate row where there is one, its down column, so that a
neuron costs one read ("row-column bundling", LLM in a flash, https://arxiv.org/abs/2312.11514,
section 3.2). Records are as long as those rows and not a byte longer where that fits the device's
logical block: int8 scales stand in a table in memory and not in the record, because 4 bytes more a
row would push a record of 1024 bytes into a third block of 512, half as much again to read, while
the table costs 4 bytes a row of memory (0.8 % of a row of 512). So do checksums, one for each block
that is read as a whole: a table of them finds not only damaged blocks but also misplaced ones.

All numbers are little-endian.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dejavu.errors import CheckpointError
from dejavu.kernels.flash import crc32c
from dejavu.kernels.matrix import WEIGHT_DTYPES

__all__ = [
    "VERSION",
    "Description",
    "Preamble",
    "align",
    "describe",
    "preamble_for",
    "read_description",
]

VERSION = 1
PAGE = 4096  # what parts of the file are aligned to, whatever the device
_MAGIC = b"DEJAVUFL"
_PREAMBLE = struct.Struct("<8sIIIIII")
_MAX_DESCRIPTION = 1 << 24


@dataclass(frozen=True)
class Preamble:
    """The first bytes, rewritten as packing proceeds; they fit one sector, so never half-written.

    layers_done: the file is complete when it equals the number of layers. tail_crc: of everything
    behind the records, 0 until complete.
    """

    layers_done: int
    description_bytes: int
    description_crc: int
    tail_crc: int

    def pack(self) -> bytes:
        """As it stands in the file."""
        fields = (self.layers_done, self.description_bytes, self.description_crc, self.tail_crc)
        head = _PREAMBLE.pack(_MAGIC, VERSION, *fields, 0)[:-4]
        return head + struct.pack("<I", _checksum(head))


@dataclass(frozen=True)
class Description:
    """Everything about the file that is known before its first record is written.

    identity: of the source model, as a plan names it. source: its name, for messages. dtype: fp32,
    bf16, fp16 or int8. row: values in a row, the hidden size. parts: rows of a record in their
    order, ("up", "down") or ("up", "gate", "down"). neurons: of each layer. record: bytes of a
    record. stride: from one record to the next. block: bytes under one checksum, a whole number of
    strides. offsets: of each layer's first record. tables: name -> (dtype, shape, offset) of what
    stays in memory. checksums: offset of the table of checksums. size: of the file. order: hash of
    the placement of neurons, "" where they stand in their own order.
    """

    identity: str
    source: str
    dtype: str
    row: int
    parts: tuple[str, ...]
    neurons: tuple[int, ...]
    record: int
    stride: int
    block: int
    offsets: tuple[int, ...]
    tables: dict[str, tuple[str, tuple[int, ...], int]]
    checksums: int
    size: int
    order: str

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.row * WEIGHT_DTYPES[self.dtype].itemsize

    @property
    def blocks(self) -> int:
        """Blocks of all layers."""
        return (self.tail - self.offsets[0]) // self.block if self.offsets else 0

    @property
    def tail(self) -> int:
        """Offset behind the last record's block."""
        if not self.offsets:
            return self.checksums
        return self.offsets[-1] + align(self.neurons[-1] * self.stride, self.block)

    def to_json(self) -> bytes:
        """As it stands in the file."""
        return json.dumps(asdict(self), sort_keys=True).encode()


def align(value: int, to: int) -> int:
    """The next multiple."""
    return -(-value // to) * to


def strides(record: int, block: int) -> tuple[int, int]:
    """(stride, bytes under one checksum) of records on a device with a logical block.

    Small records share a block and none crosses into the next; larger ones take whole blocks.
    """
    if record >= block:
        stride = align(record, block)
        return stride, stride
    most = block // record
    return block // next(k for k in range(most, 0, -1) if block % k == 0), block


def describe(
    *,
    identity: str,
    source: str,
    dtype: str,
    row: int,
    gated: bool,
    neurons: tuple[int, ...],
    tables: dict[str, tuple[str, tuple[int, ...]]],
    logical_block: int,
    order: str,
) -> Description:
    """Lay a file out. tables: (dtype, shape) of each, in the order of the file."""
    parts = ("up", "gate", "down") if gated else ("up", "down")
    record = len(parts) * row * WEIGHT_DTYPES[dtype].itemsize
    stride, block = strides(record, logical_block)
    # The description holds the offsets, so room is made for more than any numbers could take.
    at = align(PAGE + 160 * (len(tables) + len(neurons)), PAGE)
    start = at = align(at, block)
    offsets = []
    for count in neurons:
        offsets.append(at)
        at += align(count * stride, block)
    blocks = (at - start) // block
    at = align(at, 64)
    placed = {}
    for name, (kind, shape) in tables.items():
        placed[name] = (kind, shape, at)
        at = align(at + 4 * torch.Size(shape).numel(), 64)
    checksums, at = at, align(at + 4 * blocks, PAGE)
    return Description(
        identity=identity,
        source=source,
        dtype=dtype,
        row=row,
        parts=parts,
        neurons=neurons,
        record=record,
        stride=stride,
        block=block,
        offsets=tuple(offsets),
        tables=placed,
        checksums=checksums,
        size=at,
        order=order,
    )


def _checksum(data: bytes) -> int:
    return crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def preamble_for(description: Description, layers_done: int, tail_crc: int = 0) -> Preamble:
    """The preamble of a file of which some layers are written."""
    text = description.to_json()
    return Preamble(layers_done, len(text), _checksum(text), tail_crc)


def read_description(
    path: Path, file: int, *, complete: bool = True
) -> tuple[Preamble, Description]:
    """Read and check the head of an open file.

    Raises CheckpointError: not a bundled weights file, of another version, damaged, truncated, or
    (where `complete` is asked for) not finished.
    """
    head = os.pread(file, _PREAMBLE.size, 0)
    if len(head) < _PREAMBLE.size or head[:8] != _MAGIC:
        raise CheckpointError(
            f"{path} is not a bundled weights file; make one with: dejavu pack MODEL --out FILE"
        )
    _, version, layers_done, length, crc, tail_crc, own = _PREAMBLE.unpack(head)
    if own != _checksum(head[:-4]):
        raise CheckpointError(f"{path}: the first bytes are damaged; pack the model again")
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this version of dejavu reads {VERSION}; "
            "pack the model again"
        )
    text = os.pread(file, min(length, _MAX_DESCRIPTION), _PREAMBLE.size)
    if len(text) != length or _checksum(text) != crc:
        raise CheckpointError(f"{path}: the header is damaged or cut off; pack the model again")
    description = _parse(path, json.loads(text))
    size = os.fstat(file).st_size
    if size != description.size:
        raise CheckpointError(
            f"{path} has {size} bytes, its header says {description.size}: it is truncated or was "
            "written to; pack the model again"
        )
    if complete and layers_done != len(description.neurons):
        raise CheckpointError(
            f"{path} is not complete: {layers_done} of {len(description.neurons)} layers are "
            "written; run the same dejavu pack again, it continues there"
        )
    return Preamble(layers_done, length, crc, tail_crc), description


def _parse(path: Path, fields: dict[str, Any]) -> Description:
    try:
        fields["tables"] = {
            name: (str(kind), tuple(shape), int(offset))
            for name, (kind, shape, offset) in fields["tables"].items()
        }
        for name in ("parts", "neurons", "offsets"):
            fields[name] = tuple(fields[name])
        d = Description(**fields)
        fits = d.dtype in WEIGHT_DTYPES and d.parts in (("up", "down"), ("up", "gate", "down"))
        fits = fits and d.record == len(d.parts) * d.row_bytes <= d.stride <= d.block
        fits = fits and len(d.offsets) == len(d.neurons) and all(n >= 0 for n in d.neurons)
        fits = fits and d.tail <= d.checksums and d.checksums + 4 * d.blocks <= d.size
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header cannot be understood: {error}") from error
    if not fits:
        raise CheckpointError(f"{path}: the header contradicts itself; pack the model again")
    return d
