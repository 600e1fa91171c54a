"""A model whose MLP weights lie in a bundled file: what of them is in memory, and how it comes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dejavu.errors import InputError
from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.kernels.neuron_cache import NeuronCache
from dejavu.kernels.ops import Projection
from dejavu.weights.bundle import Bundle

__all__ = ["FlashStore", "buffer_bytes", "least_slots", "placeholders"]

_OUTSTANDING = 192  # reads; more than a layer lacks as a rule
_MAX_READ = 1 << 15  # bytes of neighbours that become one read


def placeholders(bundle: Bundle) -> dict[str, Matrix]:
    """Weight name (`layers.3.mlp.up.weight`) -> a matrix that takes no memory: its data is a meta
    tensor. To be loaded with, and given to a `FlashStore` then."""
    found = {}
    for layer in range(bundle.layers):
        scales = bundle.scales(layer)
        for part in bundle.parts:
            dtype = WEIGHT_DTYPES[bundle.dtype]
            shape = bundle.neurons[layer], bundle.hidden_size
            data = torch.empty(shape, dtype=dtype, device="meta")
            scale = None if scales is None else scales[part].contiguous()
            found[_name(layer, part)] = Matrix(data, scale)
    return found


class FlashStore:
    """The neurons of a bundle: some in slots for decode steps, a whole layer at a time for prompts.

    bundle: the file. slots: neurons that are kept in memory, of all layers together. matrices: the
    model's, from `placeholders`; the kernels find their rows in the slots from now on.
    Not for several threads at a time.

    Raises InputError for fewer slots than the largest layer takes while the next one is prefetched.
    """

    def __init__(self, bundle: Bundle, slots: int, matrices: Mapping[str, Matrix]) -> None:
        least = least_slots(bundle)
        if slots < least:
            raise InputError(f"{slots} neurons in memory are too few, {least} would do")
        self.bundle = bundle
        self.reader = bundle.reader(
            queue_depth=_OUTSTANDING, max_read=max(_MAX_READ, bundle.record_bytes)
        )
        self._offsets = [bundle.offsets(layer) for layer in range(bundle.layers)]
        self.cache = NeuronCache(
            self.reader,
            self._offsets,
            record=bundle.record_bytes,
            slots=min(slots, sum(bundle.neurons)),
        )
        self._parts: dict[Matrix, tuple[int, str]] = {}
        for layer in range(bundle.layers):
            for index, part in enumerate(bundle.parts):
                matrix = matrices[_name(layer, part)]
                self.cache.place(matrix, layer, index * bundle.row_bytes)
                self._parts[matrix] = layer, part

    def layer_of(self, down: Matrix) -> int | None:
        """The layer whose down matrix this is; None: not one of this store's."""
        found = self._parts.get(down)
        return None if found is None else found[0]

    def part_of(self, matrix: Matrix) -> tuple[int, str] | None:
        """(layer, "up", "gate" or "down") of a matrix; None: not one of this store's."""
        return self._parts.get(matrix)

    def read_mlp(
        self, up: Projection, gate: Projection | None, down: Matrix
    ) -> tuple[Projection, Projection | None, Matrix]:
        """An MLP with all of its weights, read now if it is one of this store's.

        Raises CheckpointError as `FlashReader.wait` does.
        """
        layer = self.layer_of(down)
        if layer is None:
            return up, gate, down
        parts = self.read_layer(layer)
        gate = None if gate is None else gate._replace(weight=parts["gate"])
        return up._replace(weight=parts["up"]), gate, parts["down"]

    def read_layer(self, layer: int) -> dict[str, Matrix]:
        """All of a layer's neurons as contiguous matrices, read now and not kept.

        Raises CheckpointError as `FlashReader.wait` does.
        """
        b = self.bundle
        neurons, scales = b.neurons[layer], b.scales(layer)
        dtype = WEIGHT_DTYPES[b.dtype]
        data = {part: torch.empty(neurons, b.hidden_size, dtype=dtype) for part in b.parts}
        rows = torch.arange(neurons) * b.row_bytes
        offsets, to = [], []
        for index, part in enumerate(b.parts):
            offsets.append(self._offsets[layer] + index * b.row_bytes)
            to.append(rows + data[part].data_ptr())
        # A record's rows side by side, so that they are read together.
        stacked = torch.stack(offsets, 1).flatten(), torch.stack(to, 1).flatten()
        self.reader.wait(self.reader.submit(stacked[0], b.row_bytes, stacked[1]))
        return {
            part: Matrix(matrix, None if scales is None else scales[part].contiguous())
            for part, matrix in data.items()
        }


def _name(layer: int, part: str) -> str:
    return f"layers.{layer}.mlp.{part}.weight"


def least_slots(bundle: Bundle) -> int:
    """Slots that always do: a whole layer, and the next that is fetched meanwhile."""
    return min(2 * max(bundle.neurons), sum(bundle.neurons))


def buffer_bytes(bundle: Bundle) -> int:
    """At most, of the buffers that a store's reads land in."""
    edges = 2 * max(bundle.block_bytes, 4096) + 4096  # of blocks, and of what reads are aligned to
    return _OUTSTANDING * (max(_MAX_READ, bundle.record_bytes) + edges)
