"""A plan at work: each layer's predictor scores, the level's threshold decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dejavu.kernels.device import CPU
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.predictor.network import Predictor
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Points, Site

Key = tuple[Site, int]


@dataclass(frozen=True, eq=False)
class Choice:
    """How one site of one layer selects.

    predictor: None lists everything (`Selection.full`), so that only what the activation zeroes is
    skipped. distance: look-ahead in blocks, see `Points`. threshold: on the predictor's scores.
    """

    predictor: Predictor | None
    distance: float = 0.0
    threshold: float = 0.0

    def to(self, device: torch.device) -> Choice:
        """The same with its predictor on a device."""
        if self.predictor is None:
            return self
        return replace(self, predictor=self.predictor.to(device))


class PlanSelector(MeteredSelector):
    """Selects by the choices of a plan's level; a place without one computes everything."""

    def __init__(
        self,
        layers: int,
        neurons: int,
        choices: Mapping[Key, Choice],
        device: torch.device = CPU,
    ) -> None:
        """layers, neurons, device: of the model; the predictors go to its device."""
        super().__init__(layers, device)
        self._layers = layers
        self._neurons = neurons
        self._device = device
        self._choices = choices = {key: choice.to(device) for key, choice in choices.items()}
        # The threshold is folded into the bias: selected is what scores above 0.
        self._biases: dict[Key, Tensor] = {
            key: choice.predictor.bias - choice.threshold
            for key, choice in choices.items()
            if choice.predictor is not None
        }
        self._buffers: dict[tuple[Site, int, int], Selection] = {}
        self.predictor_bytes = sum(
            choice.predictor.nbytes for choice in choices.values() if choice.predictor is not None
        )

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        choice = self._choices.get((site, layer))
        if choice is None:
            return None
        x = points.source(site, layer, choice.distance)
        selection = self._buffer(site, layer, len(x), choice)
        if choice.predictor is not None:
            hidden = choice.predictor.project(x, ops)
            ops.select(hidden, choice.predictor.second, self._biases[site, layer], out=selection)
        self.meter.tally(site, layer, selection, len(x), ops)
        return selection

    def last(self, rows: int) -> tuple[list[Selection | None], list[Selection | None]]:
        """What the last step of so many rows selected, of neurons and of heads, by layer; None:
        all. They hold until the next one."""
        layers = range(self._layers)
        neurons, heads = (
            [self._buffers.get((site, layer, rows)) for layer in layers]
            for site in (Site.NEURONS, Site.HEADS)
        )
        return neurons, heads

    def _buffer(self, site: Site, layer: int, rows: int, choice: Choice) -> Selection:
        """The static buffers of a step of so many rows."""
        found = self._buffers.get((site, layer, rows))
        if found is None:
            if choice.predictor is None:
                found = Selection.full(self._neurons, device=self._device)
            else:
                found = Selection.empty(choice.predictor.entries, rows, device=self._device)
            if site == Site.NEURONS:
                found = self.meter.watch(layer, found)
            self._buffers[site, layer, rows] = found
        return found
