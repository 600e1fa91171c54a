"""Shares, their standard errors, and the difference of two arms on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dejavu.sparsity.losses import Mean

_95 = 1.959964  # standard errors to each side of a 95 % interval


@dataclass(frozen=True)
class Difference:
    """Mean of sparse minus dense over items; error: standard error of that mean, from the spread of
    the items' own differences (items that both arms get right or wrong together cost no precision).
    low, high: 95 % interval. errors: the difference in standard errors, 0 where both are 0."""

    value: float
    error: float | None
    low: float | None
    high: float | None

    @property
    def errors(self) -> float | None:
        """How many standard errors the difference is away from none; None where it has no error."""
        if self.error is None:
            return None
        if self.error == 0:
            return 0.0 if self.value == 0 else None
        return self.value / self.error

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"errors": self.errors}


def mean(values: Sequence[float]) -> Mean:
    """Mean of independent values and its standard error (sample deviation over root n)."""
    n = len(values)
    average = math.fsum(values) / n
    if n < 2:
        return Mean(average, None)
    spread = math.fsum((value - average) ** 2 for value in values) / (n - 1)
    return Mean(average, math.sqrt(spread / n))


def difference(dense: Sequence[float], sparse: Sequence[float]) -> Difference:
    """Paired difference of two arms' scores on the same items, in their order."""
    return _interval(mean([b - a for a, b in zip(dense, sparse, strict=True)]))


def mean_difference(tasks: Sequence[Difference]) -> Difference:
    """Unweighted mean over tasks; the error follows from theirs, as tasks share no items."""
    value = math.fsum(task.value for task in tasks) / len(tasks)
    errors = [task.error for task in tasks if task.error is not None]
    if len(errors) < len(tasks):
        return _interval(Mean(value, None))
    return _interval(Mean(value, math.sqrt(math.fsum(e * e for e in errors)) / len(tasks)))


def _interval(found: Mean) -> Difference:
    if found.error is None:
        return Difference(found.value, None, None, None)
    half = _95 * found.error
    return Difference(found.value, found.error, found.value - half, found.value + half)
