"""Histograms of contributions, prices, and the probe that leaves small ones out."""

from __future__ import annotations

import math

import pytest
import torch

from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.predictor.recording import record
from dejavu.predictor.worth import (
    Entries,
    Neurons,
    Squares,
    WithoutSmall,
    find_price,
    lost,
    saved_bytes,
    sensitivity,
)
from dejavu.sparsity.policy import Points, Selector, Site

BIN = 2**0.25


def squares(rows: int = 300, entries: int = 40, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, entries, generator=generator).exp().square()
    return values * (torch.rand(rows, entries, generator=generator) < 0.3)


def test_sums_and_counts_are_right_within_a_bin() -> None:
    values = squares()
    found = Squares()
    for part in values.split(77):
        found.add(part)
    assert found.rows == 300
    assert found.total == pytest.approx(float(values.double().sum() / 300))
    for limit in (1e-3, 0.1, 1.0, 30.0):
        below = [float(values[values < limit * f].double().sum()) / 300 for f in (1 / BIN, BIN)]
        assert below[0] <= found.below(limit) <= below[1]
        above = [float((values > limit * f).sum()) / 300 for f in (BIN, 1 / BIN)]
        assert above[0] <= found.above(limit) <= above[1]
    share = found.below(found.limit_for(0.05)) / found.total
    assert 0.05 <= share < 0.08


def test_nothing_below_nothing_and_everything_below_the_sky() -> None:
    found = Squares()
    found.add(squares())
    assert found.below(0.0) == 0.0
    assert found.above(1e30) == 0.0
    assert found.below(1e30) == pytest.approx(found.total)


def test_the_price_is_where_perfect_selection_loses_what_it_may() -> None:
    entries = []
    for n, mind in enumerate((0.01, 1.0, 30.0)):
        found = Squares()
        found.add(squares(seed=n))
        entries.append(Entries(found, mind, row_bytes=100.0 * (n + 1)))
    total = sum(e.sensitivity / 2 * e.squares.total for e in entries)
    previous = 0.0
    for nats in (0.001 * total, 0.01 * total, 0.3 * total):
        price = find_price(entries, nats)
        assert price > previous
        previous = price
        assert sum(lost(e, price) for e in entries) <= nats
        assert sum(lost(e, price * 1.5) for e in entries) > nats
    saved = [saved_bytes(e, previous, 40) / (40 * e.row_bytes) for e in entries]
    assert saved[0] > saved[2]  # where nothing is minded, nearly all is left out
    assert all(0 <= s <= 1 for s in saved)


def test_sensitivity_is_twice_the_loss_a_square_and_never_zero() -> None:
    assert sensitivity(0.02, 4.0) == pytest.approx(0.01)
    assert sensitivity(-1e-9, 4.0) > 0
    assert sensitivity(0.1, 0.0) > 0


def test_contributions_are_norms_of_what_neurons_add(loaded: LoadedModel) -> None:
    mlp = loaded.model.weights.blocks[0].mlp
    neurons = Neurons.of(mlp, loaded.model.activation)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    found = neurons.squares(x, TorchOps())
    assert mlp.up.bias is not None
    a = torch.relu(x @ mlp.up.weight.float().t() + mlp.up.bias)
    added = a[:, :, None] * mlp.down.weight.float()  # [5, F, D]
    torch.testing.assert_close(found, added.square().sum(dim=2))


def test_the_probe_leaves_out_one_layer_below_its_limit(loaded: LoadedModel) -> None:
    neurons = Neurons.of(loaded.model.weights.blocks[1].mlp, loaded.model.activation)
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    points = Points()
    for _ in range(4):
        points.add(x)
    values = neurons.squares(x, TorchOps())
    limit = float(values[values > 0].median())
    probe = WithoutSmall(1, neurons, limit)
    assert probe.select(Site.NEURONS, 0, points, TorchOps()) is None
    assert probe.select(Site.HEADS, 1, points, TorchOps()) is None
    selection = probe.select(Site.NEURONS, 1, points, TorchOps())
    assert selection is not None
    assert torch.equal(selection.to_mask(6), values >= limit)
    assert probe.left_out == pytest.approx(float(values[values < limit].double().sum()))
    assert probe.rows == 6


def test_recording_keeps_the_inputs_of_every_token(loaded: LoadedModel) -> None:
    ids = torch.randint(2, 60, (3, 17), generator=torch.Generator().manual_seed(0))
    keys = [(Site.NEURONS, 1), (Site.HEADS, 0)]
    data = record(loaded.model, ids, keys, [0], TorchOps(), lambda done, total: None)
    seen: dict[tuple[Site, int], torch.Tensor] = {}

    class Look(Selector):
        def select(self, site: Site, layer: int, points: Points, ops: object) -> None:
            seen[site, layer] = points.source(site, layer)

    for n, window in enumerate(ids):
        loaded.model.logits(window[:-1], loaded.model.new_cache(16), Look(), TorchOps())
        for key in keys:
            rows = data.inputs[key][16 * n : 16 * (n + 1)]
            assert torch.equal(rows, seen[key].half())
    assert data.head_norms[0].shape == (48, 4)
    assert (data.head_norms[0] > 0).all()
    assert data.source(Site.HEADS, 1, 0.5) is None  # not asked for
    assert data.source(Site.NEURONS, 0, 0.5) is data.inputs[Site.HEADS, 0]
    assert data.source(Site.NEURONS, 1, 0.0) is data.inputs[Site.NEURONS, 1]
    assert data.source(Site.HEADS, 0, 1.0) is None  # before the first block
    assert math.isfinite(float(data.head_norms[0].sum()))
