"""What a predictor does at every threshold, measured once on held-out text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOW, HIGH, STEP = -12.0, 12.0, 0.0625
_BINS = round((HIGH - LOW) / STEP) + 2  # one below and one above the range
_COLUMNS = ("selected", "active", "worthy", "square", "mass")


@dataclass(frozen=True)
class Figures:
    """At one threshold, means over tokens.

    selected: entries that score above it. active: those of them with activation != 0. nats: damage
    of what was left out. missed_mass: its share of the contributions. recall_active, recall_worthy:
    share of the entries with activation != 0, and of those worth their price, that were selected;
    precision_active, precision_worthy: share of the selected that are such.
    """

    selected: float
    active: float
    nats: float
    missed_mass: float
    recall_active: float
    recall_worthy: float
    precision_active: float
    precision_worthy: float


class Curve:
    """Sums over held-out tokens by score; `at` reads them off at a threshold.

    table: fp64 `[5, bins]`; a column of bins for entries, entries with activation != 0, entries
    worth their price, squared contributions and contributions.
    """

    def __init__(self, table: Tensor | None = None, rows: int = 0) -> None:
        empty = torch.zeros(len(_COLUMNS), _BINS, dtype=torch.float64)
        self.table = empty if table is None else table
        self.rows = rows
        self._above: list[list[float]] | None = None

    def add(self, scores: Tensor, contributions: Tensor, worthy: Tensor) -> None:
        """Count scores and contributions fp32 `[N, entries]`, worthy bool `[N, entries]`, of any
        device."""
        self.rows += len(scores)
        self._above = None
        bins = ((scores - LOW) / STEP).floor_().clamp_(-1, _BINS - 2).add_(1).long().flatten()
        c = contributions.flatten()
        self.table[0] += _counted(bins)
        places = c.nonzero().squeeze(1)  # of a sparse activation few: zeros add nothing below
        bins, c, worth = bins[places], c[places].double(), worthy.flatten()[places].double()
        for row, weights in zip(self.table[1:], (None, worth, c.square(), c), strict=True):
            row += _counted(bins, weights)

    def at(self, threshold: float, sensitivity: float) -> Figures:
        """Figures at a threshold (taken at the nearest bin edge, LOW to HIGH)."""
        if self._above is None:  # sums over a bin and those above it, one list a bin
            self._above = self.table.flip(1).cumsum(1).flip(1).t().tolist()
        place = round((min(max(threshold, LOW), HIGH) - LOW) / STEP) + 1
        kept = dict(zip(_COLUMNS, self._above[place], strict=True))
        all_ = dict(zip(_COLUMNS, self._above[0], strict=True))

        def share(part: float, whole: float) -> float:
            return part / whole if whole > 0 else 1.0

        return Figures(
            selected=kept["selected"] / self.rows,
            active=kept["active"] / self.rows,
            nats=sensitivity / 2 * max(all_["square"] - kept["square"], 0.0) / self.rows,
            missed_mass=max(1.0 - share(kept["mass"], all_["mass"]), 0.0),
            recall_active=share(kept["active"], all_["active"]),
            recall_worthy=share(kept["worthy"], all_["worthy"]),
            precision_active=share(kept["active"], kept["selected"]),
            precision_worthy=share(kept["worthy"], kept["selected"]),
        )


def _counted(bins: Tensor, weights: Tensor | None = None) -> Tensor:
    return torch.bincount(bins, weights=weights, minlength=_BINS).cpu()
