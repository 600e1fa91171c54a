"""What a plan says of itself must be what decoding with it does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dejavu.kernels.ops import Projection
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.base import Batch
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.plan import Plan
from dejavu.predictor.recording import window_losses
from dejavu.sparsity.losses import mean_rise
from dejavu.sparsity.policy import Dense

from . import tiny


def test_every_token_collected_is_trained_on_or_held_out(plan: Plan) -> None:
    assert plan.calibration["tokens_trained"] == 128 * 32
    assert plan.calibration["tokens_held_out"] == 32 * 32
    for place in plan.report["places"].values():
        assert place["rows_trained"] == 128 * 32
        assert {r["tokens_judged"] for r in place["ranks"]} == {32 * 32}
        assert 0 < place["active"] < 0.5


def test_levels_keep_their_losses_on_fresh_text(plan: Plan, loaded: LoadedModel) -> None:
    windows = tiny.windows(40)
    ops = TorchOps()
    dense = window_losses(loaded.model, windows, Dense(), ops)
    previous = 1.0
    for name, allowed in (("careful", 0.005), ("balanced", 0.01), ("fast", 0.03)):
        report = plan.levels[name].report
        assert report["perplexity_ratio"] <= 1 + allowed
        losses = window_losses(loaded.model, windows, plan.selector(loaded, name), ops)
        mean = mean_rise(losses, dense, [32] * 40)
        assert mean.error is not None
        assert mean.value - 3 * mean.error < math.log1p(allowed)
        assert report["neuron_density"] < previous
        assert 0.3 < report["weight_bytes"] < plan.levels["exact"].report["weight_bytes"]
        previous = report["neuron_density"]


def held_out_windows() -> torch.Tensor:
    return make_windows(
        [tiny.text()], tiny.Characters(), length=32, train=128, held_out=32, separator=1
    ).held_out


def test_the_reports_loss_and_reads_are_those_of_the_held_out_text(
    plan: Plan, loaded: LoadedModel
) -> None:
    windows, ops = held_out_windows(), TorchOps()
    dense = window_losses(loaded.model, windows, Dense(), ops)
    tokens = windows.shape[0] * 32
    for name, level in plan.levels.items():
        selector = plan.selector(loaded, name)
        active = torch.zeros(tiny.LAYERS)

        class Watch(Dense):
            def __init__(self, inner: Any, active: torch.Tensor) -> None:
                self.inner, self.active = inner, active

            def select(self, site: Any, layer: int, points: Any, ops: Any) -> Any:
                found = self.inner.select(site, layer, points, ops)
                if found is not None:
                    x = points.source(site, layer)
                    up = loaded.model.weights.blocks[layer].mlp.up
                    (a,) = ops.linear(x, [Projection(up.weight, up.bias)])
                    self.active[layer] += (found.to_mask(len(x)) & (a > 0)).sum()
                return found

        losses = window_losses(loaded.model, windows, Watch(selector, active), ops)
        rise = (sum(losses) - sum(dense)) / tokens
        assert level.report["perplexity_ratio"] == pytest.approx(math.exp(rise), rel=1e-5)
        assert level.report["dense_perplexity"] == pytest.approx(math.exp(sum(dense) / tokens))
        share = float(active.mean()) / tokens / tiny.NEURONS
        assert level.report["active_density"] == pytest.approx(share, abs=0.005)


def test_density_while_decoding_is_the_reports(plan: Plan, loaded: LoadedModel) -> None:
    """The held-out windows decoded token by token, side by side, as the engine does it."""
    held_out = held_out_windows()
    rows = len(held_out)
    for name in ("balanced", "fast"):
        selector = plan.selector(loaded, name)
        cache = loaded.model.new_cache(32, sequences=rows)
        for n in range(32):
            batch = Batch(
                held_out[:, n].contiguous(),
                torch.full((rows,), n),
                torch.arange(rows, dtype=torch.int32)[:, None],
                torch.full((rows,), n + 1, dtype=torch.int32),
            )
            loaded.model.forward(batch, cache, selector, TorchOps())
        stated = plan.levels[name].report["neuron_density"]
        assert selector.meter.density(tiny.NEURONS) == pytest.approx(stated, abs=0.001)


def test_recall_is_reported_with_the_density_it_cost(plan: Plan, loaded: LoadedModel) -> None:
    """Both rise together, and recomputing them from the stored rule gives the report's figures."""
    fast, balanced = plan.levels["fast"].report["layers"], plan.levels["balanced"].report["layers"]
    for name in fast:
        if fast[name]["kind"] == "predictor" == balanced[name]["kind"]:
            assert fast[name]["recall_active"] < balanced[name]["recall_active"]
            assert fast[name]["density"] < balanced[name]["density"]
            assert fast[name]["missed_mass"] > balanced[name]["missed_mass"]
    selector = plan.selector(loaded, "balanced")
    counts = torch.zeros(3, dtype=torch.int64)  # selected and active, active, selected

    class Watch(Dense):
        def select(self, site: Any, layer: int, points: Any, ops: Any) -> None:
            found = selector.select(site, layer, points, ops)
            if found is not None and layer == 0:
                x = points.source(site, layer)
                up = loaded.model.weights.blocks[0].mlp.up
                (a,) = ops.linear(x, [Projection(up.weight, up.bias)])
                picked, true = found.to_mask(len(x)), a > 0
                counts.add_(torch.stack(((picked & true).sum(), true.sum(), picked.sum())))

    for window in tiny.windows(30):
        loaded.model.logits(window[:-1], loaded.model.new_cache(32), Watch(), TorchOps())
    hit, active, chosen = counts.tolist()
    entry = balanced["neurons.0"]
    assert hit / active == pytest.approx(entry["recall_active"], abs=0.02)
    assert hit / chosen == pytest.approx(entry["precision_active"], abs=0.03)
