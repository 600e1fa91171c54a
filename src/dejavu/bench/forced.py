"""Plans forced to a density on random weights: the speed is real, the text means nothing.

Every layer gets predictors of random matrices, 4-bit on the CPU and int8 on a GPU, and biases
calibrated on the model's own inputs so that a score is above 0 as often as asked. Which neurons
(and heads) those are changes from token to token. From there on it is a plan like any other: the
same selector, kernels and meter. The density is counted while it runs, never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.device import CPU, on
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.nibbles import Nibbles
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import LoadedModel
from dejavu.predictor.network import Predictor
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.policy import Key, Points, Selector, Site

HEAD_RANK = 64
_WIDE = 6144  # hidden_size above that of 13B models
_BYTE_SPREAD = 73.3  # standard deviation of uniform bytes from -127 to 127
_NIBBLE_SPREAD = 4.61  # of uniform numbers from 0 to 15


def default_rank(config: ModelConfig, device: torch.device = CPU) -> int:
    """Of neuron predictors: on the CPU the middle one of those that `prepare` tries by default, on
    a GPU `gpu_rank`."""
    if device.type != "cpu":
        return gpu_rank(config.hidden_size)
    ranks = PrepareOptions().neuron_ranks(config)
    return ranks[len(ranks) // 2]


def gpu_rank(hidden_size: int) -> int:
    """128 up to models of 13B and 256 from 30B on."""
    return 256 if hidden_size > _WIDE else 128


@dataclass(frozen=True)
class Target:
    """Densities to force, in (0, 1]; heads: of KV groups, 1 leaves attention dense."""

    neurons: float
    heads: float = 1.0

    def __post_init__(self) -> None:
        for density in (self.neurons, self.heads):
            if not 0.0 < density <= 1.0:
                raise InputError(f"a density must lie in (0, 1], not {density:g}")

    @staticmethod
    def parse(text: str) -> Target:
        """`0.1` (of neurons) or `0.1/0.5` (of neurons / of heads). Raises InputError."""
        try:
            densities = [float(part) for part in text.split("/", 1)]
        except ValueError as error:
            raise InputError(
                f"{text!r} is not a density like 0.1, or 0.1/0.5 with one of heads"
            ) from error
        return Target(*densities)

    def of(self, site: Site) -> float:
        """The density of a site."""
        return self.neurons if site is Site.NEURONS else self.heads

    @property
    def label(self) -> str:
        """As arms are called."""
        heads = "" if self.heads == 1.0 else f", heads {self.heads:.4g}"
        return f"forced {self.neurons:.4g}{heads}"


@dataclass(frozen=True, eq=False)
class Cut:
    """Where the scores of a site of one layer are cut. bias: fp32 `[entries]`, a score above 0 is
    selected. spread: of the scores about each entry's mean, one number."""

    bias: Tensor
    spread: Tensor


class Forced(PlanSelector):
    """A plan's selector whose random predictors were calibrated to a density."""

    def __init__(
        self,
        config: ModelConfig,
        predictors: Mapping[Key, Predictor],
        cuts: Mapping[Key, Cut],
        target: Target,
        look_ahead: float = 0.0,
    ) -> None:
        """target: what was asked for. look_ahead: see `Points`."""
        choices = {}
        for key, cut in cuts.items():
            first, second = predictors[key].first, predictors[key].second
            distance = _distance(*key, look_ahead)
            choices[key] = Choice(Predictor(first, second, cut.bias), distance)
        device = next(iter(cuts.values())).bias.device
        super().__init__(config.num_hidden_layers, config.intermediate_size, choices, device)
        self.target = target
        self._centres = {key: cut.bias.clone() for key, cut in cuts.items()}
        self._spreads = {key: float(cut.spread) for key, cut in cuts.items()}
        self._entries = {key: len(cut.bias) for key, cut in cuts.items()}

    def correct(self) -> float:
        """Move every layer's threshold by what was counted since the last reset of the meter.

        Other tokens than the calibrated ones shift all scores a little; being about normal, they
        come back to the asked density in a few such steps. Returns the error of the mean density
        that was counted, of neurons or of heads, whichever is larger.
        """
        errors = [0.0]
        for site in Site:
            asked = self.target.of(site)
            away = []
            for layer, count in enumerate(self.meter.chosen(site)):
                key = site, layer
                if key not in self._spreads or count is None:
                    continue
                entries, spread = self._entries[key], self._spreads[key]
                away.append(count / entries - asked)
                if asked < 1.0:
                    shift = _z(count / entries, entries) - _z(asked, entries)
                    self._centres[key] += shift * spread
                    self.set_bias(key, self._centres[key])
            if away:
                errors.append(abs(sum(away) / len(away)))
        return max(errors)


def random_predictors(
    config: ModelConfig,
    rank: int,
    *,
    site: Site = Site.NEURONS,
    seed: int = 0,
    device: torch.device = CPU,
) -> list[Predictor]:
    """One for each layer, without bias; scores of normalised inputs have a spread of about 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, dtype=dtype, generator=generator, device=device)

    def matrix(rows: int, columns: int) -> Matrix | Nibbles:
        step = torch.full((rows,), columns**-0.5, device=device)
        if device.type == "cpu":
            data = drawn(0, 256, rows, -(-columns // 2), dtype=torch.uint8)
            return Nibbles(data, step / _NIBBLE_SPREAD, columns)
        data = drawn(-127, 128, rows, columns, dtype=torch.int8)
        return Matrix(data, step / _BYTE_SPREAD)

    neurons = site is Site.NEURONS
    entries = config.intermediate_size if neurons else config.num_key_value_heads
    rank = min(rank, config.hidden_size)
    bias = torch.zeros(entries, device=device)
    return [
        Predictor(matrix(rank, config.hidden_size), matrix(entries, rank), bias)
        for _ in range(config.num_hidden_layers)
    ]


def force(
    loaded: LoadedModel,
    targets: Sequence[float | Target],
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    rank: int | None = None,
    head_rank: int = HEAD_RANK,
    look_ahead: float = 0.0,
    seed: int = 0,
) -> list[Forced]:
    """A selector for each target, calibrated on a prompt and the tokens after it, where the model
    lies. A bare number is a density of neurons.

    rank: of neuron predictors; default: `default_rank`. look_ahead: in blocks, 0, 0.5 or 1; layers
    that cannot look so far ahead predict from their own input.

    The scores of a layer are centred entry by entry first: inputs have a common part, and with it
    the same neurons would be chosen for every token. Then the bias is the quantile of all scores.
    Raises InputError for a density outside of (0, 1].
    """
    wanted = [t if isinstance(t, Target) else Target(t) for t in targets]
    if look_ahead not in (0.0, 0.5, 1.0):
        raise InputError(f"a look-ahead is 0, 0.5 or 1 block, not {look_ahead:g}")
    model = loaded.model
    config, device = model.config, model.device
    ranks = {
        Site.NEURONS: default_rank(config, device) if rank is None else rank,
        Site.HEADS: head_rank,
    }
    predictors: dict[Key, Predictor] = {}
    for place, site in enumerate((Site.NEURONS, Site.HEADS)):
        if site is Site.HEADS and all(t.heads == 1.0 for t in wanted):
            continue
        made = random_predictors(config, ranks[site], site=site, seed=seed + place, device=device)
        predictors |= {(site, layer): predictor for layer, predictor in enumerate(made)}
    ids = torch.tensor([*prompt, *answer])
    forced = []
    for target in wanted:
        calibrator = _Calibrator(predictors, target, len(prompt), look_ahead)
        with on(device):
            cache = model.new_cache(len(ids))
            model.logits(ids, cache, calibrator, TorchOps(), last_only=True)
        forced.append(Forced(config, predictors, calibrator.cuts, target, look_ahead))
    return forced


class _Calibrator(Selector):
    """Sees a whole sequence at once, dense in its prompt and sparse after it as in decoding, and
    lets each site keep the asked share of all scores after the prompt.

    A layer is calibrated on the outputs of the sparse layers before it. Nothing waits for the
    device on the way.
    """

    capturable = False

    def __init__(
        self,
        predictors: Mapping[Key, Predictor],
        target: Target,
        prompt: int,
        look_ahead: float,
    ) -> None:
        self._predictors, self._target, self._prompt = predictors, target, prompt
        self._look_ahead = look_ahead
        self.cuts: dict[Key, Cut] = {}

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        density = self._target.of(site)
        if site is Site.HEADS and density == 1.0:
            return None
        x = points.source(site, layer, _distance(site, layer, self._look_ahead))
        scores = self._predictors[site, layer].scores(x, ops)
        decoded = scores[self._prompt :]
        centre = decoded.mean(dim=0)
        centred = decoded - centre
        bias = -centre - _threshold(centred, density)
        self.cuts[site, layer] = Cut(bias, centred.std())
        used = scores + bias > 0
        used[: self._prompt] = True
        return Selection.from_mask(used)


def _distance(site: Site, layer: int, look_ahead: float) -> float:
    """The look-ahead of a site: none where it would reach before the first block."""
    reach = layer + (0.5 if site is Site.NEURONS else 0.0)
    return look_ahead if look_ahead <= reach else 0.0


def _threshold(scores: Tensor, density: float) -> Tensor:
    """The value that the share `density` of the scores exceeds, one number."""
    below = scores.numel() - round(density * scores.numel())
    if below == 0:
        return scores.new_tensor(-1e30)
    return scores.flatten().kthvalue(below).values


def _z(density: float, entries: int) -> float:
    """The value that a standard normal one exceeds with a probability of `density`."""
    rare = 0.5 / entries
    return NormalDist().inv_cdf(1.0 - min(max(density, rare), 1.0 - rare))
