"""Errors by textbook formulas, through an independent library of numbers."""

from __future__ import annotations

import numpy as np
import pytest

from dejavu.eval.paired import Difference, difference, mean, mean_difference


def test_errors_are_those_of_independent_items() -> None:
    rng = np.random.default_rng(0)
    dense = (rng.random(200) < 0.4).astype(float)
    sparse = np.where(rng.random(200) < 0.1, 1 - dense, dense)
    found = mean(dense.tolist())
    p = dense.mean()
    assert found.value == pytest.approx(p)
    assert found.error == pytest.approx((p * (1 - p) / 199) ** 0.5), "binomial, n - 1"
    pair = difference(dense.tolist(), sparse.tolist())
    gain, loss = ((sparse > dense).mean(), (sparse < dense).mean())
    assert pair.value == pytest.approx(gain - loss)
    # McNemar's table: only items on which the arms differ spread the difference.
    assert pair.error == pytest.approx(((gain + loss - (gain - loss) ** 2) / 199) ** 0.5)
    assert pair.low is not None
    assert pair.high is not None
    assert (pair.high - pair.low) / 2 == pytest.approx(1.96 * pair.error, rel=1e-4)
    assert pair.errors == pytest.approx(pair.value / pair.error)
    unpaired = np.hypot(mean(dense.tolist()).error or 0, mean(sparse.tolist()).error or 0)
    assert pair.error < 0.6 * unpaired


def test_interval_covers_as_often_as_it_says() -> None:
    """2000 draws of 300 items: 95 % of intervals hold the truth, within 4 errors of 0.5 %."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(2000):
        changed = rng.random(300)
        d = np.where(changed < 0.08, -1.0, np.where(changed < 0.13, 1.0, 0.0))
        found = difference([0.0] * 300, d.tolist())
        assert found.low is not None
        assert found.high is not None
        held += found.low <= -0.03 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=0.02)


def test_small_and_equal() -> None:
    assert mean([3.0]) == (3.0, None)
    assert difference([1.0], [0.0]) == Difference(-1.0, None, None, None)
    assert difference([1.0], [0.0]).errors is None
    same = difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (same.value, same.error, same.errors) == (0.0, 0.0, 0.0)
    assert difference([0.0, 0.0], [1.0, 1.0]).errors is None, "certain, not infinitely many"


def test_mean_over_tasks() -> None:
    one, other = Difference(0.02, 0.03, 0, 0), Difference(-0.04, 0.04, 0, 0)
    found = mean_difference([one, other])
    assert found.value == pytest.approx(-0.01)
    assert found.error == pytest.approx(0.025)
    assert mean_difference([one, Difference(0.0, None, None, None)]).error is None
