"""Which layers of a step read their whole MLP, because nearly all of it would be listed anyway.

Under a batch the rows' lists add up, and a listed row of weights comes more slowly than a streamed
one. What is cheaper for a layer is told by a table of measured costs and by what the last steps
listed: their counts come to the host with the tokens, so nothing waits for them. A row uses its own
neurons either way, and its result changes by rounding at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Layers = frozenset[int]

_FIRST = 4  # steps of a bucket after which it is decided on for the first time
_PERIOD = 64  # and after which again
_MEMORY = 1 / 32  # weight of the latest step in the mean
_GAIN = 0.02  # of the MLPs' time: what a change must bring, for it costs a capture
_MOST = 4  # choices that a bucket ever has, each with graphs of its own


class Cost(Protocol):
    """`kernels.gpu.costs.MLPCost`: times in any one unit."""

    @property
    def whole(self) -> float:
        """Of a layer that is read whole."""
        ...

    def at(self, shares: ArrayLike) -> NDArray[np.float64]:
        """Of layers with such shares of their neurons listed."""
        ...


@dataclass(eq=False)
class _Bucket:
    cost: Cost
    shares: NDArray[np.float64] | None = None  # of each layer's neurons, mean
    steps: int = 0
    chosen: Layers = frozenset()
    known: list[Layers] = field(default_factory=lambda: [Layers()])

    def seconds(self, whole: Layers) -> float:
        """Of all MLPs of a step, in the unit of the table."""
        assert self.shares is not None
        listed = self.cost.at(self.shares)
        listed[list(whole)] = self.cost.whole
        return float(listed.sum())


class WholeLayers:
    """The choice for each bucket of rows; it changes seldom, and in steps that pay."""

    def __init__(self, cost: Callable[[int], Cost], neurons: int) -> None:
        """cost: of one MLP in a step of so many rows. neurons: of an MLP."""
        self._cost, self._neurons = cost, neurons
        self._buckets: dict[int, _Bucket] = {}

    def of(self, rows: int) -> Layers:
        """Layers that the next step of a bucket reads whole."""
        found = self._buckets.get(rows)
        return Layers() if found is None else found.chosen

    def note(self, rows: int, listed: NDArray[np.int64]) -> None:
        """A step of a bucket listed so many neurons in each layer; 0 where nothing selects."""
        bucket = self._buckets.setdefault(rows, _Bucket(self._cost(rows)))
        shares = listed / self._neurons
        bucket.steps += 1
        if bucket.shares is None:
            bucket.shares = shares
        else:
            bucket.shares += (shares - bucket.shares) * max(1 / bucket.steps, _MEMORY)
        if bucket.steps == _FIRST or bucket.steps % _PERIOD == 0:
            self._decide(bucket)

    def _decide(self, bucket: _Bucket) -> None:
        assert bucket.shares is not None
        dearer = bucket.cost.at(bucket.shares) > bucket.cost.whole
        wanted = Layers(np.flatnonzero(dearer).tolist())
        choices = bucket.known
        if wanted not in choices and len(choices) < _MOST:
            choices = [*choices, wanted]
        best = min(choices, key=bucket.seconds)
        if bucket.seconds(best) < (1 - _GAIN) * bucket.seconds(bucket.chosen):
            bucket.chosen = best
            if best not in bucket.known:
                bucket.known.append(best)
