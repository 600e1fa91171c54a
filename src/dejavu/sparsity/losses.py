"""Losses per token, and means of them with an honest error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dejavu.errors import DejavuError

_ROWS = 256  # rows of logits whose exponentials exist at a time: 50 MB at a vocabulary of 50k


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats, fp64 `[N]` on the logits' device: logits `[N, V]`, targets
    int64 `[N]` of any device."""
    targets = targets.to(logits.device)
    losses = [
        torch.logsumexp(rows, dim=1).double() - rows.gather(1, t[:, None])[:, 0]
        for rows, t in zip(torch.split(logits, _ROWS), torch.split(targets, _ROWS), strict=True)
    ]
    return torch.cat(losses) if losses else logits.new_zeros(0, dtype=torch.float64)


class Mean(NamedTuple):
    """A mean and its standard error; None where fewer than two blocks were seen."""

    value: float
    error: float | None

    @property
    def upper(self) -> float:
        """Two standard errors above the mean: what a level's loss is held against. With one, levels
        for half a percent and for one came out at 0.54 and 1.10 % on other books."""
        return self.value + 2 * (self.error or 0.0)

    def exp(self) -> Mean:
        """exp of the mean, its error to first order; ends at 1e304, where floats do."""
        value = math.exp(min(self.value, 700.0))
        return Mean(value, None if self.error is None else value * self.error)


def block_mean(sums: Sequence[float], counts: Sequence[int]) -> Mean:
    """Mean over all tokens of a text given block by block (sum of a figure, number of tokens).

    The error is that of a ratio estimator over blocks (Cochran, Sampling Techniques, 6.4): tokens
    of one block share topic, author and context, so their losses are not independent and an error
    over single tokens would be too small. Blocks may differ in size; longer ones weigh more.

    Raises DejavuError where a sum is not finite.
    """
    if not all(map(math.isfinite, sums)):
        raise DejavuError(
            "the losses are not finite (NaN or Inf): the weights are damaged, or too large for "
            "their dtype; try dtype='fp32'"
        )
    total = sum(counts)
    mean = math.fsum(sums) / total
    n = len(counts)
    if n < 2:
        return Mean(mean, None)
    residual = math.fsum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return Mean(mean, math.sqrt(residual * n / (n - 1)) / total)


def mean_rise(sums: Sequence[float], base: Sequence[float], counts: Sequence[int]) -> Mean:
    """Mean of what one figure is above another, with the error of the differences block by block: a
    text that is hard is hard for both, so these vary less than either figure."""
    return block_mean([one - other for one, other in zip(sums, base, strict=True)], counts)
