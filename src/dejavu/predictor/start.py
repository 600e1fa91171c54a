"""Where training starts: the best low-rank stand-in for a layer's own first matrix, calibrated.

The stand-in is the truncated SVD of the matrix in coordinates in which the inputs are white (the
idea of SVD-LLM and SVDP), so that the rank is spent on directions that inputs really take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu.kernels.device import CPU

_PROBIT = 1.7  # a logistic curve is about a normal distribution function of 1.7 times its argument
_LEAST_NOISE = 0.15  # of the signal: surer starts saturate, and what is saturated learns nothing
_FLOOR = 1e-6  # of the largest eigenvalue: directions below it are rounding noise


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
    weight: Tensor, bias: Tensor | None, moments: Moments, ranks: Sequence[int]
) -> list[Factors]:
    """Stand-ins of each rank for `weight x + bias`, scaled to the log-odds of a positive value.

    weight: fp32 `[entries, D]`. What the rank leaves out counts as normal noise: its spread, entry
    by entry, turns the stand-in's value into log-odds.
    """
    values, directions = torch.linalg.eigh(moments.covariance)
    values.clamp_(min=float(values[-1]) * _FLOOR + 1e-30)
    white = weight.double() @ (directions * values.sqrt())  # [entries, D]
    energies, basis = torch.linalg.eigh(white.t() @ white)  # ascending
    energies, basis = energies.flip(0).clamp_(min=0.0), basis.flip(1)
    projected = white @ basis
    centre = weight.double() @ moments.mean + (0.0 if bias is None else bias.double())
    unwhiten = (directions / values.sqrt()).t()
    found = []
    for rank in ranks:
        noise = projected[:, rank:].square().sum(dim=1).sqrt()
        signal = projected.square().sum(dim=1).sqrt()
        noise = torch.maximum(noise, _LEAST_NOISE * signal + 1e-12)
        # Split the singular values evenly, so that one learning rate suits both stages.
        split = energies[:rank].clamp(min=float(energies[0]) * 1e-12 + 1e-30) ** 0.25
        first = (basis[:, :rank] * split).t() @ unwhiten
        second = projected[:, :rank] / split
        second *= _PROBIT / noise[:, None]
        offset = _PROBIT * centre / noise - second @ (first @ moments.mean)
        found.append(Factors(first.float(), second.float(), offset.float()))
    return found


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
    scores = factors.scores(x)
    centre = scores.mean(dim=0)
    z = scores - centre
    scale, offset = torch.ones_like(centre), centre.clone()
    for _ in range(steps):
        p = torch.sigmoid(z * scale + offset)
        slope = torch.addcmul(p, p, weights).sub_(weights)  # d loss / d s
        bend = p * (1 - p) * (1 + weights)
        bent = bend * z
        h11, h12 = (bent * z).mean(dim=0) + 1e-4, bent.mean(dim=0)
        h22 = bend.mean(dim=0) + 1e-4
        g1 = (slope * z).mean(dim=0) + 1e-4 * (scale - 1)
        g2 = slope.mean(dim=0)
        det = (h11 * h22 - h12 * h12).clamp_(min=1e-8)
        scale = (scale - ((h22 * g1 - h12 * g2) / det).clamp(-0.5, 0.5)).clamp(0.1, 5.0)
        offset = offset - ((h11 * g2 - h12 * g1) / det).clamp(-2.0, 2.0)
    return Factors(
        factors.first, factors.second * scale[:, None], (factors.bias - centre) * scale + offset
    )
