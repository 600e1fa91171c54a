"""Neurons of one file in slots of memory, read in place by the kernels (C++: `cpu/neuron_cache.h`).

A budget of slots serves all layers. A neuron's value is the sum over its uses, each halved for
every `half_life` steps since (LRFU); the least valuable leaves for one that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dejavu.errors import DejavuError, InputError
from dejavu.kernels.compiled import extension, register_handle, selection_handle
from dejavu.kernels.flash import FlashReader
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.selection import Selection

__all__ = ["FAULT", "HALF_LIFE", "CacheCounters", "NeuronCache"]

FAULT = 5  # of a recorded step whose neurons did not come

# Half of the neurons in memory, the 30M model on real text, misses per token in % of all neurons:
# half-lives of 16 / 64 / 256 steps 1.38 / 1.34 / 1.37 with the true active sets, 3.42 / 3.48 / 3.57
# with its plan; least recently used 1.59 and 3.90.
HALF_LIFE = 64.0


class CacheCounters(NamedTuple):
    """Neurons that were wanted, and those of them that had to be read."""

    wanted: int
    missed: int


class NeuronCache:
    """A fixed number of slots for the neurons of all layers.

    reader: of the file. offsets: per layer, int64 `[neurons]`, where each record begins there.
    record: bytes of a neuron. slots: neurons that fit. Not for several threads at a time.
    """

    def __init__(
        self,
        reader: FlashReader,
        offsets: Sequence[Tensor],
        *,
        record: int,
        slots: int,
        half_life: float = HALF_LIFE,
    ) -> None:
        sizes = torch.tensor([0, *map(len, offsets)])
        self._first = torch.cumsum(sizes, 0)
        self._offsets = torch.cat(list(offsets)).contiguous()
        self.record, self.slots = record, slots
        self.places = torch.empty(len(self._offsets), dtype=torch.int32)
        self.arena = torch.empty(slots, record, dtype=torch.uint8)  # pages are touched when used
        extension().use_large_pages(self.arena.data_ptr(), self.arena.nbytes)
        self._reader = reader
        self._cache = extension().NeuronCache(
            reader.handle,
            self.arena,
            self.arena.data_ptr(),
            slots,
            record,
            len(offsets),
            self._first.data_ptr(),
            self._offsets.data_ptr(),
            self.places.data_ptr(),
            half_life,
        )

    def place(self, matrix: Matrix, layer: int, start: int) -> None:
        """Let the kernels find a matrix's rows where the layer's neurons lie.

        matrix: `[neurons, columns]`, its data a meta tensor. start: of the row in a record, bytes.
        """
        scale, dtype = matrix.scale, matrix.dtype
        first, size = int(self._first[layer]), matrix.data.element_size()
        assert matrix.rows == int(self._first[layer + 1]) - first
        assert self.record % size == 0
        handle = extension().Matrix(
            self.arena.data_ptr() + start,
            0 if scale is None else scale.data_ptr(),
            getattr(extension().Dtype, dtype),
            matrix.rows,
            matrix.columns,
        )
        handle.place(self.places[first:].data_ptr(), self.record // size)
        register_handle(matrix, handle)

    def begin(self, layer: int, selection: Selection | None, rows: int) -> None:
        """Find slots for what a layer needs (None: all of it) and start reading what is missing.

        Raises InputError where there are too few slots.
        """
        neurons = int(self._first[layer + 1] - self._first[layer])
        handle = selection_handle(selection, neurons, rows, block=False)
        if not self._cache.begin(layer, handle):
            raise self._crowded(layer)

    def add_to(
        self, recorder: Any, step: str, layer: Tensor, selection: Selection | None, rows: int
    ) -> object:
        """Make `begin`, `finish`, `start` or `release` (the step) a part of what is recorded.

        start: the reads that were begun and had to wait for those of the layer just finished.

        recorder: the C++ one. layer: int64 `[1]`, read whenever it runs, negative for nothing.
        Returns what must live as long as the recording. A program that fails with `FAULT` has
        stopped there: `failure` then says why.
        """
        handle = None
        if selection is not None:
            handle = selection_handle(selection, selection.entries, rows, block=False)
        which = getattr(extension().NeuronStep, step)
        recorder.neurons(self._cache, which, layer.data_ptr(), handle)
        return self, layer, selection, handle

    def failure(self) -> DejavuError:
        """Why a recorded step stopped."""
        fault, number, offset, crowded = self._cache.take_failure()
        if crowded >= 0:
            return self._crowded(crowded)
        found = self._reader.error((fault, number, offset))
        assert found is not None
        return found

    def _crowded(self, layer: int) -> InputError:
        return InputError(
            f"the memory limit leaves room for {self.slots} neurons, and layer {layer} needs "
            "more at once: raise --memory-limit"
        )

    def finish(self, layer: int) -> None:
        """Return when everything begun for a layer lies in its slots; it stays until `release`.

        Raises CheckpointError as `FlashReader.wait` does; nothing of the layer is kept then.
        """
        self._reader.check(self._cache.finish(layer))

    def release(self, layer: int) -> None:
        """The layer's neurons may leave again."""
        self._cache.release(layer)

    def abandon(self, layer: int) -> None:
        """Wait for what was begun for a layer, whatever becomes of it, and release it."""
        self._cache.finish(layer)
        self._cache.release(layer)

    def pin(self, neurons: Tensor) -> None:
        """Keep neurons (int64, numbered through all layers) once they were used, while others can
        go."""
        neurons = neurons.long().contiguous()
        self._cache.pin(neurons.data_ptr(), len(neurons))

    def counters(self) -> CacheCounters:
        """Since the start or the last reset."""
        return CacheCounters(*self._cache.counters())

    def reset_counters(self) -> None:
        """Start counting at 0."""
        self._cache.reset_counters()
