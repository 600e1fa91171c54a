"""Triton's projections and sums in every weight dtype, with fp32 and half-precision inputs.

A product of two half-precision numbers is exact in fp32, and so are int8 weights: what remains is
the rounding of fp32 sums, which `truth.product` bounds. Where a GPU multiplies fp32 inputs in tf32,
three products leave 2^-22 of each input.
"""

import pytest
import torch
from truth import (
    EPS,
    Bounded,
    activated,
    exact,
    mask_of,
    masked,
    product,
    random_weight,
    selection_of,
    times,
    weight64,
    whole_weight,
)

from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
INPUTS = [
    ("fp32", torch.float32), ("fp16", torch.float32), ("fp16", torch.float16),
    ("bf16", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.float32),
    ("int8", torch.float16), ("int8", torch.bfloat16),
]  # fmt: skip
ACTIVATIONS = ["relu", "relu2", "silu", "gelu", "gelu_tanh", "fatrelu"]


def need_products(inputs, rows):
    if inputs is torch.bfloat16 and rows > 1 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter multiplies the bit patterns of bf16, not the numbers")


def split_inputs(x, weight, bounded):
    """Room for fp32 inputs that lost their last bits to a split in tf32."""
    lost = 4 * EPS * (x.double().abs() @ weight64(weight).abs())
    return Bounded(bounded.value, bounded.bound + lost)


@pytest.mark.parametrize(("dtype", "inputs"), INPUTS)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("width", [1, 64, 300])
def test_projections(triton_ops, dtype, inputs, rows, width):
    need_products(inputs, rows)
    g = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=g).to(inputs)
    weights = [random_weight(out, width, dtype, g) for out in (96, 7, 33, 1)]
    biases = [torch.randn(96, generator=g), None, torch.randn(33, generator=g), None]
    results = triton_ops().linear(x, list(map(Projection, weights, biases)))
    for result, weight, bias in zip(results, weights, biases, strict=True):
        expected = product(exact(x), weight64(weight).T, bias)
        lost = 4 * EPS * (x.double().abs() @ weight64(weight).abs().T)
        Bounded(expected.value, expected.bound + lost).check(result)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["none", "empty", "all", "random"])
def test_sums(triton_ops, dtype, rows, kind):
    """What a head's output projection sees: fp32 inputs, blocks of channels, several tiles."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 40 * 20, generator=g)
    weight = random_weight(40 * 20, 65, dtype, g)
    bias, residual = torch.randn(65, generator=g), torch.randn(rows, 65, generator=g)
    used = mask_of(kind, rows, 40, g)
    result = triton_ops().combine(x, weight, bias, selection_of(used), residual)
    expected = product(masked(exact(x), used), weight64(weight), bias, residual)
    split_inputs(x, weight, expected).check(result)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("rows", "kind"), [(1, "random"), (3, "random"), (16, "none")])
def test_mlp_of_halves(triton_ops, name, gated, dtype, rows, kind):
    need_products(HALF[dtype], rows)
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=g).to(HALF[dtype])
    up, gate, down = (random_weight(130, 64, dtype, g) for _ in range(3))
    up_bias, gate_bias = torch.randn(2, 130, generator=g)
    used = mask_of(kind, rows, 130, g)
    linear = product(exact(x), weight64(up).T, up_bias)
    inner = product(exact(x), weight64(gate).T, gate_bias) if gated else linear
    a = activated(inner, name, 0.5)
    a = masked(times(a, linear) if gated else a, used)
    expected = split_inputs(a.value, down, product(a, weight64(down)))
    result = triton_ops(HALF[dtype]).mlp(
        x,
        Projection(up, up_bias),
        Projection(gate, gate_bias) if gated else None,
        down,
        None,
        Activation(name, 0.5),
        selection_of(used),
        None,
    )
    expected.check(result)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["none", "empty", "all", "random"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_whole_numbers_are_exact(triton_ops, rows, gated, kind, dtype):
    """Every sum fits in 24 bits: Triton equals PyTorch in every bit, and counts what is active."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randint(-3, 4, (rows, 37), generator=g).float()
    up, gate, down = (whole_weight(200, 37, dtype, g) for _ in range(3))
    used = mask_of(kind, rows, 200, g)
    counters = torch.zeros(2, 1, dtype=torch.int64)
    results = []
    for ops, counter in zip((triton_ops(), TorchOps()), counters, strict=True):
        chosen = selection_of(used)
        if chosen is not None:
            chosen = Selection(200, chosen.indices, chosen.counts, chosen.mask, counter)
        gate_part = Projection(gate) if gated else None
        results.append(
            ops.mlp(x, Projection(up), gate_part, down, None, Activation("relu"), chosen, None)
        )
    assert torch.equal(*results)
    assert torch.equal(*counters)
    assert (counters[0] > 0) == (kind in ("all", "random"))


def test_only_a_selection_skips_zeros(triton_ops):
    g = torch.Generator().manual_seed(4)
    up, down = (whole_weight(64, 32, "fp32", g) for _ in range(2))
    closed = up.data.sum(dim=1) <= 0
    down.data[closed] = float("inf")
    skipped, dense = (
        triton_ops().mlp(
            torch.ones(1, 32), Projection(up), None, down, None, Activation("relu"), chosen, None
        )
        for chosen in (Selection.full(64), None)
    )
    assert skipped.isfinite().all()
    assert dense.isnan().all()


def test_what_nobody_selects_is_not_read(triton_ops):
    g = torch.Generator().manual_seed(5)
    up, down = (random_weight(96, 20, "fp32", g) for _ in range(2))
    used = torch.ones(2, 96, dtype=torch.bool)
    used[:, 10:40] = False
    for weight in (up, down):
        weight.data[10:40] = float("nan")
    chosen, ops = selection_of(used), triton_ops()
    for rows in (1, 2):
        chosen = selection_of(used[:rows])
        x = torch.randn(rows, 20, generator=g)
        a = torch.randn(rows, 96, generator=g)
        a[:, 10:40] = float("nan")
        activation = Activation("silu")
        results = (
            ops.mlp(x, Projection(up), None, down, None, activation, chosen, None),
            ops.combine(a, down, None, chosen, None),
            *ops.linear(x, [Projection(up, None, chosen)]),
        )
        assert not any(result.isnan().any() for result in results)


@pytest.mark.parametrize("dtype", HALF)
def test_norms_round_once(triton_ops, dtype):
    """fp32 inside, rounded to the weights' dtype at the end: half a unit in the last place."""
    g = torch.Generator().manual_seed(6)
    x, weight = torch.randn(3, 300, generator=g), torch.randn(300, generator=g)
    half, precise = triton_ops(HALF[dtype]), triton_ops()
    for norm in ("rms_norm", "layer_norm"):
        arguments = (x, weight, 1e-6) if norm == "rms_norm" else (x, weight, weight, 1e-6)
        rounded = getattr(half, norm)(*arguments)
        assert rounded.dtype == HALF[dtype]
        # Triton's interpreter cuts bf16 off where a GPU rounds to nearest.
        cut = dtype == "bf16" and not torch.cuda.is_available()
        expected = getattr(precise, norm)(*arguments).to(HALF[dtype])
        ulp = torch.finfo(HALF[dtype]).eps if cut else 0.0
        torch.testing.assert_close(rounded, expected, rtol=ulp, atol=0.0)
