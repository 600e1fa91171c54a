"""combine and mlp: sums of stored rows over fixed tiles."""

import pytest
import torch
from truth import (
    activated,
    dotted,
    exact,
    mask_of,
    masked,
    misaligned,
    random_weight,
    selection_of,
    summed,
    times,
    whole_weight,
)

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection

KINDS = ["none", "empty", "all", "random"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("entries", "block"), [(1, 1), (5, 7), (33, 1), (40, 80), (2100, 1)])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_combine(ops, rows, entries, block, kind, dtype):
    g = torch.Generator().manual_seed(rows + entries)
    width = {1: 300, 2: 65, 3: 7, 16: 31}[rows]
    x = misaligned(torch.randn(rows, entries * block, generator=g))
    weight = random_weight(entries * block, width, dtype, g)
    bias = torch.randn(width, generator=g)
    residual = torch.randn(rows, width, generator=g)
    used = mask_of(kind, rows, entries, g)
    truth = summed(masked(exact(x), used), weight, bias, residual)
    truth.check(ops.combine(x, weight, bias, selection_of(used), residual))


@pytest.mark.parametrize("name", ["relu", "relu2", "silu", "gelu", "gelu_tanh", "fatrelu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "width", "neurons", "dtype"),
    [
        (1, 300, 257, "int8"),
        (1, 31, 2100, "bf16"),
        (2, 1, 5, "fp32"),
        (3, 65, 33, "int8"),
        (16, 64, 257, "bf16"),
        (16, 7, 1, "fp32"),
    ],
)
def test_mlp(ops, rows, width, neurons, dtype, kind, gated, name):
    g = torch.Generator().manual_seed(neurons)
    x = misaligned(torch.randn(rows, width, generator=g))
    up, gate, down = (random_weight(neurons, width, dtype, g) for _ in range(3))
    up_bias, gate_bias = torch.randn(2, neurons, generator=g)
    down_bias, residual = torch.randn(width, generator=g), torch.randn(rows, width, generator=g)
    used = mask_of(kind, rows, neurons, g)

    linear = dotted(exact(x), up, up_bias)
    inner = dotted(exact(x), gate, gate_bias) if gated else linear
    a = activated(inner, name, 0.5)
    a = masked(times(a, linear) if gated else a, used)
    truth = summed(a, down, down_bias, residual)
    result = ops.mlp(
        x,
        Projection(up, up_bias),
        Projection(gate, gate_bias) if gated else None,
        down,
        down_bias,
        Activation(name, 0.5),
        selection_of(used),
        residual,
    )
    truth.check(result)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_whole_numbers_are_exact(native_ops, rows, gated, kind, dtype):
    """All sums fit in 24 bits and all coefficients in 15, so the compiled kernels equal PyTorch in
    every bit."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randint(-1, 2, (rows, 37), generator=g).float()
    up, gate, down = (whole_weight(600, 37, dtype, g) for _ in range(3))
    used = mask_of(kind, rows, 600, g)
    counters = torch.zeros(2, 1, dtype=torch.int64)
    results = []
    for ops, counter in zip((native_ops, TorchOps()), counters, strict=True):
        chosen = selection_of(used)
        if chosen is not None:
            chosen = Selection(600, chosen.indices, chosen.counts, chosen.mask, counter)
        gate_part = Projection(gate) if gated else None
        results.append(
            ops.mlp(x, Projection(up), gate_part, down, None, Activation("relu"), chosen, None)
        )
    assert torch.equal(*results)
    assert torch.equal(*counters)
    assert (counters[0] > 0) == (kind in ("all", "random"))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("entries", [512 * 32, 700 * 32, 40000])
def test_the_largest_sums_of_int8_rows_fit(native_ops, entries, rows):
    """Products of the largest magnitude: 32 bits hold a tile of 512, larger tiles lose bits."""
    data = torch.full((entries, 33), -128, dtype=torch.int8)
    data[:, 5] = 127
    x = torch.full((rows, entries), 1 - 2.0**-16)
    x[-1] *= -1
    result = native_ops.combine(x, Matrix(data, torch.ones(entries)), None, None, None)
    expected = x.double() @ data.double()
    assert ((result - expected).abs() <= 2.0**-12 * expected.abs()).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_coefficient_that_is_not_finite_shows(native_ops, bad):
    weight = random_weight(100, 40, "int8", torch.Generator().manual_seed(5))
    x = torch.ones(3, 100)
    x[1, 70] = bad
    result = native_ops.combine(x, weight, None, None, None)
    assert not result[1].isfinite().any()
    assert result[[0, 2]].isfinite().all()


def test_small_and_large_coefficients(ops):
    """The step follows the coefficients of a row and tile, over the range of fp32."""
    weight = random_weight(32, 40, "int8", torch.Generator().manual_seed(6))
    unit = torch.randn(1, 32, generator=torch.Generator().manual_seed(7))
    x = torch.cat([unit * scale for scale in (1e-25, 1e-3, 1e30)])
    summed(exact(x), weight).check(ops.combine(x, weight, None, None, None))


def test_what_is_not_used_is_not_touched(native_ops):
    """Poison in rows that are read for a neighbour, or not at all, reaches nobody."""
    g = torch.Generator().manual_seed(3)
    up, down = (random_weight(96, 20, "fp32", g) for _ in range(2))
    used = torch.ones(3, 96, dtype=torch.bool)
    used[:, 10] = False
    used[1:, 20] = False  # row 0 alone uses the poisoned neuron 20
    for weight in (up, down):
        weight.data[[10, 20]] = float("nan")
    x = torch.randn(3, 20, generator=g)
    result = native_ops.mlp(
        x, Projection(up), None, down, None, Activation("silu"), selection_of(used), None
    )
    assert result[0].isnan().all()
    assert not result[1:].isnan().any()
    result = native_ops.combine(torch.randn(3, 96), down, None, selection_of(used), None)
    assert result[0].isnan().all()
    assert not result[1:].isnan().any()


def test_only_a_selection_skips_zeros(native_ops):
    """With None the dense arm reads every down row; a selection leaves closed neurons unread."""
    g = torch.Generator().manual_seed(4)
    up, down = (whole_weight(64, 8, "fp32", g) for _ in range(2))
    x = torch.ones(1, 8)
    closed = up.data.sum(dim=1) <= 0
    assert closed.any()
    assert not closed.all()
    down.data[closed] = float("inf")
    skipped, dense = (
        native_ops.mlp(x, Projection(up), None, down, None, Activation("relu"), s, None)
        for s in (Selection.full(64), None)
    )
    assert skipped.isfinite().all()
    assert dense.isnan().all()
