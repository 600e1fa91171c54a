"""A plan at work: each layer's predictor scores, the level's threshold decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from dejavu.kernels.device import CPU
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.nibbles import NibbleOps, Nibbles
from dejavu.kernels.ops import Ops, Projection, at_once
from dejavu.kernels.selection import Selection
from dejavu.predictor.network import Predictor
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Key, Points, Site, Stage, point


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
    """Selects by the choices of a plan's level; a place without one computes everything.

    whole, whole_heads: layers whose MLP, or all of whose heads, the next forward computes, as if
    they had no predictor: none runs.
    """

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
            key: _folded(choice.predictor, choice.threshold)
            for key, choice in choices.items()
            if choice.predictor is not None
        }
        self._buffers: dict[tuple[Site, int, int], Selection] = {}
        self.whole: frozenset[int] = frozenset()
        self.whole_heads: frozenset[int] = frozenset()
        self._by_source: dict[int, list[Key]] = {}
        for (site, layer), choice in choices.items():
            self._by_source.setdefault(point(site, layer, choice.distance), []).append(
                (site, layer)
            )
        # By site and rows, of all layers, so that they are added up at once.
        self._counts: dict[tuple[Site, int], Tensor] = {}
        self._brief = False
        self._started: dict[Key, Callable[[], Selection]] = {}  # of the forward under way
        self._counted: list[Callable[[], None]] = []
        self._held: list[dict[Key, Tensor]] = []  # what work ahead may still be reading
        self._predictor_bytes = {
            key: choice.predictor.nbytes
            for key, choice in choices.items()
            if choice.predictor is not None
        }

    @property
    def predictor_bytes(self) -> float:  # type: ignore[override]
        """Of the predictors that ran, mean over the steps since the last reset."""
        return sum(
            nbytes * self.meter.choosing(site, layer)
            for (site, layer), nbytes in self._predictor_bytes.items()
        )

    def predicted(self, site: Site) -> list[int]:
        """Layers with a predictor of a site."""
        return sorted(layer for of, layer in self._predictor_bytes if of is site)

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        self._start((site, layer), points, ops)
        started = self._started.pop((site, layer), None)
        if started is None:
            return None
        selection = started()
        if self._brief:
            self._buffers.clear()  # what is under way has its own
        return selection

    def fork(self) -> PlanSelector:
        """The same choices, counted together; selections are not kept for `last`."""
        other = copy(self)
        other._buffers, other._counts, other._started, other._counted = {}, {}, {}, []
        other._held = []
        other._brief = True
        return other

    def observe(self, stage: Stage, layer: int, value: Tensor) -> None:
        if stage is Stage.LOGITS:
            for wait in self._counted:
                wait()
        if stage is Stage.LOGITS or (stage is Stage.BLOCK_INPUT and layer == 0):
            # At the beginning too: a forward that failed on its way left its own there.
            self._started.clear()
            self._counted.clear()
            self._held.clear()

    def set_bias(self, key: Key, bias: Tensor) -> None:
        """From the next step on, let the scores of a place with a predictor have another bias, fp32
        `[entries]`; in place, since recorded steps read it."""
        choice = self._choices[key]
        assert choice.predictor is not None
        self._biases[key].copy_(_folded(replace(choice.predictor, bias=bias), choice.threshold))

    def _start(self, now: Key, points: Points, ops: Ops) -> None:
        """Begin every selection that reads the point which `now` reads at distance 0.

        Those of later places run ahead, beside the work until there.
        """
        keys = [
            (site, layer)
            for site, layer in self._by_source.get(point(*now), ())
            if layer not in (self.whole if site is Site.NEURONS else self.whole_heads)
        ]
        if not keys:
            return
        x = points.source(*now)
        predictors = {key: p for key in keys if (p := self._choices[key].predictor) is not None}

        # Made on one stream and read on another: freed at once, its memory would be the next
        # kernel's output while a selection still reads it.
        hidden: dict[Key, Tensor] = {}
        if not self._brief:  # whose selections all come from one stream
            self._held.append(hidden)

        def choose(key: Key, selection: Selection) -> Selection:
            if key not in predictors:
                return selection
            first, second = predictors[key].first, predictors[key].second
            if isinstance(first, Nibbles):
                assert isinstance(second, Nibbles)
                small = cast(NibbleOps, ops)
                return small.select_nibbles(x, first, second, self._biases[key], out=selection)
            if not hidden:  # by the first: one launch for all first stages
                stages = {k: m for k, p in predictors.items() if isinstance(m := p.first, Matrix)}
                projected = ops.linear(x, [Projection(m) for m in stages.values()])
                hidden.update(zip(stages, projected, strict=True))
            assert isinstance(second, Matrix)
            return ops.select(hidden[key], second, self._biases[key], out=selection)

        for key in sorted(keys, key=lambda key: key != now):
            run = at_once if key == now else ops.ahead
            selection = self._buffer(*key, len(x), self._choices[key])
            self._started[key] = run(partial(choose, key, selection))
            count = partial(self.meter.tally, *key, selection, len(x), ops)
            self._counted.append(ops.ahead(count))

    def last(self, rows: int) -> tuple[list[Selection | None], list[Selection | None]]:
        """What the last step of so many rows selected, of neurons and of heads, by layer; None:
        all. They hold until the next one."""
        neurons, heads = (
            [None if n in whole else self._buffers.get((s, n, rows)) for n in range(self._layers)]
            for s, whole in ((Site.NEURONS, self.whole), (Site.HEADS, self.whole_heads))
        )
        return neurons, heads

    def count_listed(self, rows: int, out: Tensor) -> None:
        """out, int32 `[2, layers]` on the device: neurons and heads that the last step of so many
        rows listed; 0 where no predictor chooses."""
        for site, found in zip((Site.NEURONS, Site.HEADS), out, strict=True):
            counts = self._counts.get((site, rows))
            if counts is None:
                found.zero_()
            else:
                torch.sum(counts, dim=1, dtype=torch.int32, out=found)

    def _buffer(self, site: Site, layer: int, rows: int, choice: Choice) -> Selection:
        """The static buffers of a step of so many rows."""
        found = self._buffers.get((site, layer, rows))
        if found is None:
            if choice.predictor is None:
                found = Selection.full(self._neurons, device=self._device)
            else:
                found = Selection.empty(choice.predictor.entries, rows, device=self._device)
                counts = self._shared_counts(site, layer, rows, found.counts)
                found = replace(found, counts=counts)
            if site == Site.NEURONS:
                found = self.meter.watch(layer, found)
            self._buffers[site, layer, rows] = found
        return found

    def _shared_counts(self, site: Site, layer: int, rows: int, counts: Tensor) -> Tensor:
        """A layer's place in the counts of all layers, for its own."""
        if (site, rows) not in self._counts:
            self._counts[site, rows] = counts.new_zeros(self._layers, len(counts))
        return self._counts[site, rows][layer]


def _folded(predictor: Predictor, threshold: float) -> Tensor:
    """What decides besides the weights: limits of sums, or a bias with the threshold taken off."""
    if isinstance(predictor.second, Nibbles):
        return predictor.limits(threshold)
    return predictor.bias - threshold
