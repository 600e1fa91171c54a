"""Plans forced to a density on random weights: what a speed costs is real, what it says is not.

Every layer gets a predictor of random int8 matrices in the form that trained ones have (score =
second (first x) + bias), and a bias calibrated on the model's own inputs so that a neuron's score
is above 0 as often as asked. Which neurons those are changes from token to token. Predictor,
selection and sparse kernels then run as they would with a trained plan, and the density is counted
while they run, never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from dejavu.bench.meter import MeteredSelector
from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Ops, Projection
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import LoadedModel
from dejavu.sparsity.accounting import stored_bytes
from dejavu.sparsity.policy import Points, Selector, Site

DEFAULT_RANK = 128


@dataclass(frozen=True, eq=False)
class Scorer:
    """The matrices of a predictor, shared by all densities: int8 `[rank, D]` and `[F, rank]`."""

    first: Matrix
    second: Matrix


def random_scorers(config: ModelConfig, rank: int, *, seed: int = 0) -> list[Scorer]:
    """One predictor for each layer; scores of normalised inputs have a spread of about 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        data = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
        return Matrix(data, torch.full((rows,), columns**-0.5 / 73.3))  # 73.3: spread of the bytes

    return [
        Scorer(matrix(rank, config.hidden_size), matrix(config.intermediate_size, rank))
        for _ in range(config.num_hidden_layers)
    ]


@dataclass(frozen=True, eq=False)
class Cut:
    """Where one layer's scores are cut. bias: fp32 `[F]`, read in place by recorded steps; spread:
    of the scores about each neuron's mean."""

    bias: Tensor
    spread: float


class Forced(MeteredSelector):
    """Selects by random predictors whose biases were calibrated to a density."""

    def __init__(self, scorers: Sequence[Scorer], cuts: Sequence[Cut], density: float) -> None:
        """density: what was asked for."""
        super().__init__(len(scorers))
        self.density = density
        self.predictor_bytes = sum(map(stored_bytes, scorers)) + sum(c.bias.nbytes for c in cuts)
        self._scorers = scorers
        self._cuts = cuts
        self._buffers: dict[tuple[int, int], Selection] = {}

    def correct(self) -> float:
        """Move every layer's threshold by what was counted since the last reset of the meter.

        Other prompts than the calibrated one shift all scores a little; about normal ones go back
        to the asked density in one or two such steps. Returns the error of the mean density so far.
        """
        neurons = self._scorers[0].second.rows
        counted = [used / neurons for used in self.meter.used()]
        if self.density < 1.0:
            for cut, density in zip(self._cuts, counted, strict=True):
                away = _z(density, neurons) - _z(self.density, neurons)
                cut.bias.add_(away * cut.spread)
        return abs(sum(counted) / len(counted) - self.density)

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        """Neurons whose score is above 0."""
        if site is not Site.NEURONS:
            return None
        x = points.source(site, layer)
        scorer = self._scorers[layer]
        selection = self._buffer(layer, len(x))
        (hidden,) = ops.linear(x, [Projection(scorer.first)])
        ops.select(hidden, scorer.second, self._cuts[layer].bias, out=selection)
        self.meter.tally(layer, selection, len(x), ops)
        return selection

    def _buffer(self, layer: int, rows: int) -> Selection:
        if (layer, rows) not in self._buffers:
            empty = Selection.empty(self._scorers[layer].second.rows, rows)
            self._buffers[layer, rows] = self.meter.watch(layer, empty)
        return self._buffers[layer, rows]


class _Calibrator(Selector):
    """Sees a whole sequence at once, dense in its prompt and sparse after it as in decoding, and
    lets each layer keep the asked share of all scores after the prompt.

    A layer is calibrated on the outputs of the sparse layers before it.
    """

    capturable = False

    def __init__(self, scorers: Sequence[Scorer], density: float, prompt: int) -> None:
        self._scorers, self._density, self._prompt = scorers, density, prompt
        self.cuts: list[Cut] = []

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS:
            return None
        scorer = self._scorers[layer]
        (hidden,) = ops.linear(points.source(site, layer), [Projection(scorer.first)])
        (scores,) = ops.linear(hidden, [Projection(scorer.second)])
        decoded = scores[self._prompt :]
        centre = decoded.mean(dim=0)
        centred = decoded - centre
        bias = -centre - _threshold(centred, self._density)
        self.cuts.append(Cut(bias, float(centred.std())))
        used = scores + bias > 0
        used[: self._prompt] = True
        return Selection.from_mask(used)


def force(
    loaded: LoadedModel,
    densities: Sequence[float],
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    rank: int = DEFAULT_RANK,
    seed: int = 0,
) -> list[Forced]:
    """A selector for each density of neurons, calibrated on a prompt and the tokens after it.

    The scores of a layer are centred neuron by neuron first: inputs have a common part, and with
    it the same neurons would be chosen for every token. Then the bias is the quantile of all
    scores. Raises InputError for a density outside of (0, 1].
    """
    for density in densities:
        if not 0.0 < density <= 1.0:
            raise InputError(f"a density must lie in (0, 1], not {density:g}")
    model = loaded.model
    ids = torch.tensor([*prompt, *answer])
    scorers = random_scorers(model.config, min(rank, model.config.hidden_size), seed=seed)
    forced = []
    for density in densities:
        calibrator = _Calibrator(scorers, density, len(prompt))
        cache = model.new_cache(len(ids))
        model.logits(ids, cache, calibrator, TorchOps(), last_only=True)
        forced.append(Forced(scorers, calibrator.cuts, density))
    return forced


def _threshold(scores: Tensor, density: float) -> float:
    """The value that the share `density` of the scores exceeds."""
    below = scores.numel() - round(density * scores.numel())
    if below == 0:
        return -1e30
    return float(scores.flatten().kthvalue(below).values)


def _z(density: float, neurons: int) -> float:
    """The value that a standard normal one exceeds with a probability of `density`."""
    rare = 0.5 / neurons
    return NormalDist().inv_cdf(1.0 - min(max(density, rare), 1.0 - rare))
