"""Summary of repeated timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile and least of some numbers.

    The median, for a mean would be dragged up by whatever else the machine did meanwhile.
    """

    median: float
    p10: float
    p90: float
    least: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one number; percentiles are interpolated."""
        ordered = sorted(values)
        return Spread(
            _quantile(ordered, 0.5), _quantile(ordered, 0.1), _quantile(ordered, 0.9), ordered[0]
        )


def _quantile(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
