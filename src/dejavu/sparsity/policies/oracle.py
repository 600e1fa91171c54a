"""Selection by the true activations, which have to be computed first: what a perfect and free
predictor would choose. Bounds for comparison, never faster than dense."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dejavu.errors import InputError
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.sparsity.model_view import Cache, ModelView
from dejavu.sparsity.policy import Points, Selector, Site
from dejavu.sparsity.record import down_norms, neuron_activations

Rule = Callable[[Tensor, int], Tensor]  # activations fp32 [N, F], layer -> bool [N, F]


class Oracle(Selector):
    """Neurons by a rule on their true activations; every row for itself."""

    capturable = False

    def __init__(self, model: ModelView[Cache], rule: Rule) -> None:
        self._blocks = model.weights.blocks
        self._activation = model.activation
        self._rule = rule

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS:
            return None
        x = points.source(site, layer)
        a = neuron_activations(x, self._blocks[layer].mlp, self._activation, ops)
        return Selection.from_mask(self._rule(a, layer))


def oracle(model: ModelView[Cache], *, contribution: float = 0.0) -> Selector:
    """Neurons whose contribution `|a_j| * ||W_down[:, j]||` exceeds a value; 0: the active ones."""
    _at_least("oracle", "contribution", contribution, 0.0)
    norms = [down_norms(block.mlp) for block in model.weights.blocks]
    return Oracle(model, lambda a, layer: a.abs() * norms[layer] > contribution)


def threshold(model: ModelView[Cache], *, value: float = 0.1) -> Selector:
    """Neurons whose activation itself exceeds a value in magnitude (CATS, arXiv 2404.08763)."""
    _at_least("threshold", "value", value, 0.0)
    return Oracle(model, lambda a, layer: a.abs() > value)


def topk(model: ModelView[Cache], *, keep: float = 0.1) -> Selector:
    """The same share of neurons in every layer, those of largest contribution."""
    if not 0.0 < keep <= 1.0:
        raise InputError(f"policy topk: keep must lie in (0, 1], not {keep:g}")
    norms = [down_norms(block.mlp) for block in model.weights.blocks]

    def rule(a: Tensor, layer: int) -> Tensor:
        best = (a.abs() * norms[layer]).topk(max(1, round(keep * a.shape[1])), dim=1).indices
        return torch.zeros_like(a, dtype=torch.bool).scatter_(1, best, True)

    return Oracle(model, rule)


def _at_least(policy: str, option: str, value: float, least: float) -> None:
    if not value >= least:
        raise InputError(f"policy {policy}: {option} must be at least {least:g}, not {value:g}")
