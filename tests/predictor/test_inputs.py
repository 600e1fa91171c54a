"""Plans of input sparsity: from a SiLU checkpoint to a level that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dejavu.errors import PlanError
from dejavu.kernels.native import NativeOps
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.base import Batch
from dejavu.predictor.input_budget import (
    GRID,
    InputCurve,
    planned_sparsity,
    price_for_loss,
    price_for_sparsity,
    priced_thresholds,
)
from dejavu.predictor.plan import Plan, load_plan
from dejavu.sparsity.inputs import InputSelector, InputSite, Thresholds
from dejavu.sparsity.losses import Mean
from dejavu.sparsity.policy import Dense

from . import tiny


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load(tiny.save_llama(tmp_path_factory.mktemp("gated")))


@pytest.fixture(scope="module")
def folder(gated: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plans") / "plan"
    tiny.prepared(gated, out, max_loss=0.05, fast_loss=0.3)
    return out


def test_prepare_keeps_the_allowed_loss_and_reads_less(folder: Path) -> None:
    plan = load_plan(folder)
    assert plan.levels["exact"].report["weight_bytes"] == 1.0
    assert plan.levels["exact"].inputs == ()
    assert plan.default_level == "careful"
    for name, allowed in (("careful", 0.025), ("balanced", 0.05), ("fast", 0.3)):
        level = plan.levels[name]
        assert level.report["perplexity_ratio"] <= 1 + allowed
        assert level.report["weight_bytes"] < 1.0
        assert len(level.inputs) == tiny.LAYERS
    fast, balanced = (plan.levels[n].report["weight_bytes"] for n in ("fast", "balanced"))
    assert fast < balanced


def test_a_level_decodes_as_it_reads_text(folder: Path, gated: LoadedModel) -> None:
    selector = load_plan(folder).selector(gated, "fast")
    model, ids = gated.model, torch.arange(12) % tiny.VOCAB
    with torch.inference_mode():
        whole = model.logits(ids, model.new_cache(12), selector, TorchOps())
        dense = model.logits(ids, model.new_cache(12), Dense(), TorchOps())
        cache, ops = model.new_cache(12), NativeOps(1)
        selector.reset()
        for place in range(12):
            batch = Batch(
                ids[place : place + 1],
                torch.tensor([place]),
                torch.zeros(1, 1, dtype=torch.int32),
                torch.tensor([place + 1], dtype=torch.int32),
            )
            row = model.forward(batch, cache, selector, ops)
            torch.testing.assert_close(row[0], whole[place], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(whole, dense, atol=1e-3)
    for read in selector.reads():
        assert read.inputs
        assert all(value > 0 for value in read.inputs.values())


def test_damaged_thresholds_are_named(folder: Path, tmp_path: Path) -> None:
    plan = load_plan(folder)
    level = plan.levels["fast"]
    for inputs, message in (
        (level.inputs[:1], "input thresholds of 1 layers"),
        (({InputSite.O: -1.0},) * tiny.LAYERS, "field is missing or wrong"),
    ):
        levels = plan.levels | {"fast": replace(level, inputs=inputs)}
        Plan(plan.base, levels, {}).save(tmp_path / "damaged")
        with pytest.raises(PlanError, match=message):
            load_plan(tmp_path / "damaged")


def test_a_price_takes_from_the_cheapest_place() -> None:
    harmless = InputCurve(1000, GRID, tuple(1e-6 * s for s in GRID))
    harmful = InputCurve(1000, GRID, tuple(10.0 * s for s in GRID))
    curves = {(0, InputSite.O): harmless, (0, InputSite.DOWN): harmful}
    thresholds = priced_thresholds(curves, price_for_sparsity(curves, 0.4))
    assert thresholds == [{InputSite.O: GRID[-1], InputSite.DOWN: 0.0}]


def test_thresholds_of_zero_leave_everything_dense(gated: LoadedModel) -> None:
    selector = InputSelector(gated.model, [dict.fromkeys(InputSite, 0.0)] * tiny.LAYERS)
    assert [selector.inputs(layer) for layer in range(tiny.LAYERS)] == [None] * tiny.LAYERS


def places(steepness: float = 1.0) -> dict[tuple[int, InputSite], InputCurve]:
    """Four sites whose damage grows with the fourth power, unequally fast."""
    return {
        (0, site): InputCurve(
            1000 * (n + 1), GRID, tuple(steepness * (n + 1) * 0.05 * s**4 for s in GRID)
        )
        for n, site in enumerate(InputSite)
    }


class Loss:
    """The true loss of thresholds is twice what the curves say; every trial is counted."""

    def __init__(self, curves: dict[tuple[int, InputSite], InputCurve], error: float) -> None:
        self.curves, self.error, self.trials = curves, error, 0

    def __call__(self, thresholds: Sequence[Thresholds]) -> Mean:
        self.trials += 1
        nats = 0.0
        for site, threshold in thresholds[0].items():
            if threshold:
                curve = self.curves[0, site]
                nats += curve.nats[curve.thresholds.index(threshold)]
        return Mean(2 * nats, self.error)


@pytest.mark.parametrize("allowed", [0.005, 0.01, 0.03])
@pytest.mark.parametrize("error", [0.0, 0.001])
def test_a_price_is_found_whose_measured_loss_is_allowed(allowed: float, error: float) -> None:
    curves = places()
    measure = Loss(curves, error)
    found = price_for_loss(curves, allowed, measure)
    assert found is not None
    price, loss = found
    assert loss == measure(priced_thresholds(curves, price))
    assert loss.value + 2 * error <= math.log1p(allowed)
    assert measure.trials <= 8
    # A tenth more of the bytes would be too much, or nearly: the search does not give up early.
    more = price_for_sparsity(curves, planned_sparsity(curves, price) + 0.1)
    assert measure(priced_thresholds(curves, more)).value + 2 * error > 0.9 * math.log1p(allowed)


def test_levels_of_one_model_share_what_was_measured() -> None:
    curves, trials = places(), []
    measure = Loss(curves, 0.0)
    losses = (0.005, 0.01, 0.03)
    alone = 0
    for allowed in losses:
        single = Loss(curves, 0.0)
        price_for_loss(curves, allowed, single)
        alone += single.trials
    found = [price_for_loss(curves, allowed, measure, trials) for allowed in losses]
    assert len(trials) == measure.trials < alone
    prices = [price for price, _ in filter(None, found)]
    assert prices == sorted(set(prices))
    assert len(prices) == len(losses)
    # An allowed price that is known stays, where nothing more is.
    assert price_for_loss(curves, 0.01, lambda _: Mean(1.0, 0.0), trials) == found[1]


def test_no_price_is_allowed_where_everything_costs_too_much() -> None:
    assert price_for_loss(places(), 0.01, lambda _: Mean(1.0, 0.0)) is None
