import pytest
import torch
from truth import (
    dotted,
    exact,
    mask_of,
    masked,
    misaligned,
    random_weight,
    selection_of,
)

from dejavu.kernels.ops import Projection


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("width", [1, 7, 31, 64, 65, 300])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_products_with_stored_rows(ops, rows, width, dtype):
    g = torch.Generator().manual_seed(rows * 1000 + width)
    x = misaligned(torch.randn(rows, width, generator=g))
    weights = [random_weight(out, width, dtype, g) for out in (1, 5, 33, 257)]
    biases = [None, *(misaligned(torch.randn(w.rows, generator=g)) for w in weights[1:])]
    results = ops.linear(x, [Projection(w, b) for w, b in zip(weights, biases, strict=True)])
    for result, weight, bias in zip(results, weights, biases, strict=True):
        dotted(exact(x), weight, bias).check(result)


@pytest.mark.parametrize("kind", ["empty", "all", "random"])
@pytest.mark.parametrize(("entries", "block"), [(1, 7), (5, 64), (33, 5), (300, 1)])
@pytest.mark.parametrize("rows", [1, 3])
def test_unused_outputs_are_zero(ops, rows, entries, block, kind):
    g = torch.Generator().manual_seed(entries)
    x = torch.randn(rows, 65, generator=g)
    weight = random_weight(entries * block, 65, "int8", g)
    bias = torch.randn(weight.rows, generator=g)
    used = mask_of(kind, rows, entries, g)
    (result,) = ops.linear(x, [Projection(weight, bias, selection_of(used))])
    masked(dotted(exact(x), weight, bias), used).check(result)


def test_a_row_that_nobody_uses_is_not_read(native_ops):
    weight = random_weight(40, 9, "fp32", torch.Generator().manual_seed(0))
    weight.data[8:16] = float("nan")
    used = torch.ones(2, 5, dtype=torch.bool)
    used[:, 1] = False
    (result,) = native_ops.linear(torch.ones(2, 9), [Projection(weight, None, selection_of(used))])
    assert not result.isnan().any()


def test_misaligned_weights(native_ops):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 65, generator=g)
    for dtype in ("fp32", "bf16", "int8"):
        weight = random_weight(33, 65, dtype, g)
        shifted = type(weight)(misaligned(weight.data), weight.scale)
        straight, moved = (native_ops.linear(x, [Projection(w)])[0] for w in (weight, shifted))
        assert torch.equal(straight, moved)


def test_zero_rows_of_int8_give_zero(ops):
    weight = random_weight(8, 33, "fp32", torch.Generator().manual_seed(2))
    weight.data[3] = 0
    stored = type(weight).from_float(weight.data, "int8")
    (result,) = ops.linear(torch.randn(1, 33), [Projection(stored)])
    assert result[0, 3] == 0
