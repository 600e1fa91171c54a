"""Who may stay: masks for a share of a layer, and one threshold for a share of all layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BINS = 1 << 15  # the upper half of a non-negative fp32: 8 bits of exponent, 7 of mantissa


def kept(density: float, entries: int) -> int:
    """How many of `entries` a density keeps: the nearest number, at least one."""
    return max(1, math.floor(density * entries + 0.5))


def ranks(scores: Tensor) -> Tensor:
    """int32 `[N, entries]`: place of each entry in its row, the largest score is 0; ties by number.

    `ranks(scores) < k` is the true top k.
    """
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order, places.expand_as(order))


def mass_count(scores: Tensor, mass: float) -> Tensor:
    """int64 `[N]`: how few entries hold the share `mass` of a row's sum; 0 where the sum is 0.

    scores: non-negative `[N, entries]`.
    """
    sums = torch.sort(scores, dim=1, descending=True).values.double().cumsum(dim=1)
    total = sums[:, -1:]
    count = 1 + (sums < mass * total).sum(dim=1)
    return torch.where(total[:, 0] > 0, count, 0)


class Histogram:
    """Counts of non-negative scores by layer, fine enough to read thresholds from.

    A bin is the upper 16 bits of the fp32 pattern, which for non-negative numbers orders like the
    numbers themselves: bins of under 1 % width over the whole range, and integer counts, so the
    thresholds do not depend on the order in which windows were seen.
    """

    def __init__(self, layers: int) -> None:
        self._counts = torch.zeros(layers, _BINS, dtype=torch.int64)

    def add(self, layer: int, scores: Tensor) -> None:
        """Count the scores, fp32 of any shape, of one layer."""
        bins = scores.contiguous().view(torch.int32).flatten() >> 16
        self._counts[layer] += torch.bincount(bins, minlength=_BINS).cpu()

    def threshold(self, density: float) -> float:
        """One threshold for all layers: at most the share `density` of all scores reaches it.

        Zeros never are: where more than `density` of the scores is positive, the share falls short
        of `density` by one bin at most; else all positive scores are kept.
        """
        counts = self._counts.sum(dim=0)
        above = counts.flip(0).cumsum(0).flip(0)  # scores in this bin or a higher one
        first = int((above > density * counts.sum()).sum())
        edge = torch.tensor(max(first, 1) << 16, dtype=torch.int32)
        return float(edge.view(torch.float32))
