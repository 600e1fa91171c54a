"""Training of predictors: one layer, several ranks at once, gradients by hand.

The loss of an entry with score s is `w * softplus(-s) + softplus(s)`, where w is what leaving the
entry out costs in units of what reading it costs. Its minimum is s = log E[w | x]: the sign decides
as an accountant would, and a threshold on s is a price. `docs/log.md` has what else was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu.kernels.nibbles import rounded
from dejavu.predictor.start import Factors

MAX_WEIGHT = 300.0  # cuts the tail of w: from 100 on it changes nothing but single gradients
_BETAS = (0.9, 0.99)
_EPSILON = 1e-8
_WARM_UP = 20  # steps
_FINAL_RATE = 0.02  # of the peak, at the end of the cosine
_ROUNDED_FROM = 0.5  # of the steps; from the start on is no better and takes longer


@dataclass(frozen=True)
class TrainOptions:
    """rate: Adam's, for both stages; the bias takes three times it."""

    epochs: float = 1.0
    batch: int = 512
    rate: float = 0.008
    seed: int = 0
    bits: int = 4  # of a stored weight; below 8 the last part of training sees them rounded


WeightsOf = Callable[[Tensor], Tensor]
"""Row numbers int64 `[n]` -> w fp32 `[n, entries]`."""


def train(
    x: Tensor, weights_of: WeightsOf, starts: Sequence[Factors], options: TrainOptions
) -> list[Factors]:
    """Train all starts side by side on the same batches, which share the work of making weights.

    x: inputs `[N, D]`, fp16 or fp32. Every row is used equally often up to the rounding of a
    last partial epoch. Deterministic for a seed and a number of threads.
    """
    batch = min(options.batch, len(x))
    steps = max(1, round(options.epochs * len(x) / batch))
    learners = [_Learner(start, options.rate) for start in starts]
    for step, rows in enumerate(_batches(len(x), batch, steps, options.seed)):
        rows = rows.to(x.device)
        inputs, weights = x[rows].float(), weights_of(rows)
        rate = _schedule(step, steps)
        coarse = options.bits < 8 and step >= _ROUNDED_FROM * steps
        for learner in learners:
            learner.step(inputs, weights, rate, coarse)
    return [learner.factors for learner in learners]


def _batches(rows: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Shuffled batches without end: a batch that a pass cannot fill begins the next pass."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        while len(left) < batch:
            left = torch.cat((left, torch.randperm(rows, generator=generator)))
        yield left[:batch]
        left = left[batch:]


def _schedule(step: int, steps: int) -> float:
    """Share of the peak rate: a short linear warm-up under a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * (step + 1) / steps))
    return min(1.0, (step + 1) / _WARM_UP) * (_FINAL_RATE + (1 - _FINAL_RATE) * cosine)


class _Learner:
    """One predictor in training: its parameters and Adam's state (Kingma & Ba, 2015)."""

    def __init__(self, start: Factors, rate: float) -> None:
        self._parameters = [start.first.clone(), start.second.clone(), start.bias.clone()]
        self._rates = [rate, rate, 3 * rate]
        self._means = [torch.zeros_like(p) for p in self._parameters]
        self._squares = [torch.zeros_like(p) for p in self._parameters]
        self._steps = 0

    @property
    def factors(self) -> Factors:
        """The parameters as they are now."""
        return Factors(*self._parameters)

    def step(self, x: Tensor, weights: Tensor, rate: float, coarse: bool = False) -> None:
        """One step on inputs `[n, D]` and weights `[n, entries]`.

        coarse: gradients are taken where the stages, rounded to 4 bits, lie, and move what they
        were rounded from (straight-through estimator; Bengio et al., 2013).
        """
        first, second, bias = self._parameters
        if coarse:
            first, second = rounded(first), rounded(second)
        hidden = x @ first.t()
        p = torch.addmm(bias, hidden, second.t()).sigmoid_()
        # d loss / d s = sigmoid(s) (1 + w) - w. Summed over entries, averaged over rows: a mean
        # over entries too would sink below Adam's epsilon.
        slope = torch.addcmul(p, p, weights).sub_(weights).mul_(1 / len(x))
        gradients = ((slope @ second).t() @ x, slope.t() @ hidden, slope.sum(dim=0))
        self._steps += 1
        shrink = 1 / (1 - _BETAS[0] ** self._steps)
        spread = 1 / math.sqrt(1 - _BETAS[1] ** self._steps)
        for parameter, gradient, peak, mean, square in zip(
            self._parameters, gradients, self._rates, self._means, self._squares, strict=True
        ):
            mean.lerp_(gradient, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            divisor = square.sqrt().mul_(spread).add_(_EPSILON)
            parameter.addcdiv_(mean, divisor, value=-peak * rate * shrink)
