"""4-bit predictors: what they store, and that every backend chooses the same entries."""

from __future__ import annotations

import pytest
import torch

from dejavu.kernels.native import NativeOps
from dejavu.kernels.nibbles import Nibbles, rounded, sums
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection

SHAPES = [(1, 1, 1), (5, 3, 9), (512, 112, 2048), (513, 17, 100), (31, 8, 33), (4100, 24, 65)]


def stages(width: int, rank: int, entries: int, seed: int = 0) -> tuple[Nibbles, Nibbles]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(rank, width, generator=generator)
    second = torch.randn(entries, rank, generator=generator)
    return Nibbles.from_float(first), Nibbles.from_float(second)


@pytest.mark.parametrize("columns", [1, 2, 7, 512])
def test_stores_what_rounding_leaves(columns: int) -> None:
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)) * 3
    stored = Nibbles.from_float(weight)
    assert stored.data.shape == (5, (columns + 1) // 2)
    torch.testing.assert_close(stored.int8().float(), rounded(weight))
    error = (rounded(weight) - weight)[weight.abs() < 7 * stored.step[:, None]]
    assert (error.abs() <= 0.5001 * stored.step.max()).all()


def test_a_row_of_zeros_stays_about_zero() -> None:
    assert Nibbles.from_float(torch.zeros(2, 6)).int8().float().abs().max() < 1e-30


@pytest.mark.parametrize(("width", "rank", "entries"), SHAPES)
def test_scores_are_near_those_in_floating_point(width: int, rank: int, entries: int) -> None:
    first, second = stages(width, rank, entries)
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(2))
    a, b = first.int8(), second.int8()
    found, unit = sums(x, a, b)
    assert b.scale is not None
    exact = x.double() @ a.float().double().t() @ b.float().double().t()
    # An activation is off by at most half a unit; two stages, errors of random signs.
    bound = 6 * exact.square().mean().sqrt() / 127 * 2
    assert ((found * unit * b.scale).double() - exact).abs().max() < bound


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("width", "rank", "entries"), SHAPES)
def test_kernels_choose_what_the_reference_chooses(
    isa: str, rows: int, width: int, rank: int, entries: int
) -> None:
    first, second = stages(width, rank, entries)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, generator=generator) * 10
    limits = torch.randn(entries, generator=generator) * 50
    expected = TorchOps().select_nibbles(x, first, second, limits)
    for threads in (1, 3):
        out = Selection.empty(entries, rows)
        found = NativeOps(threads, isa).select_nibbles(x, first, second, limits, out=out)
        assert torch.equal(found.to_mask(rows), expected.to_mask(rows))
        assert torch.equal(found.counts, expected.counts)
        for have, want, count in zip(
            found.indices, expected.indices, expected.counts.tolist(), strict=True
        ):
            assert torch.equal(have[:count], want[:count])


def test_zeros_and_broken_numbers_choose_by_the_limit_and_nothing(isa: str) -> None:
    first, second = stages(40, 9, 70)
    limits = torch.linspace(-1, 1, 70)
    x = torch.zeros(3, 40)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    for ops in (NativeOps(1, isa), TorchOps()):
        mask = ops.select_nibbles(x, first, second, limits).to_mask(3)
        assert torch.equal(mask[0], limits < 0)
        assert not mask[1:].any()


def test_a_row_is_chosen_for_as_if_alone(isa: str) -> None:
    first, second = stages(64, 16, 128)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    limits = torch.zeros(128)
    ops = NativeOps(2, isa)
    together = ops.select_nibbles(x, first, second, limits).to_mask(4)
    for row in range(4):
        alone = ops.select_nibbles(x[row : row + 1], first, second, limits).to_mask(1)
        assert torch.equal(alone[0], together[row])
