"""What callers of the engine need of a selector that counts what its steps read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dejavu.sparsity.accounting import LayerReads


@runtime_checkable
class Metered(Protocol):
    """`sparsity.meter.MeteredSelector`, or any selector that counts like one."""

    def reset(self) -> None:
        """Start counting anew."""
        ...

    def reads(self) -> Sequence[LayerReads]:
        """Mean over the steps since the last reset, for each layer."""
        ...
