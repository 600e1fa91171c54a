"""A bundled weights file: a model's MLP neurons as records to be read one by one.

`write_bundle` makes one, `open_bundle` opens it; the format is in `bundle_format`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dejavu.errors import CheckpointError, InputError
from dejavu.kernels.flash import Blocks, FlashReader, crc32c, crc32c_blocks
from dejavu.weights.bundle_format import Description, read_description
from dejavu.weights.bundle_write import LayerNeurons, NeuronSource, write_bundle

__all__ = ["Bundle", "LayerNeurons", "NeuronSource", "is_bundle", "open_bundle", "write_bundle"]

_CHUNK = 1 << 25


@dataclass(frozen=True, eq=False)
class Bundle:
    """An opened file: where each neuron's record lies, and the small things that stay in memory.

    A record is `record_bytes` long: the rows of `parts` one after the other, `row_bytes` each
    (`parts[0]`, "up", from byte 0), in the dtype `dtype` and the kernels' orientation. Nothing is
    kept open; every `reader` opens the file for itself.

    stat: of the file when its head was read; a reader refuses a file that changed since.
    """

    path: Path
    description: Description
    stat: os.stat_result
    blocks: Blocks
    tables: dict[str, Tensor]

    @property
    def identity(self) -> str:
        """Of the model, as a plan names it."""
        return self.description.identity

    @property
    def dtype(self) -> str:
        """fp32, bf16, fp16 or int8."""
        return self.description.dtype

    @property
    def hidden_size(self) -> int:
        """Values in a row."""
        return self.description.row

    @property
    def parts(self) -> tuple[str, ...]:
        """("up", "down") or ("up", "gate", "down"): the rows of a record, in order."""
        return self.description.parts

    @property
    def gated(self) -> bool:
        """Whether a record has a gate row."""
        return "gate" in self.description.parts

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.description.neurons)

    @property
    def neurons(self) -> tuple[int, ...]:
        """Number of neurons of each layer."""
        return self.description.neurons

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.description.row_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a neuron: what to ask the reader for, and what a slot in memory must hold."""
        return self.description.record

    @property
    def block_bytes(self) -> int:
        """Bytes that are read and checked together: what a lone neuron costs the device."""
        return self.description.block

    @property
    def mlp_bytes(self) -> int:
        """Of all records, without padding."""
        return sum(self.neurons) * self.record_bytes

    @property
    def resident_bytes(self) -> int:
        """Memory of the tables and checksums."""
        tables = sum(table.nbytes for table in self.tables.values())
        return tables + self.blocks.checksums.nbytes

    def offsets(self, layer: int, neurons: Tensor | None = None) -> Tensor:
        """File offsets of neurons' records, int64 `[len(neurons)]`; of all for None.

        neurons: integers `[n]`, the model's own numbering, any order.
        """
        if neurons is None:
            neurons = torch.arange(self.neurons[layer])
        places = self.tables.get("places")
        if places is not None:
            neurons = self._of_layer(places, layer)[neurons]
        return neurons.long() * self.description.stride + self.description.offsets[layer]

    def scales(self, layer: int) -> dict[str, Tensor] | None:
        """int8: part -> fp32 `[neurons]`, a neuron's weights = integers * its scale; else None.

        Views of one table that is in memory; indexed by the neuron's own number.
        """
        table = self.tables.get("scales")
        if table is None:
            return None
        return {part: self._of_layer(table[i], layer) for i, part in enumerate(self.parts)}

    def bias(self, layer: int, part: str) -> Tensor | None:
        """fp32 `[neurons]` of up or gate, `[hidden_size]` of down; None where there is none."""
        table = self.tables.get(f"bias.{part}")
        if table is None:
            return None
        return table[layer] if part == "down" else self._of_layer(table, layer)

    def locate(self, offset: int) -> tuple[int, int]:
        """(layer, neuron) of the record that holds a byte of the file."""
        d = self.description
        layer = max(i for i, first in enumerate(d.offsets) if first <= offset)
        place = min((offset - d.offsets[layer]) // d.stride, max(d.neurons[layer] - 1, 0))
        places = self.tables.get("places")
        if places is not None:
            return layer, int((self._of_layer(places, layer) == place).nonzero()[0, 0])
        return layer, place

    def reader(
        self,
        *,
        queue_depth: int = 32,
        direct: bool = True,
        uring: bool = True,
        gap: int = 0,
        max_read: int = 1 << 16,
    ) -> FlashReader:
        """A reader of the records; options and errors as for `FlashReader`."""
        return FlashReader(
            self.path,
            self.blocks,
            self.stat,
            queue_depth=queue_depth,
            direct=direct,
            uring=uring,
            gap=gap,
            max_read=max_read,
            describe=self._name,
        )

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every block and compare it with its checksum.

        Raises CheckpointError naming the first damaged neuron.
        """
        size, start = self.blocks.size, self.blocks.start
        step = max(_CHUNK // size, 1)
        total = len(self.blocks.checksums)
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            for first in range(0, total, step):
                count = min(step, total - first)
                data = _exactly(file.fileno(), start + first * size, count * size)
                if data is None:
                    raise CheckpointError(f"{self.path} is truncated; pack the model again")
                wrong = crc32c_blocks(data, size) != self.blocks.checksums[first : first + count]
                if wrong.any():
                    offset = start + (first + int(wrong.nonzero()[0, 0])) * size
                    raise CheckpointError(
                        f"{self.path}: {self._name(offset)}, at byte {offset}, is damaged: its "
                        "checksum does not match; pack the model again"
                    )
                if progress is not None:
                    progress(first + count, total)

    def _name(self, offset: int) -> str:
        layer, neuron = self.locate(offset)
        return f"layer {layer}, neuron {neuron}"

    def _of_layer(self, table: Tensor, layer: int) -> Tensor:
        before = sum(self.neurons[:layer])
        return table[before : before + self.neurons[layer]]


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file that begins like a bundled weights file."""
    try:
        with Path(path).open("rb") as file:
            return file.read(8) == b"DEJAVUFL"
    except OSError:
        return False


def open_bundle(path: str | os.PathLike[str], *, identity: str | None = None) -> Bundle:
    """Open a bundled weights file; reads its head and its tables, no records.

    identity: of the model it must belong to.

    Raises InputError where there is no such file, CheckpointError for one that is not a bundled
    weights file, of another version, incomplete, truncated, damaged in head or tables, or made for
    another model.
    """
    path = Path(path).expanduser()
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        stat = os.fstat(file)
        preamble, description = read_description(path, file)
        tail = _exactly(file, description.tail, description.size - description.tail)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)
    if tail is None or crc32c(tail) != preamble.tail_crc:
        raise CheckpointError(
            f"{path}: the tables behind the last neuron are damaged; pack the model again"
        )
    if identity is not None and identity != description.identity:
        raise CheckpointError(
            f"{path} was packed from {description.source} (identity {description.identity[:12]}), "
            f"not from the model asked for (identity {identity[:12]}); pack that one"
        )
    tables = {
        name: _table(tail, offset - description.tail, getattr(torch, kind), shape)
        for name, (kind, shape, offset) in description.tables.items()
    }
    start = description.offsets[0] if description.offsets else description.tail
    at = description.checksums - description.tail
    checksums = _table(tail, at, torch.int32, (description.blocks,))
    return Bundle(path, description, stat, Blocks(start, description.block, checksums), tables)


def _exactly(file: int, offset: int, size: int) -> Tensor | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = os.preadv(file, [view[at:]], offset + at)
        if count == 0:
            return None
        at += count
    return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _table(tail: Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A copy, so that a table's memory is its own size."""
    count = torch.Size(shape).numel()
    return tail[at : at + 4 * count].clone().view(dtype).view(shape)
