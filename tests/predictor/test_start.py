"""The start against textbook formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu.predictor import start as start_module
from dejavu.predictor.start import Factors, Moments, calibrate, random_start, regression, svd_start


def inputs(rows: int = 500, width: int = 12, seed: int = 0) -> Tensor:
    """Correlated, off centre, of very different spreads."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) * torch.logspace(1, -1, width)
    return torch.randn(rows, width, generator=generator) @ mix + 3.0


def layer(entries: int = 30, width: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(entries, width, generator=generator), torch.randn(
        entries, generator=generator
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_moments_are_those_of_numpy(dtype: torch.dtype) -> None:
    x = inputs().to(dtype)
    moments = Moments.of(x, chunk=64)
    wide = x.double()
    torch.testing.assert_close(moments.mean, wide.mean(dim=0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        moments.covariance, torch.cov(wide.t(), correction=0), rtol=1e-4, atol=1e-3
    )


def test_full_rank_start_has_the_sign_of_the_layer() -> None:
    x, (weight, bias) = inputs(), layer()
    (start,) = svd_start(weight, bias, Moments.of(x), [12])
    exact = F.linear(x, weight, bias)
    scores = start.scores(x)
    for entry in range(len(weight)):
        pair = torch.stack((scores[:, entry], exact[:, entry]))
        assert torch.corrcoef(pair)[0, 1] > 1 - 1e-5
    clear = exact.abs() > 1e-3 * exact.abs().max()
    assert ((scores > 0) == (exact > 0))[clear].all()


@pytest.mark.parametrize("dead", [False, True])
def test_iteration_finds_what_eigenvectors_find(dead: bool) -> None:
    """The way of the GPU: any root of the covariance leads to the same scores."""
    generator = torch.Generator().manual_seed(3)
    x = inputs(rows=900, width=48)
    if dead:
        x[:, 5] = 0.0
    scales = torch.logspace(1, -1, 90)[:, None]
    weight = torch.randn(90, 48, generator=generator) * scales
    moments, ranks = Moments.of(x), [1, 6, 48]
    slow = svd_start(weight, None, moments, ranks, iterate=False)
    fast = svd_start(weight, None, moments, ranks, iterate=True)
    for one, other in zip(slow, fast, strict=True):
        expected, found = one.scores(x), other.scores(x)
        error = (found - expected).norm() / expected.norm()
        assert error < 2e-2


def test_truncation_is_the_best_of_its_rank_on_the_inputs() -> None:
    x, (weight, bias) = inputs(), layer()
    moments = Moments.of(x)
    centred = (x - x.mean(dim=0)).double() @ weight.double().t()
    u, s, v = torch.linalg.svd(centred, full_matrices=False)
    for start, rank in zip(svd_start(weight, bias, moments, [2, 5]), (2, 5), strict=True):
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        scores = start.scores(x).double()
        scores -= scores.mean(dim=0)
        scale = (scores * best).sum(dim=0) / scores.square().sum(dim=0)
        error = (scores * scale - best).norm() / best.norm()
        assert error < 1e-3, rank


def test_a_layer_without_bias_and_with_constant_inputs_stays_finite() -> None:
    weight, _ = layer()
    for start in svd_start(weight, None, Moments.of(torch.ones(50, 12)), [1, 12]):
        assert all(torch.isfinite(p).all() for p in (start.first, start.second, start.bias))


def test_random_start_depends_on_its_seed_alone() -> None:
    one, same, other = (random_start(30, 12, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(one.first, same.first)
    assert not torch.equal(one.first, other.first)
    assert one.second.shape == (30, 4)
    assert not one.bias.any()


def test_regression_agrees_with_least_squares() -> None:
    x = inputs() / 10
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(5, 12, generator=generator)
    y = x @ truth.t() + 2.0
    fitted = regression(x, y, Moments.of(x))
    guess = (x - x.mean(dim=0)) @ fitted.t() + y.mean(dim=0)
    assert (guess - y).norm() / (y - y.mean(dim=0)).norm() < 0.05  # the ridge's share


def loss(factors: Factors, x: Tensor, weights: Tensor) -> float:
    s = factors.scores(x)
    return float((weights * F.softplus(-s) + F.softplus(s)).mean())


def test_calibration_finds_the_best_scale_and_offset_of_every_entry() -> None:
    x, (weight, bias) = inputs(2000), layer()
    exact = F.linear(x, weight, bias)
    weights = exact.clamp(min=0).square() / exact.square().mean()
    (start,) = svd_start(weight, bias, Moments.of(x), [3])
    done = calibrate(start, x, weights, steps=20)
    best = loss(done, x, weights)
    assert best < loss(start, x, weights)
    for scale, offset in ((1.02, 0.0), (0.98, 0.0), (1.0, 0.02), (1.0, -0.02)):
        moved = Factors(done.first, done.second * scale, done.bias * scale + offset)
        assert loss(moved, x, weights) > best


@pytest.mark.parametrize("cells", [1, 2000, 14_001])
def test_calibration_in_pieces_is_that_of_all_entries_at_once(
    monkeypatch: pytest.MonkeyPatch, cells: int
) -> None:
    x, (weight, bias) = inputs(2000), layer()
    (start,) = svd_start(weight, bias, Moments.of(x), [3])
    weights = F.linear(x, weight, bias).clamp(min=0)
    kept = [tensor.clone() for tensor in (start.first, start.second, start.bias, x, weights)]
    whole = calibrate(start, x, weights)
    monkeypatch.setattr(start_module, "_CELLS", cells)
    pieces = calibrate(start, x, weights)
    torch.testing.assert_close(pieces.second, whole.second, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pieces.bias, whole.bias, rtol=1e-5, atol=1e-5)
    for tensor, before in zip(
        (start.first, start.second, start.bias, x, weights), kept, strict=True
    ):
        assert torch.equal(tensor, before)
