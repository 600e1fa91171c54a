"""Count what selections make the ops read, in buffers that a recorded step can add to."""

from __future__ import annotations

from dataclasses import replace

import torch

from dejavu.config import ModelConfig
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.sparsity.accounting import LayerReads
from dejavu.sparsity.policy import Points, Selector, Site


class Meter:
    """Neurons listed and neurons active, layer by layer, summed over steps of equally many rows."""

    def __init__(self, layers: int) -> None:
        self._counters = torch.zeros(layers, 3, dtype=torch.int64)  # as `Ops.tally` fills them
        self._active = torch.zeros(layers, 1, dtype=torch.int64)
        self._rows = 1

    def watch(self, layer: int, selection: Selection) -> Selection:
        """The same selection, whose active neurons are counted."""
        return replace(selection, active=self._active[layer])

    def tally(self, layer: int, selection: Selection, rows: int, ops: Ops) -> None:
        """Count one step's selection."""
        self._rows = rows
        ops.tally(selection, rows, self._counters[layer])

    def reset(self) -> None:
        """Start anew."""
        self._counters.zero_()
        self._active.zero_()

    def used(self) -> list[float]:
        """Neurons that a row used, as a mean over rows and steps, for each layer."""
        return [used / max(rows, 1) for _, used, rows in self._counters.tolist()]

    def reads(self) -> list[LayerReads]:
        """Mean over the steps since the last reset, for each layer; all rows' union in a batch."""
        found = []
        for (listed, _, rows), (active,) in zip(
            self._counters.tolist(), self._active.tolist(), strict=True
        ):
            steps = max(rows // self._rows, 1)
            found.append(LayerReads(neurons=listed / steps, active=active / steps))
        return found


class MeteredSelector(Selector):
    """A selector with a meter, that says what its steps read and what choosing costs."""

    predictor_bytes = 0

    def __init__(self, layers: int) -> None:
        self.meter = Meter(layers)

    def reset(self) -> None:
        """Start counting anew."""
        self.meter.reset()

    def reads(self) -> list[LayerReads]:
        """Mean over the steps since the last reset, for each layer."""
        return self.meter.reads()


class Exact(MeteredSelector):
    """Every neuron's activation is computed; down rows of those that come out zero are not read.

    For models with a ReLU this changes no bit of the result.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.num_hidden_layers)
        self._full = [
            self.meter.watch(layer, Selection.full(config.intermediate_size))
            for layer in range(config.num_hidden_layers)
        ]

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        """All neurons, counted."""
        if site is not Site.NEURONS:
            return None
        rows = len(points.source(site, layer))
        self.meter.tally(layer, self._full[layer], rows, ops)
        return self._full[layer]


class Unrecorded(Selector):
    """Another selector, in a step that runs through Python op by op."""

    capturable = False

    def __init__(self, inner: Selector) -> None:
        self.select = inner.select  # type: ignore[method-assign]
        self.observe = inner.observe  # type: ignore[method-assign]
