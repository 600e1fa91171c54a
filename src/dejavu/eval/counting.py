"""What a selector's choices cost, counted for each token while a text is read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from dejavu.eval.forced import Stretch
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.models.base import DecoderLM
from dejavu.sparsity.accounting import LayerReads, dense_bytes, step_bytes
from dejavu.sparsity.inputs import InputSelector
from dejavu.sparsity.policy import InputReader, Points, Selector, Site, Stage
from dejavu.sparsity.record import neuron_activations


@runtime_checkable
class Metered(Protocol):
    """A selector that counts what its steps read, like `sparsity.meter.MeteredSelector`."""

    def reset(self) -> None:
        """Start counting anew."""
        ...

    def reads(self) -> Sequence[LayerReads]:
        """Mean over the steps since the last reset, for each layer."""
        ...


@runtime_checkable
class Priced(Protocol):
    """A selector that knows what choosing costs; an oracle, which has to compute everything first,
    is none."""

    predictor_bytes: float


class Counting(Selector):
    """Another selector, whose choices are counted row by row: never the union over rows."""

    capturable = False

    def __init__(self, inner: Selector, model: DecoderLM) -> None:
        self._inner = inner
        self._model = model
        self._layers = model.config.num_hidden_layers
        self.reset()

    def fork(self) -> Counting:
        other = copy(self)
        other._inner = self._inner.fork()
        return other

    def reset(self) -> None:
        """Start counting anew."""
        self._rows = [0]
        self._used = {site: [0] * self._layers for site in Site}
        self._active = [0] * self._layers
        if isinstance(self._inner, InputSelector):
            self._inner.reset()

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        selection = self._inner.select(site, layer, points, ops)
        x = points.source(site, layer)
        if layer == 0 and site == Site.NEURONS:
            self._rows[0] += len(x)
        if selection is None:
            count = _entries(self._model, site) * len(x)
            self._used[site][layer] += count
            self._active[layer] += count if site == Site.NEURONS else 0
            return None
        used = selection.to_mask(len(x))
        self._used[site][layer] += int(used.sum())
        if site == Site.NEURONS:
            if self._model.activation.is_sparse:
                mlp = self._model.weights.blocks[layer].mlp
                used = used & (neuron_activations(x, mlp, self._model.activation, ops) != 0)
            self._active[layer] += int(used.sum())
        return selection

    def inputs(self, layer: int) -> InputReader | None:
        return self._inner.inputs(layer)

    def observe(self, stage: Stage, layer: int, value: torch.Tensor) -> None:
        self._inner.observe(stage, layer, value)

    def reads(self) -> list[LayerReads]:
        """Rows read for one token in each layer, mean over all tokens so far."""
        if isinstance(self._inner, InputSelector):
            return self._inner.meter.used_channels()
        neurons, heads = (self._used[site] for site in (Site.NEURONS, Site.HEADS))
        (rows,) = self._rows
        return [
            LayerReads(n / rows, a / rows, h / rows)
            for n, a, h in zip(neurons, self._active, heads, strict=True)
        ]


@dataclass(frozen=True)
class Reads:
    """What was read, as shares of the dense model.

    neurons, heads: density, by layer. weight_bytes: bytes a token over the dense model's, both in
    the stored dtype, predictors counted; None for a selector that does not say what choosing costs.
    rows: 1, or the mean rows of a decode step, whose union these figures are of (bytes are then
    those of a step, over its rows).
    """

    neurons: list[float]
    heads: list[float]
    weight_bytes: float | None
    rows: float

    @property
    def neuron_density(self) -> float:
        """Mean over layers."""
        return sum(self.neurons) / len(self.neurons)

    @property
    def head_density(self) -> float:
        """Mean over layers."""
        return sum(self.heads) / len(self.heads)


class Counter:
    """Collects what a selector counts stretch by stretch: it takes all steps to be of one size.

    selector: what is to run; one that does not count is run all the same.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self._meter = selector if isinstance(selector, Metered) else None
        self._found: list[tuple[Stretch, Sequence[LayerReads]]] = []

    def start(self) -> None:
        """Before a stretch is read."""
        if self._meter is not None:
            self._meter.reset()

    def stop(self, stretch: Stretch) -> None:
        """After it."""
        if self._meter is not None:
            self._found.append((stretch, self._meter.reads()))

    def reads(self, model: DecoderLM, selector: Selector) -> Reads | None:
        """Mean over all steps; None where nothing counts. selector: what choosing costs."""
        if not self._found:
            return None
        steps = sum(stretch.steps for stretch, _ in self._found)
        rows = sum(stretch.steps * stretch.rows for stretch, _ in self._found) / steps
        neurons, groups = _entries(model, Site.NEURONS), _entries(model, Site.HEADS)

        def mean(layer: int, field: str, everything: float) -> float:
            total = 0.0
            for stretch, layers in self._found:
                value = getattr(layers[layer], field)
                total += stretch.steps * (everything if value is None else value)
            return total / steps

        def inputs(layer: int) -> dict[str, float] | None:
            found = [(s.steps, layers[layer].inputs) for s, layers in self._found]
            if any(read is None for _, read in found):
                return None
            sites = found[0][1] or {}
            return {site: sum(n * (r or {})[site] for n, r in found) / steps for site in sites}

        means = []
        for layer in range(model.config.num_hidden_layers):
            listed = mean(layer, "neurons", neurons)
            active, used = mean(layer, "active", listed), mean(layer, "groups", groups)
            means.append(LayerReads(listed, active, used, inputs=inputs(layer)))
        weight_bytes = None
        if isinstance(selector, Priced):
            predictors = selector.predictor_bytes
            weights = model.outline().weights
            step = step_bytes(weights, means, groups=groups, predictor_bytes=predictors)
            weight_bytes = step / rows / dense_bytes(weights)
        return Reads(
            [(read.neurons or 0.0) / neurons for read in means],
            [(read.groups or 0.0) / groups for read in means],
            weight_bytes,
            rows,
        )


def counter_of(selector: Selector, model: DecoderLM, through: str) -> Counter:
    """Counts token by token on the prefill path; decode steps count themselves, if at all."""
    return Counter(Counting(selector, model) if through == "prefill" else selector)


def _entries(model: DecoderLM, site: Site) -> int:
    c = model.config
    return c.intermediate_size if site == Site.NEURONS else c.num_key_value_heads
