"""`prepare` for gated models whose activation has no zeros: thresholds of input sparsity.

No predictor is trained. Calibration text gives curves of damage (`input_budget`), held-out text
decides how far each level goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dejavu
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.base import DecoderLM
from dejavu.predictor.calibration import Windows
from dejavu.predictor.input_budget import (
    Curves,
    Trial,
    curves_from_json,
    curves_to_json,
    input_curves,
    planned_sparsity,
    price_for_loss,
    priced_thresholds,
)
from dejavu.predictor.levels import Progress
from dejavu.predictor.options import EXACT, PrepareOptions
from dejavu.predictor.plan import BaseModel, LayerPolicy, Level, Plan
from dejavu.predictor.recording import window_losses
from dejavu.predictor.wide import widened
from dejavu.predictor.workspace import Workspace, fingerprint
from dejavu.sparsity.accounting import dense_bytes, input_parts, step_bytes
from dejavu.sparsity.inputs import InputSelector, InputSite, Thresholds
from dejavu.sparsity.losses import Mean, block_mean, mean_rise
from dejavu.sparsity.policy import Dense, Selector

_CURVE_TOKENS = 2048  # more change a threshold by less than the grid of sparsities
_MEASURED_TOKENS = 8192  # of held-out text, for each price tried
_WORK_VERSION = "inputs-1"


def wants_inputs(model: DecoderLM, options: PrepareOptions) -> bool:
    """Whether a plan for this model skips input channels in place of neurons."""
    gated = model.weights.blocks[0].mlp.gate is not None
    return gated and not model.activation.is_sparse and options.kind == "svd"


def prepare_inputs(
    loaded: LoadedModel,
    windows: Windows,
    target: Path,
    options: PrepareOptions,
    name: str,
    progress: Progress,
) -> Plan:
    """The plan, saved: levels exact (dense), careful, balanced and fast. An interrupted run goes on
    with the curves and the measurements that it had finished."""
    base = BaseModel.of(loaded, name)
    work = Workspace(target, fingerprint(_WORK_VERSION, base, windows, options))
    with torch.inference_mode(False):
        wide = widened(loaded.model)
        wide = DecoderLM(wide.config, wide.weights)  # tables without a past in inference mode
        train = windows.train[: max(1, _CURVE_TOKENS // windows.length)].clone()
        found = work.get("curves")
        if found is None:
            curves = input_curves(
                wide,
                train,
                lambda done, total: progress("measuring sensitivity", done, total),
                seed=options.seed,
            )
            work.put("curves", curves_to_json(curves))
        else:
            curves = curves_from_json(found)
    held_out = windows.held_out[: max(2, _MEASURED_TOKENS // windows.length)]
    text = _Text(wide, loaded.model, held_out, work, progress)
    layers = wide.config.num_hidden_layers
    dense = (LayerPolicy(),) * layers
    levels = {EXACT: Level(0.0, dense, dense, text.report(None, Mean(0.0, 0.0), ()))}
    trials: list[Trial] = []
    for level, loss in options.losses.items():
        price, rise = price_for_loss(curves, loss, text.rise, trials) or (None, Mean(0.0, 0.0))
        thresholds = () if price is None else tuple(priced_thresholds(curves, price))
        report = text.report(price, rise, thresholds)
        report["planned_sparsity"] = 0.0 if price is None else planned_sparsity(curves, price)
        levels[level] = Level(loss, dense, dense, report, thresholds)
    plan = Plan(
        base,
        levels,
        {},
        calibration=_calibration(windows, train, held_out, options),
        report=_summary(curves, text),
        default_level=options.default_level,
    )
    plan.save(target)
    work.remove()
    return plan


class _Text:
    """Held-out windows int64 `[n, T + 1]`, read densely once and then at thresholds."""

    def __init__(
        self,
        wide: DecoderLM,
        stored: DecoderLM,
        windows: Tensor,
        work: Workspace,
        progress: Progress,
    ) -> None:
        self._wide, self._stored, self._windows = wide, stored, windows
        self._work, self._progress = work, progress
        self._counts = [windows.shape[1] - 1] * len(windows)
        self._losses: list[float] = work.get("dense losses") or self._read(
            "measuring the dense model", Dense()
        )
        work.put("dense losses", self._losses)

    @property
    def dense(self) -> Mean:
        """Loss of the dense model, nats a token."""
        return block_mean(self._losses, self._counts)

    @property
    def dense_bytes(self) -> int:
        """Of the model as it is stored."""
        return dense_bytes(self._stored.weights)

    def rise(self, thresholds: Sequence[Thresholds]) -> Mean:
        """Mean loss above the dense model's, window by window."""
        return mean_rise(self._measured(thresholds)["losses"], self._losses, self._counts)

    def _measured(self, thresholds: Sequence[Thresholds]) -> dict[str, Any]:
        """Losses, bytes of a token and densities, measured once."""
        name = f"thresholds {hashlib.sha256(json.dumps(list(thresholds)).encode()).hexdigest()}"
        found: dict[str, Any] | None = self._work.get(name)
        if found is None:
            selector = InputSelector(self._wide, thresholds)
            losses = self._read("measuring thresholds", selector)
            used = selector.meter.used_channels()
            groups = self._wide.config.num_key_value_heads
            found = {
                "losses": losses,
                "bytes": step_bytes(self._stored.weights, used, groups=groups),
                "densities": self._densities(selector),
            }
            self._work.put(name, found)
        return found

    def report(
        self, price: float | None, rise: Mean, thresholds: Sequence[Thresholds]
    ) -> dict[str, Any]:
        """What was measured for a level; empty thresholds: dense."""
        size, densities = float(self.dense_bytes), {str(site): 1.0 for site in InputSite}
        if thresholds:
            found = self._measured(thresholds)
            size, densities = found["bytes"], found["densities"]
        ratio = rise.exp()
        return {
            "price_nats_per_byte": price,
            "tokens": sum(self._counts),
            "dense_perplexity": self.dense.exp().value,
            "perplexity": self.dense.exp().value * ratio.value,
            "perplexity_ratio": ratio.value,
            "perplexity_ratio_error": ratio.error,
            "neuron_density": 1.0,
            "head_density": 1.0,
            "input_density": self._share(densities),
            "input_densities": densities,
            "bytes_per_token": size,
            "weight_bytes": size / self.dense_bytes,
            "predictor_bytes": 0,
        }

    def _densities(self, selector: InputSelector) -> dict[str, float]:
        """Share of the channels that a token used at each site, mean over layers."""
        shares: dict[str, list[float]] = {str(site): [] for site in InputSite}
        blocks = self._wide.weights.blocks
        for read, block in zip(selector.meter.used_channels(), blocks, strict=True):
            for site, (channels, _) in input_parts(block).items():
                shares[site].append((read.inputs or {}).get(site, channels) / channels)
        return {site: sum(values) / len(values) for site, values in shares.items()}

    def _share(self, densities: dict[str, float]) -> float:
        """Of the blocks' bytes, were all layers alike."""
        sizes = {
            site: size for site, (_, size) in input_parts(self._wide.weights.blocks[0]).items()
        }
        return sum(densities[site] * size for site, size in sizes.items()) / sum(sizes.values())

    def _read(self, stage: str, selector: Selector) -> list[float]:
        return window_losses(
            self._wide,
            self._windows,
            selector,
            TorchOps(),
            lambda done, total: self._progress(stage, done, total),
        )


def _calibration(
    windows: Windows, train: Tensor, held_out: Tensor, options: PrepareOptions
) -> dict[str, Any]:
    return {
        "dejavu": dejavu.__version__,
        "options": asdict(options),
        "window": windows.length,
        "tokens_calibrated": train.shape[0] * windows.length,
        "tokens_held_out": held_out.shape[0] * windows.length,
        "sha256_of_tokens": windows.fingerprint(),
    }


def _summary(curves: Curves, text: _Text) -> dict[str, Any]:
    return {
        "selection_rule": "an input channel is read where |x_i| times the norm of its column of "
        "weights is not below the site's threshold",
        "dense_loss": text.dense.value,
        "dense_loss_error": text.dense.error,
        "dense_bytes": text.dense_bytes,
        "places": curves_to_json(curves),
    }
