"""Where a plan's steps compute everything, because that is faster than to choose.

Under a batch the rows' lists add up, a listed row of weights comes more slowly than a streamed
one, and choosing has a price of its own. What is cheaper for a layer is told by a table of measured
costs and by what the last steps listed: their counts come to the host with the tokens, so nothing
waits for them. A layer computed whole runs no predictor. Where the table promises little, the step
is timed against the dense one on a few tokens, and the faster stays: a plan is never slower than
none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dejavu.predictor.selector import Key
from dejavu.sparsity.policy import Site

Places = frozenset[Key]
"""Sites of layers that a step computes whole."""

_FIRST = 4  # steps of a bucket that all predictors run in, before it is decided
_PERIOD = 64  # steps after which again
_PROBE = 4096  # steps after which all of this starts anew: texts change
_MEMORY = 1 / 32  # weight of the latest step in the mean
_GAIN = 0.02  # of the MLPs' time: what a change must bring, for it costs a capture
_MOST = 4  # choices that a bucket ever has, each with graphs of its own
_SURE = 0.6  # of the whole MLPs' time: below that nothing needs to be timed
_TIMED, _COLD = 6, 2  # steps of each side that are timed, and of these not counted
_NOISE = 0.01


class Cost(Protocol):
    """`kernels.gpu.costs.MLPCost`: times in any one unit."""

    @property
    def whole(self) -> float:
        """Of a layer that is computed whole."""
        ...

    def at(self, shares: ArrayLike) -> NDArray[np.float64]:
        """Of layers with such shares of their neurons listed, and of choosing them."""
        ...


@dataclass(eq=False)
class _Bucket:
    cost: Cost
    shares: NDArray[np.float64] | None = None  # of each layer's neurons, mean
    steps: int = 0
    chosen: Places = frozenset()
    known: list[Places] = field(default_factory=lambda: [Places()])
    trial: list[Places] = field(default_factory=list)  # still to be timed, the first now
    times: dict[Places, list[float]] = field(default_factory=dict)


class WholeLayers:
    """The choice for each bucket of rows; it changes seldom, and in steps that pay."""

    def __init__(
        self, cost: Callable[[int], Cost], neurons: int, predicted: Collection[Key]
    ) -> None:
        """cost: of one MLP in a step of so many rows. neurons: of an MLP. predicted: places that
        choose, and may be told not to."""
        self._cost, self._neurons = cost, neurons
        self._everything = Places(predicted)
        self._layers = [layer for site, layer in sorted(predicted) if site is Site.NEURONS]
        self._buckets: dict[int, _Bucket] = {}

    def of(self, rows: int) -> Places:
        """What the next step of a bucket computes whole."""
        found = self._buckets.get(rows)
        if found is None:
            return Places()
        return found.trial[0] if found.trial else found.chosen

    def timing(self, rows: int) -> bool:
        """Whether the next step of a bucket is to be timed."""
        found = self._buckets.get(rows)
        return found is not None and bool(found.trial)

    def note(self, rows: int, listed: NDArray[np.int64], seconds: float | None = None) -> None:
        """A step of a bucket, of what `of` said, listed so many neurons in each layer.

        seconds: that it took; None: nobody can tell, and the table alone decides.
        """
        bucket = self._buckets.setdefault(rows, _Bucket(self._cost(rows)))
        if bucket.trial:
            self._timed(bucket, seconds)
            return
        self._average(bucket, listed / self._neurons)
        if bucket.steps == _FIRST or bucket.steps % _PERIOD == 0:
            self._decide(bucket)
        if bucket.steps >= _PROBE:
            bucket.steps, bucket.chosen = 0, Places()

    def _average(self, bucket: _Bucket, shares: NDArray[np.float64]) -> None:
        bucket.steps += 1
        if bucket.shares is None or bucket.steps == 1:
            bucket.shares = shares
            return
        change = (shares - bucket.shares) * max(1 / bucket.steps, _MEMORY)
        change[[layer for site, layer in bucket.chosen if site is Site.NEURONS]] = 0.0
        bucket.shares += change

    def _decide(self, bucket: _Bucket) -> None:
        if bucket.chosen == self._everything:
            return
        assert bucket.shares is not None
        dearer = bucket.cost.at(bucket.shares) > bucket.cost.whole
        wanted = Places((Site.NEURONS, layer) for layer in self._layers if dearer[layer])
        choices = bucket.known
        if wanted not in choices and len(choices) < _MOST:
            choices = [*choices, wanted]
        best = min(choices, key=lambda places: self._time(bucket, places))
        if self._time(bucket, best) < (1 - _GAIN) * self._time(bucket, bucket.chosen):
            bucket.chosen = best
            if best not in bucket.known:
                bucket.known.append(best)
        all_whole = bucket.cost.whole * len(self._layers)
        unsure = not self._layers or self._time(bucket, bucket.chosen) > _SURE * all_whole
        if unsure and bucket.steps == _FIRST and bucket.chosen != self._everything:
            bucket.trial, bucket.times = [bucket.chosen, self._everything], {}

    def _time(self, bucket: _Bucket, whole: Places) -> float:
        """Of all MLPs of a step, in the unit of the table."""
        assert bucket.shares is not None
        listed = bucket.cost.at(bucket.shares)
        listed[[layer for site, layer in whole if site is Site.NEURONS]] = bucket.cost.whole
        return float(listed[self._layers].sum())

    def _timed(self, bucket: _Bucket, seconds: float | None) -> None:
        now = bucket.trial[0]
        if seconds is None:
            bucket.trial.clear()
            return
        times = bucket.times.setdefault(now, [])
        times.append(seconds)
        if len(times) < _TIMED:
            return
        del bucket.trial[0]
        if not bucket.trial:
            sparse, dense = (
                median(bucket.times[places][_COLD:]) for places in (bucket.chosen, self._everything)
            )
            if dense < (1 - _NOISE) * sparse:
                bucket.chosen = self._everything
