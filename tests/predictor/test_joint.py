"""One price of bytes is as good as any set of thresholds: all that a plan may skip is one market.

Independent reference: every combination of thresholds of all places, counted out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dejavu.kernels.matrix import Matrix
from dejavu.predictor.curve import Curve
from dejavu.predictor.input_budget import GRID, InputCurve, priced_thresholds
from dejavu.predictor.layer import Task
from dejavu.predictor.network import Predictor
from dejavu.predictor.search import Candidate, Place, Search
from dejavu.predictor.survey import SiteSurvey
from dejavu.sparsity.inputs import InputSite
from dejavu.sparsity.losses import Mean
from dejavu.sparsity.policy import Site

PRICE, ROWS, LOSS = 1e-6, 400, 0.1
OFFSETS = np.arange(-2.0, 2.01, 0.25)  # of single thresholds from the common one
# Site, layer, entries, bytes of one, nats per half square.
MARKET = (
    (Site.NEURONS, 0, 200, 72.0, 1e-4),
    (Site.NEURONS, 1, 200, 72.0, 1e-3),
    (Site.HEADS, 0, 16, 1500.0, 2e-4),
    (Site.HEADS, 1, 16, 1500.0, 2e-3),
)


def places(shift: float) -> list[Place]:
    """Scores as training aims at them: the logarithm of what the loss weighs an entry by. shift: of
    the scores of heads, by which they leave the common unit."""
    found = []
    for number, (site, layer, entries, row, mind) in enumerate(MARKET):
        c = torch.randn(ROWS, entries, generator=torch.Generator().manual_seed(number))
        c = c.mul_(1.5).exp_()
        task = Task((site, layer), SiteSurvey(mind, entries, row, 0.0), PRICE, None)
        scores = task.weights(c.clone()).log() + (shift if site == Site.HEADS else 0.0)
        curve = Curve()
        curve.add(scores, c, c > 1)
        none = Matrix(torch.zeros(1, 4, dtype=torch.int8), torch.ones(1))
        each = Matrix(torch.zeros(entries, 1, dtype=torch.int8), torch.ones(entries))
        candidate = Candidate(Predictor(none, each, torch.zeros(entries)), 0.0, curve)
        found.append(Place((site, layer), entries, entries, row, 0.0, mind, False, (candidate,)))
    return found


def best_bytes(market: Sequence[Place], common: float) -> tuple[float, float]:
    """Bytes at one threshold for all places, and the fewest of any thresholds that lose no more."""
    nats, size = np.zeros(()), np.zeros(())
    for place in market:
        tried = [place.figures(place.candidates[0], common + offset) for offset in OFFSETS]
        nats = nats[..., None] + np.array([f.nats for f in tried])
        size = size[..., None] + np.array([f.selected * place.row_bytes for f in tried])
    middle = (len(OFFSETS) // 2,) * len(market)
    return float(size[middle]), float(size[nats <= nats[middle] * (1 + 1e-9)].min())


def searched(market: Sequence[Place]) -> tuple[Search, float]:
    """A search over the market, and the threshold of a level that it finds."""
    search = Search(market, PRICE)
    search.choose_candidates(LOSS)

    def truth(policies: object, chosen: object) -> Mean:
        assert isinstance(policies, dict)
        kept = [p for p in market if policies[p.key].kind == "predictor"]
        nats = [p.figures(p.candidates[0], policies[p.key].threshold).nats for p in kept]
        return Mean(1.3 * sum(nats), 0.0)

    found = search.level(LOSS, truth)
    assert found.threshold is not None
    assert {p.kind for p in found.policies.values()} == {"predictor"}
    assert {p.threshold for p in found.policies.values()} == {found.threshold}
    assert 0.9 * math.log1p(LOSS) < found.loss.value <= math.log1p(LOSS)
    return search, found.threshold


def test_no_thresholds_of_neurons_and_heads_beat_the_common_one() -> None:
    market = places(shift=0.0)
    _, threshold = searched(market)
    own, best = best_bytes(market, threshold)
    assert own <= best * 1.002  # scores are told apart in steps of 1/16
    assert own < 0.9 * sum(p.dense_bytes for p in market)


def test_scores_out_of_the_common_unit_would_be_seen() -> None:
    market = places(shift=1.5)
    _, threshold = searched(market)
    own, best = best_bytes(market, threshold)
    assert own > best * 1.02


@pytest.mark.parametrize("price", [1e-7, 1e-6, 3e-6])
def test_no_thresholds_of_input_channels_beat_a_price(price: float) -> None:
    curves = {
        (0, site): InputCurve(1000 * (n + 2), GRID, tuple(0.02 * s**power / (n + 1) for s in GRID))
        for n, (site, power) in enumerate(zip(InputSite, (2.0, 3.5, 3.0, 4.0), strict=True))
    }
    (chosen,) = priced_thresholds(curves, price)
    steps = [(None, *range(len(GRID)))] * len(curves)

    def outcome(numbers: Sequence[int | None]) -> tuple[float, float]:
        known = [
            (GRID[n] * c.nbytes, c.nats[n])
            for n, c in zip(numbers, curves.values(), strict=True)
            if n is not None
        ]
        return sum(saved for saved, _ in known), sum(nats for _, nats in known)

    own = [None if not chosen[site] else GRID.index(chosen[site]) for _, site in curves]
    saved, nats = outcome(own)
    assert saved > 0
    assert any(n is None or n < len(GRID) - 1 for n in own)
    rivals = (outcome(numbers) for numbers in itertools.product(*steps))
    assert saved >= max(s for s, lost in rivals if lost <= nats * (1 + 1e-9)) * (1 - 1e-12)
