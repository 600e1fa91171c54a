"""What share of the neurons the decode steps read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dejavu.sparsity.accounting import LayerReads


@runtime_checkable
class Metered(Protocol):
    """A selector that counts what its selections made the ops read."""

    def reset(self) -> None:
        """Start counting anew."""
        ...

    def reads(self) -> Sequence[LayerReads]:
        """Mean over the steps since the last reset, for each layer."""
        ...


def neuron_density(reads: Sequence[LayerReads], neurons: int) -> float:
    """Neurons read, of any row in a batch, over all `neurons` of each layer: 0 to 1."""
    listed = [neurons if layer.neurons is None else layer.neurons for layer in reads]
    return sum(listed) / (neurons * len(reads))
