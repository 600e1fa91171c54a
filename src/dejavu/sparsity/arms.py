"""Every way of leaving parts out that `measure` tests, and the masks that say it for one window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dejavu.sparsity.budgets import Histogram, kept, ranks
from dejavu.sparsity.losses import block_mean, mean_rise
from dejavu.sparsity.measurement import Arm, ArmResult, MeasureOptions
from dejavu.sparsity.policy import Site
from dejavu.sparsity.record import Recorder
from dejavu.sparsity.replay import Masks

Scale = tuple[Site, bool]  # whether scores are relative to the stream
Importance = Mapping[Scale, Tensor]  # [layers, entries]: how much each matters on average


def arms(options: MeasureOptions) -> Iterator[Arm]:
    """All arms that the options ask for, in the order of the report."""
    yield Arm("exact")
    for threshold in options.thresholds:
        yield Arm("threshold", target=threshold)
    rules = ["true", *({"other": "static", "same": "static-same"}[text] for text in options.static)]
    for rule in rules:
        for budget in options.budgets:
            for parts in options.parts:
                for density in options.densities:
                    yield Arm(rule, parts, budget, density)


class Choices:
    """The masks of any arm for one recorded window.

    histograms: of the tested text, for `true` arms with one threshold. importance: by rule
    (`static`, `static-same`).
    """

    def __init__(
        self,
        recorder: Recorder,
        histograms: Mapping[Scale, Histogram],
        importance: Mapping[str, Importance],
    ) -> None:
        self._recorder = recorder
        self._histograms = histograms
        self._importance = importance
        self._layers = len(recorder.activations)
        self._ranks: dict[tuple[Site, int], Tensor] = {}

    def masks(self, arm: Arm) -> Masks:
        """bool `[N, entries]` for each site of the arm and each layer."""
        return {
            (site, layer): self._mask(arm, site, layer)
            for site in arm.sites
            for layer in range(self._layers)
        }

    def _mask(self, arm: Arm, site: Site, layer: int) -> Tensor:
        if arm.rule == "exact":
            return self._recorder.activations[layer] != 0
        assert arm.target is not None
        scores = self._recorder.scores(site, layer)
        if arm.rule == "threshold":
            return scores >= arm.target
        scale = site, arm.budget == "relative"
        if arm.rule != "true":
            importance = self._importance[arm.rule][scale]
            mask = _static_mask(importance, arm, layer).to(scores.device)
            return mask.expand(len(scores), -1)
        if arm.budget != "uniform":
            if arm.budget == "relative":
                scores = self._recorder.relative_scores(site, layer)
            return scores >= self._histograms[scale].threshold(arm.target)
        if (site, layer) not in self._ranks:
            self._ranks[site, layer] = ranks(scores)
        return self._ranks[site, layer] < kept(arm.target, scores.shape[1])


def _static_mask(importance: Tensor, arm: Arm, layer: int) -> Tensor:
    """bool `[entries]`: the top share of this layer, or of all layers together."""
    assert arm.target is not None
    if arm.budget == "uniform":
        row = importance[layer]
        return ranks(row[None])[0] < kept(arm.target, len(row))
    places = ranks(importance.view(1, -1)).view(importance.shape)
    return places[layer] < kept(arm.target, importance.numel())


class Tally:
    """What an arm kept, missed and lost, summed over windows."""

    def __init__(self, arm: Arm, layers: int) -> None:
        self.arm = arm
        zeros = torch.zeros(layers, dtype=torch.float64)
        names = ("kept", "of", "missed", "mass")
        self._sums = {site: {name: zeros.clone() for name in names} for site in arm.sites}
        self.losses: list[float] = []

    def add_masks(self, masks: Masks, recorder: Recorder) -> bool:
        """Count a window's masks; whether they leave out anything that is not exactly zero."""
        lossy = False
        for (site, layer), mask in masks.items():
            scores = recorder.scores(site, layer)
            missed = scores.masked_fill(mask, 0.0).sum(dtype=torch.float64)
            sums = self._sums[site]
            sums["kept"][layer] += int(mask.sum())
            sums["of"][layer] += mask.numel()
            sums["missed"][layer] += float(missed)
            sums["mass"][layer] += float(scores.sum(dtype=torch.float64))
            lossy |= bool(missed > 0)
        return lossy

    def result(self, dense: list[float], counts: list[int]) -> ArmResult:
        """Compare with the dense losses; all lists hold one figure a window."""
        loss = block_mean(self.losses, counts)
        ratio = mean_rise(self.losses, dense, counts).exp()
        return ArmResult(
            self.arm,
            {site: _shares(sums["kept"], sums["of"]) for site, sums in self._sums.items()},
            {site: _shares(sums["missed"], sums["mass"]) for site, sums in self._sums.items()},
            loss.value,
            loss.exp().value,
            ratio.value,
            ratio.error,
        )


def _shares(part: Tensor, whole: Tensor) -> list[float]:
    return (part / whole.clamp(min=1e-300)).tolist()
