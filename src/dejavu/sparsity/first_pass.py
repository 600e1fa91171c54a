"""The dense pass over a text, boiled down: who is active, who matters, how alike neighbours are."""

from __future__ import annotations

import torch
from torch import Tensor

from dejavu.sparsity.budgets import Histogram, mass_count, ranks
from dejavu.sparsity.measurement import LayerFigures, MeasureOptions
from dejavu.sparsity.model_view import Cache, ModelView
from dejavu.sparsity.policy import Site
from dejavu.sparsity.record import Recorder
from dejavu.sparsity.similarity import Overlap, ResidualFlow

SCALES = [(site, relative) for site in Site for relative in (False, True)]
ActiveSets = dict[Site, list[Tensor]]  # bool [N, entries] of each layer


class FirstPass:
    """Sums over the windows of one text.

    histograms: of the scores (contributions of neurons, output norms of heads), by site and by
    whether they are relative to the stream.
    importance: by the same fp64 `[layers, entries]`, scores summed over tokens.
    """

    def __init__(self, model: ModelView[Cache], options: MeasureOptions) -> None:
        c = model.config
        self._options = options
        self._sparse = model.activation.is_sparse
        self._layers = layers = c.num_hidden_layers
        self._entries = {Site.NEURONS: c.intermediate_size, Site.HEADS: c.num_key_value_heads}
        self.tokens = 0
        self.histograms = {(site, scale): Histogram(layers) for site, scale in SCALES}
        self.importance = {
            (site, scale): torch.zeros(layers, self._entries[site], dtype=torch.float64)
            for site, scale in SCALES
        }
        self._active = [0] * layers
        self._for_mass = {site: [0] * layers for site in self._entries}
        self._flow = ResidualFlow(layers)
        self._overlaps = {
            site: {key: Overlap(layers) for key in [*map(str, options.distances), "other"]}
            for site in self._entries
        }

    @property
    def active_set(self) -> str:
        """What counts as an active neuron: `nonzero` activation, or in the top `mass`."""
        return "nonzero" if self._sparse else "mass"

    def add(self, recorder: Recorder, other: ActiveSets | None = None) -> ActiveSets:
        """Take in a recorded window; `other`: active sets of a window of another text."""
        found: ActiveSets = {site: [] for site in self._entries}
        self.tokens += len(recorder.residuals[0])
        self._flow.add(recorder.residuals)
        for layer in range(self._layers):
            nonzero = recorder.activations[layer] != 0
            self._active[layer] += int(nonzero.sum())
            for site in self._entries:
                scores = recorder.scores(site, layer)
                self._rate(site, layer, False, scores)
                self._rate(site, layer, True, recorder.relative_scores(site, layer))
                count = mass_count(scores, self._options.mass)
                self._for_mass[site][layer] += int(count.sum())
                by_zero = self._sparse and site == Site.NEURONS
                active = nonzero if by_zero else ranks(scores) < count[:, None]
                self._compare(site, layer, active, None if other is None else other[site][layer])
                found[site].append(active)
        return found

    def _rate(self, site: Site, layer: int, relative: bool, scores: Tensor) -> None:
        self.histograms[site, relative].add(layer, scores)
        self.importance[site, relative][layer] += scores.sum(dim=0, dtype=torch.float64).cpu()

    def _compare(self, site: Site, layer: int, active: Tensor, other: Tensor | None) -> None:
        overlaps = self._overlaps[site]
        for distance in self._options.distances:
            overlaps[str(distance)].add(layer, active[:-distance], active[distance:])
        if other is not None:
            overlaps["other"].add(layer, active, other)

    def layers(self) -> tuple[LayerFigures, ...]:
        """The figures of each layer."""
        overlaps = {
            site: {key: overlap.means() for key, overlap in kinds.items()}
            for site, kinds in self._overlaps.items()
        }
        changes = self._flow.means()

        def overlap(site: Site, layer: int) -> dict[str, float | None]:
            return {key: means[layer] for key, means in overlaps[site].items()}

        def for_mass(site: Site, layer: int) -> float:
            return self._for_mass[site][layer] / (self.tokens * self._entries[site])

        return tuple(
            LayerFigures(
                active=self._active[layer] / (self.tokens * self._entries[Site.NEURONS]),
                neurons_for_mass=for_mass(Site.NEURONS, layer),
                heads_for_mass=for_mass(Site.HEADS, layer),
                neuron_overlap=overlap(Site.NEURONS, layer),
                head_overlap=overlap(Site.HEADS, layer),
                change=changes[layer],
            )
            for layer in range(self._layers)
        )
