"""One site of one layer: targets from recorded inputs, training at several ranks, judgement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dejavu.errors import PlanError
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.nibbles import Nibbles
from dejavu.kernels.ops import Ops
from dejavu.predictor.curve import Curve
from dejavu.predictor.network import Predictor
from dejavu.predictor.recording import Recorded
from dejavu.predictor.search import ROW_PREMIUM, Candidate
from dejavu.predictor.start import (
    Factors,
    Moments,
    calibrate,
    random_start,
    regression,
    svd_start,
)
from dejavu.predictor.survey import SiteSurvey
from dejavu.predictor.training import MAX_WEIGHT, TrainOptions, train
from dejavu.predictor.worth import Neurons
from dejavu.sparsity.policy import Key, Site

_CALIBRATION_ROWS = 8192
_CHUNK = 512
_TRIAL_SHARE = 0.2  # of the steps
_TRIAL_JUDGED = 4096  # tokens
TYPICAL_THRESHOLD = -0.5  # where levels of half a percent to one come to lie


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be learned. neurons: None for heads. price: nats a byte.

    alike: the paper's labels, every active entry (for activations without zeros and for heads:
    every one worth its price) counts the same.
    """

    key: Key
    survey: SiteSurvey
    price: float
    neurons: Neurons | None
    alike: bool = False

    def contributions(self, data: Recorded, rows: Tensor | slice, ops: Ops) -> Tensor:
        """fp32 `[n, entries]` of recorded tokens."""
        if self.neurons is None:
            return data.head_norms[self.key[1]][rows]
        x = data.inputs[Site.NEURONS, self.key[1]][rows].float()
        return self.neurons.activations(x, ops).abs_().mul_(self.neurons.norms)

    def weights(self, contributions: Tensor) -> Tensor:
        """Damage of leaving out over price of reading, fp32 `[n, entries]`; overwrites."""
        s = self.survey
        scale = math.sqrt(s.sensitivity / (2 * self.price * s.row_bytes))
        if not self.alike:
            return contributions.mul_(scale).square_().clamp_(max=MAX_WEIGHT)
        sparse = self.neurons is not None and self.neurons.activation.is_sparse
        return (contributions > (0.0 if sparse else 1 / scale)).float()


def learn(
    task: Task,
    data: Recorded,
    held: Recorded,
    ranks: Sequence[int],
    distance: float,
    options: TrainOptions,
    ops: Ops,
    *,
    one: bool = False,
) -> list[Candidate]:
    """Train predictors of the ranks on `data`, measure them on `held`.

    one: only the rank that is cheapest in all after a trial with a few of the steps.
    """
    x = data.source(*task.key, distance)
    assert x is not None
    starts = _starts(task, x, data, ranks, options.seed, ops)

    def trained(
        starts: Sequence[Factors], options: TrainOptions, held: Recorded
    ) -> Iterator[Candidate]:
        def weights_of(rows: Tensor) -> Tensor:
            return task.weights(task.contributions(data, rows, ops))

        for factors in train(x, weights_of, starts, options):
            predictor = quantise(_checked(factors, task, options.rate), options.bits)
            yield Candidate(predictor, distance, judge(task, predictor, held, distance, ops))

    if one and len(starts) > 1:
        few = replace(options, epochs=_TRIAL_SHARE * options.epochs)
        costs = [cost(task, tried) for tried in trained(starts, few, held.first(_TRIAL_JUDGED))]
        starts = [starts[costs.index(min(costs))]]
    return list(trained(starts, options, held))


def cost(task: Task, candidate: Candidate) -> float:
    """Bytes of a token about where levels come to lie, damage turned into bytes."""
    s = task.survey
    figures = candidate.curve.at(TYPICAL_THRESHOLD, s.sensitivity)
    rows = figures.selected * s.row_bytes + figures.active * s.down_bytes
    lost = figures.nats / (task.price * math.exp(TYPICAL_THRESHOLD))
    return candidate.predictor.nbytes + ROW_PREMIUM * rows + lost


def quantise(factors: Factors, bits: int) -> Predictor:
    """Both stages in 4 or 8 bits with one step a row."""
    stages = factors.first, factors.second
    if bits == 4:
        first, second = map(Nibbles.from_float, stages)
        return Predictor(first, second, factors.bias.contiguous())
    one, two = (Matrix.from_float(stage, "int8") for stage in stages)
    return Predictor(one, two, factors.bias.contiguous())


def judge(task: Task, predictor: Predictor, held: Recorded, distance: float, ops: Ops) -> Curve:
    """What a predictor does at every threshold, by the rule that decoding uses."""
    site, layer = task.key
    x = held.source(site, layer, distance)
    assert x is not None
    curve = Curve()
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, start + _CHUNK)
        scores = predictor.scores(x[rows].float(), ops)
        contributions = task.contributions(held, rows, ops)
        s = task.survey
        limit = math.sqrt(2 * task.price * s.row_bytes / s.sensitivity)
        curve.add(scores, contributions, contributions > limit)
    return curve


def _starts(
    task: Task, x: Tensor, data: Recorded, ranks: Sequence[int], seed: int, ops: Ops
) -> list[Factors]:
    sample = slice(0, _CALIBRATION_ROWS)
    inputs = x[sample].float()
    contributions = task.contributions(data, sample, ops)
    if task.alike:
        entries, width = contributions.shape[1], x.shape[1]
        return [random_start(entries, width, rank, seed, x.device) for rank in ranks]
    moments = Moments.of(x)
    if task.neurons is None:
        matrix, bias = regression(inputs, contributions, moments), None
    else:
        mlp = task.neurons.mlp
        first = mlp.up if mlp.gate is None else mlp.gate
        matrix, bias = first.weight.float(), first.bias
        own = data.inputs[task.key]
        if own is not x:  # look-ahead: through the best guess of the layer's own input
            matrix = matrix @ regression(inputs, own[sample].float(), moments)
    starts = svd_start(matrix, bias, moments, ranks)
    weights = task.weights(contributions)
    return [calibrate(start, inputs, weights) for start in starts]


def _checked(factors: Factors, task: Task, rate: float) -> Factors:
    """Themselves, if all are finite."""
    if all(bool(torch.isfinite(f).all()) for f in (factors.first, factors.second, factors.bias)):
        return factors
    site, layer = task.key
    raise PlanError(
        f"layer {layer}, {site}: training did not converge (rate {rate:g}); try a lower rate"
    )
