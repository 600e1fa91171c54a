"""The arms of `predictor_study.py`: how a predictor of one layer is made, and how it is judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dejavu.kernels.nibbles import Nibbles
from dejavu.predictor.layer import Task, quantise
from dejavu.predictor.recording import Recorded
from dejavu.predictor.start import (
    Factors,
    Moments,
    calibrate,
    random_start,
    regression,
    svd_start,
)
from dejavu.predictor.training import TrainOptions, train
from dejavu.predictor.worth import Neurons
from dejavu.sparsity.policy import Site

if TYPE_CHECKING:
    from predictor_study import Study

DENSITIES = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.3, 0.5)
PAPER_RATES, PAPER_RANKS = (0.001, 0.003, 0.008), (16, 32, 64, 128, 256)
FASTER_RATES, FASTER_RANKS = (0.02, 0.05), (32, 64)
RANKS, NIBBLE_RANKS, ALL_RANKS = (8, 16, 32, 64, 112), (32, 64, 112, 144), (16, 32, 64, 96, 128)
MIDDLE = 64  # the rank of everything that is tried at one rank
FITTED = 4096  # tokens that scales and offsets are fitted to
GUESSED = 8192  # tokens from which an earlier input learns to stand for the layer's own
STEPS = {4: 0.335, 3: 0.586, 2: 0.996}  # of a normal spread: least squared error of even levels
DENSITY = 0.1  # at which perplexity is compared


@dataclass
class Arm:
    """A predictor of one layer. source: site and layer whose input it reads. factors: as stored,
    in floating point; None where it has another form. points: (density, missed mass, nats)."""

    name: str
    rank: int
    bits: int
    nbytes: int
    source: tuple[Site, int]
    factors: Factors | None
    points: list[tuple[float, float, float]]
    threshold: float  # at `DENSITY`

    def scores(self, x: Tensor) -> Tensor:
        """Of inputs fp32 `[N, D]`; there must be factors."""
        f = self.factors
        assert f is not None
        return Factors(*(part.to(x.device) for part in (f.first, f.second, f.bias))).scores(x)

    def to_plain(self) -> dict[str, Any]:
        """For `from_plain`; nothing but values and tensors."""
        factors = (
            None
            if self.factors is None
            else tuple(
                f.cpu() for f in (self.factors.first, self.factors.second, self.factors.bias)
            )
        )
        return vars(self) | {"factors": factors, "source": (str(self.source[0]), self.source[1])}

    @staticmethod
    def from_plain(content: dict[str, Any]) -> Arm:
        """What `to_plain` gave."""
        factors, (site, layer) = content["factors"], content["source"]
        found = None if factors is None else Factors(*factors)
        return Arm(**content | {"factors": found, "source": (Site(site), layer)})


class Layer:
    """One layer: contributions of its neurons on all recorded tokens, and what to do with them."""

    def __init__(self, study: Study, number: int) -> None:
        key = (Site.NEURONS, number)
        self.number, self.study, self.key = number, study, key
        self.mlp = study.model.weights.blocks[number].mlp
        neurons = Neurons.of(self.mlp, study.model.activation)
        self.norms = neurons.norms
        self.survey = study.survey.sites[key]
        self.task = Task(key, self.survey, study.survey.price, neurons)
        self.paper = Task(key, self.survey, study.survey.price, neurons, alike=True)
        self.contributions = self._all(study.train)
        self.held = self._all(study.held).float()
        self.moments = Moments.of(study.train.inputs[key])

    def _all(self, data: Recorded) -> Tensor:
        parts = [
            self.task.contributions(data, slice(start, start + 4096), self.study.ops).half()
            for start in range(0, len(data.inputs[self.key]), 4096)
        ]
        return torch.cat(parts)

    def weights(self, task: Task, rows: Tensor | slice) -> Tensor:
        """What the loss weighs an entry by, fp32 `[n, entries]`."""
        return task.weights(self.contributions[rows].float())

    def trained(
        self,
        task: Task,
        starts: Sequence[Factors],
        source: tuple[Site, int] | None = None,
        **options: Any,
    ) -> list[Factors]:
        """One pass over all tokens."""
        x = self.study.train.inputs[source or self.key]
        return train(x, lambda rows: self.weights(task, rows), starts, TrainOptions(**options))

    def starts(
        self, ranks: Sequence[int], fitted: bool = True, source: tuple[Site, int] | None = None
    ) -> list[Factors]:
        """Low-rank stand-ins of the layer's first matrix, and their fit; source: of an earlier
        input, from which the layer's own is guessed."""
        matrix, moments = self.mlp.up.weight.float(), self.moments
        x = own = self.study.train.inputs[self.key]
        if source is not None and source != self.key:
            x = self.study.train.inputs[source]
            moments = Moments.of(x)
            matrix = matrix @ regression(x[:GUESSED].float(), own[:GUESSED].float(), moments)
        found = svd_start(matrix, self.mlp.up.bias, moments, ranks)
        return [self.fitted(start, x) for start in found] if fitted else found

    def random(self, rank: int) -> Factors:
        """Where the paper's predictor starts from."""
        up = self.mlp.up.weight
        return random_start(up.rows, up.columns, rank, 0, up.data.device)

    def fitted(self, start: Factors, x: Tensor | None = None) -> Factors:
        """Scale and offset of every entry by Newton's method."""
        x = self.study.train.inputs[self.key] if x is None else x
        return calibrate(start, x[:FITTED].float(), self.weights(self.task, slice(0, FITTED)))

    def low_rank(
        self, name: str, factors: Factors, bits: int, source: tuple[Site, int] | None = None
    ) -> Arm:
        """An arm of two stages, rounded to their bits."""
        predictor = quantise(factors, bits)
        first, second = (
            (m.int8() if isinstance(m, Nibbles) else m).float()
            for m in (predictor.first, predictor.second)
        )
        found = Factors(first, second, predictor.bias)
        source = source or self.key
        scores = found.scores(self.study.held.inputs[source].float())
        arm = Arm(name, predictor.rank, bits, predictor.nbytes, source, found, [], 0.0)
        return self.judged(arm, scores)

    def other(self, name: str, bits: int, nbytes: int, scores: Tensor) -> Arm:
        """An arm that scores in another way."""
        return self.judged(Arm(name, 0, bits, nbytes, self.key, None, [], 0.0), scores)

    def judged(self, arm: Arm, scores: Tensor) -> Arm:
        """Fill in what is missed at every density: entries that score above one threshold."""
        places = [round((1 - density) * (scores.numel() - 1)) for density in DENSITIES]
        levels = ascending(scores, places)
        arm.threshold = levels[DENSITIES.index(DENSITY)]
        mass = self.held.sum(dtype=torch.float64)
        squares = self.held.square()
        for level in levels:
            left = scores <= level
            missed = float(self.held[left].sum(dtype=torch.float64) / mass)
            damage = float(squares[left].sum(dtype=torch.float64)) / len(scores)
            nats = self.survey.sensitivity / 2 * damage
            arm.points.append((1 - float(left.float().mean()), missed, nats))
        return arm


def ascending(scores: Tensor, places: Sequence[int]) -> list[float]:
    """What would stand at some places of all scores in order."""
    if scores.is_cuda:
        found: list[float] = scores.flatten().sort().values[list(places)].tolist()
        return found
    flat = scores.flatten().numpy()
    return [float(level) for level in np.partition(flat, places)[places]]


def paper(layer: Layer) -> Iterator[Arm]:
    """Random start, BCE, every active neuron alike; the best of some rates at every rank."""
    tried = []
    for rate in PAPER_RATES:
        start = layer.random(MIDDLE)
        (factors,) = layer.trained(layer.paper, [start], rate=rate, bits=8)
        arm = layer.low_rank(f"paper, rate {rate:g}", factors, 8)
        tried.append((arm.points[DENSITIES.index(DENSITY)][1], rate, arm))
        yield arm
    _, rate, best = min(tried, key=lambda found: found[0])
    ranks = [rank for rank in PAPER_RANKS if rank != MIDDLE]
    starts = [layer.random(rank) for rank in ranks]
    for factors in layer.trained(layer.paper, starts, rate=rate, bits=8):
        yield layer.low_rank("paper", factors, 8)
    assert best.factors is not None
    yield layer.low_rank("paper", best.factors, 8)


def faster(layer: Layer) -> Iterator[Arm]:
    """The paper's at higher rates: in one pass a random start has far to go."""
    for rate in FASTER_RATES:
        starts = [layer.random(rank) for rank in FASTER_RANKS]
        for factors in layer.trained(layer.paper, starts, rate=rate, bits=8):
            yield layer.low_rank(f"paper, rate {rate:g}", factors, 8)


def ours(layer: Layer) -> Iterator[Arm]:
    """Whitened SVD, scale and offset fitted, trained with contribution-aware labels; int8."""
    for factors in layer.trained(layer.task, layer.starts(RANKS), bits=8):
        yield layer.low_rank("ours", factors, 8)


def nibbles(layer: Layer) -> Iterator[Arm]:
    """The same in 4 bits, the second half of the training rounded: the default."""
    for factors in layer.trained(layer.task, layer.starts(NIBBLE_RANKS), bits=4):
        yield layer.low_rank("ours", factors, 4)


def parts(layer: Layer) -> Iterator[Arm]:
    """What start and labels bring by themselves."""
    (start,) = layer.starts([MIDDLE])
    (factors,) = layer.trained(layer.paper, [start], bits=8)
    yield layer.low_rank("SVD start, labels of the paper", factors, 8)
    start = layer.random(MIDDLE)
    (factors,) = layer.trained(layer.task, [start], bits=8)
    yield layer.low_rank("random start, labels by contribution", factors, 8)


def untrained(layer: Layer) -> Iterator[Arm]:
    """No gradient at all: SVD, signs, and copies of the first matrix in few bits."""
    for rank, start in zip(RANKS, layer.starts(RANKS, fitted=False), strict=True):
        yield layer.low_rank("SVD alone", start, 8)
        if rank in (32, MIDDLE, 112):
            yield layer.low_rank("SVD, fitted", layer.fitted(start), 8)
    up, bias = layer.mlp.up.weight.float(), layer.mlp.up.bias
    x, held = (d.inputs[layer.key] for d in (layer.study.train, layer.study.held))
    entries, width = up.shape
    zeros = torch.zeros(entries, device=up.device)
    agreeing = held.float().sign() @ up.sign().t()
    yield layer.other("signs, one threshold", 1, entries * width // 8, agreeing)
    signs = Factors(up.sign(), torch.eye(entries, device=up.device) / width**0.5, zeros)
    fit = layer.fitted(signs, x.sign())
    scores = agreeing * fit.second.diagonal() + fit.bias
    yield layer.other("signs, fitted", 1, entries * width // 8 + 4 * entries, scores)
    for bits, step in STEPS.items():
        unit = up.square().mean(dim=1, keepdim=True).sqrt() * step
        top = 2.0 ** (bits - 1) - 0.5
        rounded = ((up / unit - 0.5).round() + 0.5).clamp(-top, top) * unit
        scores = torch.addmm(zeros if bias is None else bias, held.float(),
                             rounded.t()) * layer.norms  # fmt: skip
        yield layer.other("low-bit copy", bits, entries * width * bits // 8 + 8 * entries, scores)


def lookahead(layer: Layer) -> Iterator[Arm]:
    """From earlier inputs: half a block, a block, and one early point for all layers."""
    first = (Site.NEURONS, min(layer.study.layers))
    sources = {
        "half a block ahead": (Site.HEADS, layer.number),
        "a block ahead": (Site.NEURONS, layer.number - 1),
    }
    if first != layer.key:
        sources[f"from layer {first[1]} on"] = first
    for name, source in sources.items():
        (start,) = layer.starts([MIDDLE], source=source)
        (factors,) = layer.trained(layer.task, [start], source, bits=8)
        yield layer.low_rank(name, factors, 8, source)


def ranks(layer: Layer) -> Iterator[Arm]:
    """Fitted stand-ins at many ranks, for budgets over all layers."""
    for start in layer.starts(ALL_RANKS):
        yield layer.low_rank("SVD, fitted", start, 8)
