"""Figures read off a curve against counting by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from dejavu.predictor.curve import HIGH, LOW, STEP, Curve

SENSITIVITY = 0.5


def test_figures_are_those_of_counting() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 6 * torch.randn(200, 31, generator=generator)
    scores = (scores / STEP).round() * STEP + STEP / 3  # never on a bin's edge
    c = (torch.randn(200, 31, generator=generator) + scores / 6).clamp(min=0)
    worthy = c > 0.5
    curve = Curve()
    for part in range(0, 200, 64):
        rows = slice(part, part + 64)
        curve.add(scores[rows], c[rows], worthy[rows])
    for threshold in (-30.0, LOW, -3.0, 0.0, 0.25, 7.5, HIGH, 40.0):
        at = min(max(threshold, LOW), HIGH)
        chosen = scores > at
        figures = curve.at(threshold, SENSITIVITY)
        assert figures.selected == pytest.approx(float(chosen.sum() / 200))
        assert figures.active == pytest.approx(float((chosen & (c != 0)).sum() / 200))
        missed = c.double().masked_fill(chosen, 0.0)
        nats = SENSITIVITY / 2 * float(missed.square().sum() / 200)
        assert figures.nats == pytest.approx(nats, abs=1e-9)
        assert figures.missed_mass == pytest.approx(
            float(missed.sum() / c.double().sum()), abs=1e-9
        )
        if chosen.any():
            hit = (chosen & worthy).sum()
            assert figures.recall_worthy == pytest.approx(float(hit / worthy.sum()))
            assert figures.precision_worthy == pytest.approx(float(hit / chosen.sum()))
            active = (chosen & (c != 0)).sum()
            assert figures.recall_active == pytest.approx(float(active / (c != 0).sum()))
            assert figures.precision_active == pytest.approx(float(active / chosen.sum()))


def test_recall_and_density_fall_together_as_the_threshold_rises() -> None:
    generator = torch.Generator().manual_seed(1)
    c = torch.rand(100, 50, generator=generator)
    curve = Curve()
    curve.add(4 * c + torch.randn(100, 50, generator=generator), c, c > 0.5)
    ladder = [curve.at(t, SENSITIVITY) for t in (-8.0, 0.0, 1.0, 2.0, 3.0, 8.0)]
    for lower, higher in itertools.pairwise(ladder):
        assert higher.selected < lower.selected
        assert higher.recall_worthy <= lower.recall_worthy
        assert higher.nats > lower.nats


def test_a_curve_survives_storage() -> None:
    curve = Curve()
    curve.add(torch.zeros(3, 4), torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool))
    again = Curve(curve.table.clone(), curve.rows)
    assert again.at(-1.0, 1.0) == curve.at(-1.0, 1.0)


def test_scores_beyond_the_range_and_nothing_active_stay_finite() -> None:
    curve = Curve()
    scores = torch.tensor([[-1e9, 1e9, 0.0]])
    curve.add(scores, torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool))
    figures = curve.at(0.5, 1.0)
    assert (figures.selected, figures.nats, figures.missed_mass) == (1.0, 0.0, 0.0)
