"""The meter against counting by hand, with one row and with several."""

from __future__ import annotations

import pytest
import torch

from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.sparsity.meter import Meter
from dejavu.sparsity.policy import Site

ENTRIES = 37


@pytest.mark.parametrize("rows", [1, 3])
def test_used_read_and_density_are_means_over_steps(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    meter, ops = Meter(2), TorchOps()
    steps = [torch.rand(rows, ENTRIES, generator=generator) < 0.3 for _ in range(5)]
    for mask in steps:
        meter.tally(Site.NEURONS, 1, Selection.from_mask(mask), rows, ops)
    used = sum(int(mask.sum()) for mask in steps) / (5 * rows)
    read = sum(int(mask.any(dim=0).sum()) for mask in steps) / 5
    assert meter.used() == pytest.approx([0.0, used])
    assert meter.density(ENTRIES) == pytest.approx((1 + used / ENTRIES) / 2)
    untouched, counted = meter.reads()
    assert (untouched.neurons, untouched.active, untouched.groups) == (None, None, None)
    assert counted.neurons == pytest.approx(read)
    assert counted.groups is None
    meter.reset()
    assert meter.used() == [0.0, 0.0]
    assert meter.reads()[1].neurons is None


def test_sites_do_not_mix() -> None:
    meter = Meter(1)
    meter.tally(
        Site.HEADS, 0, Selection.from_mask(torch.ones(1, 4, dtype=torch.bool)), 1, TorchOps()
    )
    (found,) = meter.reads()
    assert (found.neurons, found.groups) == (None, 4.0)
    assert meter.used(Site.HEADS) == [4.0]
    assert meter.used() == [0.0]


def test_a_watched_selection_counts_into_its_own_layer() -> None:
    meter = Meter(3)
    full = Selection.full(ENTRIES)
    watched = meter.watch(2, full)
    assert watched.active is not None
    assert watched.indices is full.indices
    watched.active.add_(11)
    for layer in (0, 2):
        meter.tally(Site.NEURONS, layer, full, 1, TorchOps())
    assert [r.active for r in meter.reads()] == [0.0, None, 11.0]
