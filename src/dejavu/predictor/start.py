"""Where training starts: the best low-rank stand-in for a layer's own first matrix, calibrated.

The stand-in is the truncated SVD of the matrix in coordinates in which the inputs are white (the
idea of SVD-LLM and SVDP), so that the rank is spent on directions that inputs really take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dejavu.kernels.device import CPU

_PROBIT = 1.7  # a logistic curve is about a normal distribution function of 1.7 times its argument
_LEAST_NOISE = 0.15  # of the signal: surer starts saturate, and what is saturated learns nothing
_FLOOR = 1e-6  # of the largest eigenvalue: directions below it are rounding noise
_POWER_STEPS = 20  # for a largest eigenvalue that only scales the floor
_ITERATIONS = 4
_WIDE = 1024
# Scores calibrated at a time, 1 MB: all 16 million at once take three times as long.
_CELLS = 1 << 18
_SPARE = 32  # directions more than wanted, so that the last wanted ones converge too


@dataclass(frozen=True, eq=False)
class Factors:
    """score = second (first x) + bias; fp32 `[rank, D]`, `[entries, rank]`, `[entries]`."""

    first: Tensor
    second: Tensor
    bias: Tensor

    def scores(self, x: Tensor) -> Tensor:
        """fp32 `[N, D]` -> `[N, entries]`."""
        return torch.addmm(self.bias, x @ self.first.t(), self.second.t())


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean fp64 `[D]` and covariance fp64 `[D, D]` of a predictor's inputs."""

    mean: Tensor
    covariance: Tensor

    @staticmethod
    def of(x: Tensor, chunk: int = 8192) -> Moments:
        """Of the rows of `[N, D]`, any float dtype."""
        width = x.shape[1]
        mean = torch.zeros(width, dtype=torch.float64, device=x.device)
        second = torch.zeros(width, width, dtype=torch.float64, device=x.device)
        for part in torch.split(x, chunk):
            rows = part.float()
            mean += rows.sum(dim=0, dtype=torch.float64)
            second += (rows.t() @ rows).double()
        mean /= len(x)
        return Moments(mean, second / len(x) - torch.outer(mean, mean))


def svd_start(
    weight: Tensor,
    bias: Tensor | None,
    moments: Moments,
    ranks: Sequence[int],
    *,
    iterate: bool | None = None,
) -> list[Factors]:
    """Stand-ins of each rank for `weight x + bias`, scaled to the log-odds of a positive value.

    weight: fp32 `[entries, D]`. What the rank leaves out counts as normal noise: its spread, entry
    by entry, turns the stand-in's value into log-odds.
    iterate: by Cholesky and subspace iteration in place of eigenvectors. Default: for wide
    layers on a GPU, whose eigensolvers take seconds where these products take milliseconds.
    """
    if iterate is None:
        iterate = moments.covariance.is_cuda and weight.shape[1] >= _WIDE
    colour = (_by_cholesky if iterate else _by_eigenvectors)(moments.covariance)
    white = weight.double() @ colour.root  # [entries, D]
    gram = white.t() @ white
    energies, basis = _leading(gram, max(ranks)) if iterate else _descending(gram)
    projected = white @ basis
    centre = weight.double() @ moments.mean + (0.0 if bias is None else bias.double())
    signal = white.square().sum(dim=1)
    found = []
    for rank in ranks:
        noise = (signal - projected[:, :rank].square().sum(dim=1)).clamp_(min=0.0).sqrt()
        noise = torch.maximum(noise, _LEAST_NOISE * signal.sqrt() + 1e-12)
        # Split the singular values evenly, so that one learning rate suits both stages.
        split = energies[:rank].clamp(min=float(energies[0]) * 1e-12 + 1e-30) ** 0.25
        first = colour.undo((basis[:, :rank] * split).t())
        second = projected[:, :rank] / split
        second *= _PROBIT / noise[:, None]
        offset = _PROBIT * centre / noise - second @ (first @ moments.mean)
        found.append(Factors(first.float(), second.float(), offset.float()))
    return found


class _Colour(NamedTuple):
    """A square root of a covariance, and rows `[n, D]` times its inverse."""

    root: Tensor
    undo: Callable[[Tensor], Tensor]


def _by_eigenvectors(covariance: Tensor) -> _Colour:
    values, directions = torch.linalg.eigh(covariance)
    values.clamp_(min=float(values[-1]) * _FLOOR + 1e-30)
    inverse = (directions / values.sqrt()).t()
    return _Colour(directions * values.sqrt(), lambda rows: rows @ inverse)


def _by_cholesky(covariance: Tensor) -> _Colour:
    """Any root will do: roots differ by a rotation, which the basis found behind them undoes."""
    x = covariance.sum(dim=1) + 1.0
    for _ in range(_POWER_STEPS):
        x = covariance @ (x / x.norm())
    damped = covariance + torch.diag((x.norm() * _FLOOR + 1e-30).expand(len(covariance)))
    root = torch.linalg.cholesky(damped)
    return _Colour(
        root, lambda rows: torch.linalg.solve_triangular(root, rows, left=False, upper=False)
    )


def _descending(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, the largest first."""
    energies, basis = torch.linalg.eigh(gram)
    return energies.flip(0).clamp_(min=0.0), basis.flip(1)


def _leading(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """About the `count` largest eigenvalues and their vectors `[D, count]`, by subspace iteration
    (Halko, Martinsson & Tropp, 2011, https://arxiv.org/abs/0909.4061, algorithm 4.4)."""
    width = len(gram)
    drawn = torch.randn(
        width, min(width, count + _SPARE), dtype=gram.dtype,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    basis = torch.linalg.qr(drawn.to(gram.device))[0]
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(gram @ (gram @ basis))[0]
    energies, turn = _descending(basis.t() @ gram @ basis)
    return energies[:count], basis @ turn[:, :count]


def random_start(
    entries: int, width: int, rank: int, seed: int, device: torch.device = CPU
) -> Factors:
    """The paper's start: two linear layers as PyTorch initialises them; the same on any device."""
    generator = torch.Generator().manual_seed(seed)

    def layer(rows: int, columns: int) -> Tensor:
        bound = 1.0 / math.sqrt(columns)
        drawn = torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)
        return drawn.to(device)

    return Factors(layer(rank, width), layer(entries, rank), torch.zeros(entries, device=device))


def regression(x: Tensor, y: Tensor, moments: Moments) -> Tensor:
    """The linear map fp32 `[entries, D]` that best predicts targets `[N, entries]` from `[N, D]`.

    Stands in for the first matrix where there is none (heads): least squares with a little ridge.
    """
    centred = y.double() - y.double().mean(dim=0)
    cross = x.double().t() @ centred / len(x)  # [D, entries]
    ridge = 1e-3 * moments.covariance.diagonal().mean() + 1e-12
    damped = moments.covariance + torch.diag(ridge.expand(len(moments.mean)))
    fitted: Tensor = torch.linalg.solve(damped, cross)
    return fitted.t().float()


def calibrate(factors: Factors, x: Tensor, weights: Tensor, steps: int = 6) -> Factors:
    """Fit one scale and one offset an entry by Newton's method, both stages held.

    Minimises the training loss `w * softplus(-s) + softplus(s)` over s = scale * score + offset.
    x: fp32 `[N, D]`; weights: fp32 `[N, entries]`. Saves a sixth of an epoch of training.
    """
    hidden = (x @ factors.first.t()).t()
    few = max(1, _CELLS // max(1, len(x)))
    fitted = [
        _fitted(torch.addmm(bias[:, None], second, hidden), w.t(), steps)
        for second, bias, w in zip(
            torch.split(factors.second, few),
            torch.split(factors.bias, few),
            torch.split(weights, few, dim=1),
            strict=True,
        )
    ]
    scale, shift = (torch.cat(each) for each in zip(*fitted, strict=True))
    return Factors(factors.first, factors.second * scale[:, None], factors.bias * scale + shift)


def _fitted(scores: Tensor, weights: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Scale and offset fp32 `[entries]` of scores and weights `[entries, N]`: scores times scale
    plus offset."""
    weights, heavier = weights.contiguous(), weights + 1
    centre = scores.mean(dim=1)
    z = scores.sub_(centre[:, None])
    scale, offset = torch.ones_like(centre), centre.clone()
    for _ in range(steps):
        p = torch.addcmul(offset[:, None], z, scale[:, None]).sigmoid_()
        slope = torch.addcmul(p, p, weights).sub_(weights)  # d loss / d s
        g1 = (slope * z).mean(dim=1) + 1e-4 * (scale - 1)
        g2 = slope.mean(dim=1)
        bend = slope.copy_(p).mul_(p).neg_().add_(p).mul_(heavier)
        h22 = bend.mean(dim=1) + 1e-4
        bent = bend.mul_(z)
        h12 = bent.mean(dim=1)
        h11 = bent.mul_(z).mean(dim=1) + 1e-4
        det = (h11 * h22 - h12 * h12).clamp_(min=1e-8)
        scale = (scale - ((h22 * g1 - h12 * g2) / det).clamp(-0.5, 0.5)).clamp(0.1, 5.0)
        offset = offset - ((h11 * g2 - h12 * g1) / det).clamp(-2.0, 2.0)
    return scale, offset - centre * scale
