"""The named levels of a plan: found on held-out text, and measured there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from dejavu.kernels.ops import Ops
from dejavu.models.base import DecoderLM
from dejavu.predictor.options import EXACT, PrepareOptions
from dejavu.predictor.plan import LayerPolicy
from dejavu.predictor.recording import window_losses
from dejavu.predictor.search import Candidate, Found, Place, Search, Timings
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.accounting import dense_bytes
from dejavu.sparsity.losses import Mean, block_mean, mean_rise
from dejavu.sparsity.policy import Dense, Key, Selector, Site

Policies = Mapping[Key, LayerPolicy]
Progress = Callable[[str, int, int], None]  # stage, done, in all


class HeldOut:
    """Losses on held-out windows int64 `[n, T + 1]`, each compared with the dense model's."""

    def __init__(self, model: DecoderLM, windows: Tensor, ops: Ops, progress: Progress) -> None:
        self._model, self._windows, self._ops, self._progress = model, windows, ops, progress
        self._counts = [windows.shape[1] - 1] * len(windows)
        self._dense = self._losses("measuring the dense model", Dense())
        self._used: dict[frozenset[tuple[Key, LayerPolicy]], dict[Key, float]] = {}

    @property
    def tokens(self) -> int:
        """Predicted in one measurement."""
        return sum(self._counts)

    @property
    def dense(self) -> Mean:
        """Loss of the dense model in nats a token."""
        return block_mean(self._dense, self._counts)

    def used(self, policies: Policies) -> dict[Key, float]:
        """Entries that a token used where a predictor chose, as measured."""
        return self._used.get(frozenset(policies.items()), {})

    def rise(self, policies: Policies, chosen: Mapping[Key, Candidate]) -> Mean:
        """Mean loss above the dense model's, window by window against the same window."""
        choices = {
            key: Choice(chosen[key].predictor, chosen[key].distance, policy.threshold)
            for key, policy in policies.items()
            if policy.kind == "predictor"  # `full` changes no bit and is slower here
        }
        c = self._model.config
        selector = PlanSelector(
            c.num_hidden_layers, c.intermediate_size, choices, self._model.device
        )
        losses = self._losses("measuring a threshold", selector)
        used = {site: selector.meter.used(site) for site in Site}
        self._used[frozenset(policies.items())] = {key: used[key[0]][key[1]] for key in choices}
        return mean_rise(losses, self._dense, self._counts)

    def _losses(self, stage: str, selector: Selector) -> list[float]:
        return window_losses(
            self._model,
            self._windows,
            selector,
            self._ops,
            lambda done, total: self._progress(stage, done, total),
        )


def find_levels(
    model: DecoderLM,
    places: Sequence[Place],
    price: float,
    held_out: HeldOut,
    options: PrepareOptions,
    timings: Timings | None,
) -> tuple[dict[str, tuple[float, Found]], dict[Key, Candidate]]:
    """Allowed loss and what was found for each level, and the candidate of each place.

    model: with matrices as they are stored, whose bytes the predictors' share is of.
    """
    search = Search(places, price, timings)
    share = options.predictor_share
    budget = math.inf if share is None else share * dense_bytes(model.weights)
    search.choose_candidates(math.log1p(options.max_loss), budget)
    levels = {EXACT: (0.0, Found(None, search.exact(), Mean(0.0, 0.0)))}
    for name, loss in options.losses.items():
        levels[name] = (loss, search.level(loss, held_out.rise))
    return levels, search.chosen
