"""Plans forced to a density on random weights: the speed is real, the text means nothing.

Every layer gets a predictor of random int8 matrices, and biases calibrated on the model's own
inputs so that a neuron's score is above 0 as often as asked. Which neurons those are changes from
token to token. From there on it is a plan like any other: the same selector, kernels and meter. The
density is counted while it runs, never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import LoadedModel
from dejavu.predictor.network import Predictor
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.policy import Points, Selector, Site

DEFAULT_RANK = 128
_BYTE_SPREAD = 73.3  # standard deviation of uniform bytes from -127 to 127


@dataclass(frozen=True, eq=False)
class Cut:
    """Where one layer's scores are cut. bias: fp32 `[F]`, a score above 0 is selected. spread: of
    the scores about each neuron's mean."""

    bias: Tensor
    spread: float


class Forced(PlanSelector):
    """A plan's selector whose random predictors were calibrated to a density."""

    def __init__(
        self,
        config: ModelConfig,
        predictors: Sequence[Predictor],
        cuts: Sequence[Cut],
        density: float,
    ) -> None:
        """density: of neurons, what was asked for."""
        choices = {
            (Site.NEURONS, layer): Choice(Predictor(p.first, p.second, cut.bias))
            for layer, (p, cut) in enumerate(zip(predictors, cuts, strict=True))
        }
        super().__init__(config.num_hidden_layers, config.intermediate_size, choices)
        self.density = density
        self._spreads = [cut.spread for cut in cuts]

    def correct(self) -> float:
        """Move every layer's threshold by what was counted since the last reset of the meter.

        Other tokens than the calibrated ones shift all scores a little; being about normal, they
        come back to the asked density in a few such steps. Returns the error of the mean density
        that was counted.
        """
        counted = [used / self._neurons for used in self.meter.used()]
        if self.density < 1.0:
            for layer, (spread, density) in enumerate(zip(self._spreads, counted, strict=True)):
                away = _z(density, self._neurons) - _z(self.density, self._neurons)
                self._biases[Site.NEURONS, layer].add_(away * spread)  # recorded steps read it
        return abs(sum(counted) / len(counted) - self.density)


def random_predictors(config: ModelConfig, rank: int, *, seed: int = 0) -> list[Predictor]:
    """One for each layer, without bias; scores of normalised inputs have a spread of about 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        data = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
        return Matrix(data, torch.full((rows,), columns**-0.5 / _BYTE_SPREAD))

    neurons = config.intermediate_size
    return [
        Predictor(matrix(rank, config.hidden_size), matrix(neurons, rank), torch.zeros(neurons))
        for _ in range(config.num_hidden_layers)
    ]


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
    predictors = random_predictors(model.config, min(rank, model.config.hidden_size), seed=seed)
    ids = torch.tensor([*prompt, *answer])
    forced = []
    for density in densities:
        calibrator = _Calibrator(predictors, density, len(prompt))
        cache = model.new_cache(len(ids))
        model.logits(ids, cache, calibrator, TorchOps(), last_only=True)
        forced.append(Forced(model.config, predictors, calibrator.cuts, density))
    return forced


class _Calibrator(Selector):
    """Sees a whole sequence at once, dense in its prompt and sparse after it as in decoding, and
    lets each layer keep the asked share of all scores after the prompt.

    A layer is calibrated on the outputs of the sparse layers before it.
    """

    capturable = False

    def __init__(self, predictors: Sequence[Predictor], density: float, prompt: int) -> None:
        self._predictors, self._density, self._prompt = predictors, density, prompt
        self.cuts: list[Cut] = []

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS:
            return None
        scores = self._predictors[layer].scores(points.source(site, layer), ops)
        decoded = scores[self._prompt :]
        centre = decoded.mean(dim=0)
        centred = decoded - centre
        bias = -centre - _threshold(centred, self._density)
        self.cuts.append(Cut(bias, float(centred.std())))
        used = scores + bias > 0
        used[: self._prompt] = True
        return Selection.from_mask(used)


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
