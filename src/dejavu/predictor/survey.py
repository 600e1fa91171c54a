"""The first look at a model: how much each layer minds, what a byte is worth, which heads pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu.errors import PlanError
from dejavu.kernels.ops import Ops
from dejavu.models.base import DecoderLM
from dejavu.predictor.plan import key_name, key_of
from dejavu.predictor.recording import Recorded, divergences, log_probabilities
from dejavu.predictor.worth import (
    PROBE_SHARE,
    Entries,
    Neurons,
    Squares,
    WithoutSmall,
    find_price,
    lost,
    saved_bytes,
    sensitivity,
)
from dejavu.sparsity.accounting import group_bytes, neuron_bytes
from dejavu.sparsity.policy import Key, Selector, Site
from dejavu.sparsity.replay import Replay

PROBE_TOKENS = 2048  # that sensitivities are measured on
_PROBE_LOGITS = 1 << 27  # numbers: half a GiB of log-probabilities at most
_SAMPLE = 4096  # tokens whose contributions are counted
# Perfect selection may take this share of the allowed loss: predictors make the price bind long
# before, and training aims best near the price that is used in the end.
_PERFECT_SHARE = 0.1


@dataclass(frozen=True)
class SiteSurvey:
    """One site of one layer.

    sensitivity: nats per half squared contribution. active: entries with activation != 0 (groups:
    all), mean over tokens. row_bytes, down_bytes: see `search.Place`. saved, lost: bytes that
    perfect and free selection would not read at the price, and the nats it would cost.
    """

    sensitivity: float
    active: float
    row_bytes: float
    down_bytes: float
    saved: float = 0.0
    lost: float = 0.0


@dataclass(frozen=True)
class Survey:
    """price: nats a byte at which scores are 0. sites: by (site, layer)."""

    price: float
    sites: dict[Key, SiteSurvey]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        sites = {key_name(key): asdict(entry) for key, entry in self.sites.items()}
        return {"price": self.price, "sites": sites}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Survey:
        """What `to_json` gave."""
        sites = {key_of(name): SiteSurvey(**entry) for name, entry in content["sites"].items()}
        return Survey(content["price"], sites)


def make_survey(
    model: DecoderLM,
    stored: DecoderLM,
    held: Recorded,
    windows: Tensor,
    *,
    max_loss: float,
    heads: bool,
    ops: Ops,
    tick: Callable[[int, int], None],
) -> Survey:
    """Survey a model from what was recorded of held-out windows.

    model: what is run; stored: the same with matrices as they are stored, for bytes. Raises
    PlanError naming a layer in which nothing ever contributes.
    """
    tokens = min(PROBE_TOKENS, _PROBE_LOGITS // model.config.vocab_size)
    probes = windows[: max(1, tokens // (windows.shape[1] - 1))]
    dense = log_probabilities(model, probes, ops)
    layers = range(model.config.num_hidden_layers)
    entries: dict[Key, Entries] = {}
    sites: dict[Key, SiteSurvey] = {}
    tried = [Site.NEURONS, Site.HEADS] if heads else [Site.NEURONS]
    trials: dict[Key, _Trial] = {}

    def selectors() -> Iterator[Sequence[Selector]]:
        for layer in layers:
            for site in tried:
                trial = _neurons if site == Site.NEURONS else _groups
                trials[site, layer] = trial(model, layer, held, dense, ops)
                yield trials[site, layer].selectors

    found = divergences(model, probes, selectors(), dense, ops)
    for done, layer in enumerate(layers):
        for site in tried:
            kl, key = next(found), (site, layer)
            trial = trials[key]
            mind = sensitivity(kl, trial.left_out())
            row, down = _bytes(stored, site, layer)
            entries[key] = Entries(trial.squares, mind, row)
            sites[key] = SiteSurvey(mind, trial.active, row, down)
        tick(done + 1, len(layers))
    price = find_price(list(entries.values()), _PERFECT_SHARE * math.log1p(max_loss))
    counts = {
        Site.NEURONS: model.config.intermediate_size,
        Site.HEADS: model.config.num_key_value_heads,
    }
    for key, entry in entries.items():
        sites[key] = SiteSurvey(
            **asdict(sites[key])
            | {
                "saved": saved_bytes(entry, price, counts[key[0]]),
                "lost": lost(entry, price),
            }
        )
    return Survey(price, sites)


@dataclass(frozen=True, eq=False)
class _Trial:
    """What is left out of one site and layer to see how much the model minds.

    active: entries a token. selectors: one for each probe. left_out: when they have run, the mean
    over tokens of the squared contributions they left out.
    """

    squares: Squares
    active: float
    selectors: Sequence[Selector]
    left_out: Callable[[], float]


def _neurons(model: DecoderLM, layer: int, held: Recorded, dense: Tensor, ops: Ops) -> _Trial:
    neurons = Neurons.of(model.weights.blocks[layer].mlp, model.activation)
    squares, active = Squares(), 0
    sample = held.inputs[Site.NEURONS, layer][:_SAMPLE]
    for part in torch.split(sample, 1024):
        found = neurons.squares(part.float(), ops)
        squares.add(found)
        active += int((found > 0).sum())
    _check(squares, Site.NEURONS, layer)
    without = WithoutSmall(layer, neurons, squares.limit_for(PROBE_SHARE))
    return _Trial(
        squares,
        active / len(sample),
        [without] * len(dense),
        lambda: without.left_out / without.rows,
    )


def _groups(model: DecoderLM, layer: int, held: Recorded, dense: Tensor, ops: Ops) -> _Trial:
    found = held.head_norms[layer].square()
    squares = Squares()
    squares.add(found[:_SAMPLE])
    _check(squares, Site.HEADS, layer)
    kept = found[: dense.shape[0] * dense.shape[1]] >= squares.limit_for(PROBE_SHARE)
    left_out = float(found[: len(kept)].masked_fill(kept, 0.0).sum(dtype=torch.float64))
    replays = [Replay({(Site.HEADS, layer): masks}) for masks in torch.split(kept, dense.shape[1])]
    return _Trial(squares, float(found.shape[1]), replays, lambda: left_out / len(kept))


def _check(squares: Squares, site: Site, layer: int) -> None:
    if not squares.finite:
        raise PlanError(
            f"layer {layer}, {site}: activations are not finite (NaN or Inf) on the calibration "
            "text: the weights are damaged, or too large for their dtype"
        )
    if squares.total == 0:
        raise PlanError(
            f"layer {layer}, {site}: nothing is ever active on {squares.rows} tokens of "
            "calibration text, so there is nothing to learn from; check the model's weights"
        )


def _bytes(stored: DecoderLM, site: Site, layer: int) -> tuple[float, float]:
    block = stored.weights.blocks[layer]
    if site == Site.NEURONS:
        return neuron_bytes(block.mlp)
    return group_bytes(block.attention, stored.config.num_key_value_heads), 0.0


def heads_pay(entry: SiteSurvey, predictor_bytes: float, price: float) -> bool:
    """Whether even a perfect choice of heads would save more than a small predictor reads."""
    return entry.saved - entry.lost / price > predictor_bytes
