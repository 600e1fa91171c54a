"""Layers of a plan's steps that compute all neurons, or all heads: where choosing would cost more.

Under a batch the rows' lists add up, a listed row of weights comes more slowly than a streamed
one, and choosing has a price of its own. What is cheaper for a layer is told by a table of measured
costs and by what the last steps listed: their counts come to the host with the tokens, so nothing
waits for them. A layer computed whole runs no predictor: with all of them, a step is the dense one.

The table decides, and never a clock while texts are written: the same history of requests gets the
same texts on the same device. But what earlier steps listed counts, so a row may be computed with
more neurons later, or among others, than it was alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Layers = frozenset[int]

_FIRST = 4  # steps of a bucket that all predictors run in, before it is decided
_PERIOD = 64  # steps after which again
_PROBE = 4096  # steps after which all of this starts anew: texts change
_MEMORY = 1 / 32  # weight of the latest step in the mean
_GAIN = 0.02  # of the MLPs' time: what a change must bring, for it costs a capture
_MOST = 4  # choices that a bucket ever has, each with graphs of its own


class Cost(Protocol):
    """`kernels.gpu.costs.MLPCost`: times in any one unit."""

    @property
    def whole(self) -> float:
        """Of a layer that is computed whole."""
        ...

    def at(self, shares: ArrayLike) -> NDArray[np.float64]:
        """Of layers with such shares of their neurons listed, choosing them included."""
        ...


@dataclass(eq=False)
class _Bucket:
    cost: Cost
    shares: NDArray[np.float64] | None = None  # of each layer's neurons, mean
    steps: int = 0
    chosen: Layers = frozenset()
    known: list[Layers] = field(default_factory=lambda: [Layers()])


class WholeLayers:
    """The choice for each bucket of rows; it changes seldom, and in steps that pay."""

    def __init__(
        self, cost: Callable[[int], Cost], entries: int, predicted: Collection[int]
    ) -> None:
        """cost: of one MLP (or attention) in a step of so many rows. entries: neurons (or heads) of
        one. predicted: layers with a predictor of these."""
        self._cost, self._entries = cost, entries
        self._predicted = sorted(predicted)
        self._buckets: dict[int, _Bucket] = {}

    def of(self, rows: int) -> Layers:
        """Layers that the next step of a bucket computes whole."""
        found = self._buckets.get(rows)
        return Layers() if found is None else found.chosen

    def note(self, rows: int, listed: NDArray[np.integer], whole: Layers) -> None:
        """A step of a bucket, with some layers whole, listed so many entries in each; what it says
        of whole layers does not count, nor does a step that began before the latest choice."""
        bucket = self._buckets.get(rows)
        if bucket is None:  # not setdefault, which would look up the cost at every step
            bucket = self._buckets[rows] = _Bucket(self._cost(rows))
        if whole != bucket.chosen:
            return
        shares = listed / self._entries
        if bucket.steps == _PROBE:
            bucket.steps, bucket.chosen = 0, Layers()
            return
        bucket.steps += 1
        if bucket.shares is None or bucket.steps == 1:
            bucket.shares = shares
        else:
            change = (shares - bucket.shares) * max(1 / bucket.steps, _MEMORY)
            change[list(bucket.chosen)] = 0.0
            bucket.shares += change
        if bucket.steps == _FIRST or bucket.steps % _PERIOD == 0:
            self._decide(bucket)

    def _decide(self, bucket: _Bucket) -> None:
        assert bucket.shares is not None
        dearer = bucket.cost.at(bucket.shares) > bucket.cost.whole
        wanted = Layers(layer for layer in self._predicted if dearer[layer])
        choices = bucket.known
        if wanted not in choices and len(choices) < _MOST:
            choices = [*choices, wanted]
        best = min(choices, key=lambda whole: self._time(bucket, whole))
        if self._time(bucket, best) < (1 - _GAIN) * self._time(bucket, bucket.chosen):
            bucket.chosen = best
            if best not in bucket.known:
                bucket.known.append(best)

    def _time(self, bucket: _Bucket, whole: Layers) -> float:
        """Of the MLPs with predictors, in the unit of the table."""
        assert bucket.shares is not None
        times = bucket.cost.at(bucket.shares)
        times[list(whole)] = bucket.cost.whole
        return float(times[self._predicted].sum())
