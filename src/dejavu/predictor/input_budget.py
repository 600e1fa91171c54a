"""How much input sparsity each site of each layer gets: the fewest bytes at a loss.

Leaving channels out of an input x changes the loss to second order by half the mean square of
`sum over them of x_i g_i`, where g is the gradient of the loss with respect to x and labels are
drawn from the model's own predictions (the Fisher information; Martens, arXiv 1412.1193). One
backward pass over some text so gives the damage of every threshold of every site. A price of bytes
in nats then fixes all thresholds at once, and held-out text says what the price really costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.channels import WHOLE
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.models.base import DecoderLM
from dejavu.sparsity.accounting import input_parts
from dejavu.sparsity.inputs import ByInput, InputMeter, InputSite, LayerInputs, Thresholds
from dejavu.sparsity.losses import Mean
from dejavu.sparsity.policy import Points, Selector

GRID = tuple(n / 20 for n in range(1, 18))  # sparsities that a site may get: 5 to 85 %
_SCORED_ROWS = 64  # tokens of a window whose scores the thresholds come from
_TRIALS = 7
_FIRST_TRIAL = 0.25  # sparsity
_STEEPNESS = 4.0  # power of the sparsity with which the loss grows, about
_LEAST = 0.2  # of the allowed loss: what is measured below counts as so much
_CLOSE = 0.9  # of the allowed loss: near enough to stop searching

Place = tuple[int, InputSite]
Tick = Callable[[int, int], None]  # windows done, windows in all
Trial = tuple[float, Mean]
"""A price in nats a byte, and the mean loss a token measured at it."""
Measure = Callable[[Sequence[Thresholds]], Mean]
"""Mean loss a token above the dense model's, on held-out text, of thresholds by layer."""


@dataclass(frozen=True)
class InputCurve:
    """One site of one layer. nbytes: of the matrices that read it; thresholds and nats: for each
    sparsity of `GRID`, ascending."""

    nbytes: int
    thresholds: tuple[float, ...]
    nats: tuple[float, ...]

    def best(self, price: float) -> int | None:
        """The place in the grid with the best balance at a price in nats a byte; None: dense."""
        gains = [s * self.nbytes * price - n for s, n in zip(GRID, self.nats, strict=True)]
        number = max(range(len(GRID)), key=gains.__getitem__)
        return number if gains[number] > 0 else None


Curves = Mapping[Place, InputCurve]


def curves_to_json(curves: Curves) -> dict[str, Any]:
    """Plain values, by `site.layer`."""
    return {f"{site}.{layer}": asdict(curve) for (layer, site), curve in curves.items()}


def curves_from_json(content: Mapping[str, Any]) -> dict[Place, InputCurve]:
    """What `curves_to_json` gave."""
    found = {}
    for name, entry in content.items():
        site, _, layer = name.rpartition(".")
        found[int(layer), InputSite(site)] = InputCurve(
            entry["nbytes"], tuple(entry["thresholds"]), tuple(entry["nats"])
        )
    return found


class _Watched(LayerInputs):
    """Dense projections by input channel, each input shown to a watcher."""

    def __init__(
        self, matrices: ByInput, model: DecoderLM, watch: Callable[[InputSite, Tensor], None]
    ) -> None:
        super().__init__(matrices, {}, model.activation, InputMeter(1), 0)
        self._watch = watch

    def qkv(self, x: Tensor, points: Points, ops: Ops) -> list[Tensor]:
        if torch.is_grad_enabled() and not x.requires_grad:  # gradients begin with the first block
            x = x.detach().requires_grad_()
        return super().qkv(x, points, ops)

    def choose(self, site: InputSite, x: Tensor, points: Points, ops: Ops) -> Selection | None:
        self._watch(site, x)
        return None


class _Watcher(Selector):
    """A selector that shows all inputs of all blocks to a function of place and input."""

    capturable = False

    def __init__(self, model: DecoderLM, watch: Callable[[Place, Tensor], None]) -> None:
        def of(layer: int) -> Callable[[InputSite, Tensor], None]:
            return lambda site, x: watch((layer, site), x)

        blocks = model.weights.blocks
        self._layers = [_Watched(ByInput.of(b), model, of(n)) for n, b in enumerate(blocks)]

    def inputs(self, layer: int) -> LayerInputs:
        return self._layers[layer]

    def norms(self) -> dict[Place, Tensor]:
        """fp32 `[channels]` of every place."""
        layers = enumerate(self._layers)
        return {(n, site): found.matrices.norms(site) for n, found in layers for site in InputSite}


def input_curves(
    model: DecoderLM, windows: Tensor, tick: Tick, *, weighted: bool = True, seed: int = 0
) -> dict[Place, InputCurve]:
    """Damage of input sparsity at every place, from windows int64 `[n, T + 1]` of text.

    model: widened. weighted: scores carry the norms of columns, else they are magnitudes alone (for
    comparison). Not to be called in inference mode.
    """
    scores = _scores(model, windows, weighted)
    levels = {place: torch.quantile(_sample(s), torch.tensor(GRID)) for place, s in scores.items()}
    damage = {place: torch.zeros(len(GRID), dtype=torch.float64) for place in levels}
    norms: dict[Place, Tensor] = {}

    def watch(place: Place, x: Tensor) -> None:
        def count(gradient: Tensor) -> None:
            with torch.no_grad():
                bins = torch.bucketize((x * norms[place]).abs(), levels[place], right=True)
                parts = x.new_zeros(len(x), len(GRID) + 1).scatter_add_(1, bins, x * gradient)
                left_out = parts[WHOLE:].double().cumsum(dim=1)[:, : len(GRID)]
                damage[place] += left_out.square().sum(dim=0) / 2

        x.register_hook(count)  # type: ignore[no-untyped-call]

    watcher = _Watcher(model, watch)
    norms.update(watcher.norms() if weighted else _ones(watcher.norms()))
    generator = torch.Generator().manual_seed(seed)
    for done, window in enumerate(windows, 1):
        logits = model.logits(window[:-1], model.new_cache(len(window)), watcher, TorchOps())
        with torch.no_grad():
            drawn = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
        torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()  # type: ignore[no-untyped-call]
        tick(done, len(windows))
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    sizes = [input_parts(block) for block in model.weights.blocks]
    return {
        (layer, site): InputCurve(
            sizes[layer][site][1],
            tuple(levels[layer, site].tolist()),
            tuple((damage[layer, site] / tokens).cummax(dim=0).values.tolist()),
        )
        for layer, site in levels
    }


def _scores(model: DecoderLM, windows: Tensor, weighted: bool) -> dict[Place, Tensor]:
    """Scores of some tokens at every place, fp32, flat."""
    found: dict[Place, list[Tensor]] = {}

    def watch(place: Place, x: Tensor) -> None:
        rows = x[WHOLE:] if len(x) > WHOLE else x
        found.setdefault(place, []).append(rows[:: max(1, len(rows) // _SCORED_ROWS)].abs())

    watcher = _Watcher(model, watch)
    norms = watcher.norms() if weighted else _ones(watcher.norms())
    with torch.no_grad():
        for window in windows:
            ids = window[:-1]
            model.logits(ids, model.new_cache(len(ids)), watcher, TorchOps(), last_only=True)
    return {place: (torch.cat(parts) * norms[place]).flatten() for place, parts in found.items()}


def _ones(norms: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    return {place: torch.ones_like(norm) for place, norm in norms.items()}


def _sample(scores: Tensor) -> Tensor:
    """At most what `torch.quantile` takes, evenly."""
    return scores[:: max(1, math.ceil(len(scores) / 1_000_000))]


def uniform_thresholds(curves: Curves, sparsity: float) -> list[dict[InputSite, float]]:
    """The same sparsity (of `GRID`) everywhere, by layer: what a budget is compared with."""
    return _by_layer({place: GRID.index(sparsity) for place in curves}, curves)


def priced_thresholds(curves: Curves, price: float) -> list[dict[InputSite, float]]:
    """The best balance of every place at a price in nats a byte, by layer."""
    return _by_layer({place: curve.best(price) for place, curve in curves.items()}, curves)


def planned_sparsity(curves: Curves, price: float) -> float:
    """Share of the bytes of all places that a price leaves out, as calibrated."""
    skipped = 0.0
    for curve in curves.values():
        number = curve.best(price)
        skipped += 0.0 if number is None else GRID[number] * curve.nbytes
    return skipped / sum(curve.nbytes for curve in curves.values())


def price_for_sparsity(curves: Curves, sparsity: float) -> float:
    """The lowest price at which so large a share is left out, to 1 %."""
    low, high = _bounds(curves)
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if planned_sparsity(curves, middle) >= sparsity else (middle, high)
        )
    return high


def price_for_loss(
    curves: Curves, max_loss: float, measure: Measure, trials: list[Trial] | None = None
) -> Trial | None:
    """The highest price found whose measured loss, two standard errors added, is allowed.

    max_loss: relative rise of perplexity. trials: what was measured for other losses of the same
    curves and text, to start from; what is measured here is added. None where no price is allowed.
    """
    trials = [] if trials is None else trials
    allowed = math.log1p(max_loss)
    for _ in range(_TRIALS):
        best, low, high = _bracket(curves, trials, allowed)
        if best is not None and best[1].upper >= _CLOSE * allowed:
            break
        sparsity = _guess(low, high, allowed)
        price = _between(curves, sparsity, low[0], high[0])
        if price is None:
            break
        trials.append((price, measure(priced_thresholds(curves, price))))
    return _bracket(curves, trials, allowed)[0]


def _bracket(
    curves: Curves, trials: Sequence[Trial], allowed: float
) -> tuple[Trial | None, tuple[float, float], tuple[float, float]]:
    """The highest allowed trial, and the sparsity and loss, errors added, between which more could
    be allowed; (0, 0) and an infinite loss stand for what was not measured."""
    best, low, high = None, (0.0, 0.0), (GRID[-1], math.inf)
    for trial in trials:
        point = planned_sparsity(curves, trial[0]), trial[1].upper
        if point[1] <= allowed and point[0] > low[0]:
            best, low = trial, point
    for trial in trials:
        point = planned_sparsity(curves, trial[0]), trial[1].upper
        if point[1] > allowed and low[0] < point[0] < high[0]:
            high = point
    return best, low, high


def _between(curves: Curves, sparsity: float, low: float, high: float) -> float | None:
    """A price that leaves out about so much, and more than `low`, less than `high`: sparsities come
    in steps, and the next one up may have been too much already. None where there seems to be none.
    """
    for share in (1.0, 0.75, 0.5, 0.25, 0.1):
        price = price_for_sparsity(curves, low + share * (sparsity - low))
        if low < planned_sparsity(curves, price) < high:
            return price
    return None


def _guess(low: tuple[float, float], high: tuple[float, float], allowed: float) -> float:
    """The sparsity at which a loss that grows as a power of it is nearly all that is allowed."""
    aimed = (1 + _CLOSE) / 2 * allowed
    known = [
        (s, max(loss, _LEAST * allowed)) for s, loss in (low, high) if s > 0 and loss < math.inf
    ]
    if not known:
        return _FIRST_TRIAL
    sparsity, loss = known[0]
    steepness = _STEEPNESS
    if len(known) == 2:
        steepness = math.log(known[1][1] / loss) / math.log(known[1][0] / sparsity)
    guess = sparsity * (aimed / loss) ** (1 / steepness)
    return guess if low[0] < guess < high[0] else (low[0] + high[0]) / 2


def _bounds(curves: Curves) -> tuple[float, float]:
    """Prices at which nothing and everything is left out."""
    sizes = sum(curve.nbytes for curve in curves.values())
    return 1e-9 / sizes, 1e5 / sizes


def _by_layer(numbers: Mapping[Place, int | None], curves: Curves) -> list[dict[InputSite, float]]:
    layers: list[dict[InputSite, float]] = [{} for _ in range(1 + max(n for n, _ in numbers))]
    for (layer, site), number in numbers.items():
        layers[layer][site] = 0.0 if number is None else curves[layer, site].thresholds[number]
    return layers
