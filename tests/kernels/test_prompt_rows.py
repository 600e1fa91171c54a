"""Prompts on the decode kernels: as torch has it, and the same wherever a prompt is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.prompt_rows import PromptRows
from dejavu.kernels.reference import TorchOps

WIDTH, NEURONS = 96, 160


def int8(rows: int, columns: int) -> Matrix:
    return Matrix(
        torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows) * 0.02
    )


def results(ops: TorchOps, x: Tensor, wide: Tensor) -> list[Tensor]:
    """Of every op that it does by itself."""
    torch.manual_seed(1)
    up, gate, down, out = int8(NEURONS, WIDTH), int8(NEURONS, WIDTH), int8(NEURONS, WIDTH), None
    bias, back = torch.randn(NEURONS), torch.randn(WIDTH)
    first, second = ops.linear(x, [Projection(up, bias), Projection(gate)])
    out = ops.combine(wide, down, back, None, x)
    plain = ops.combine(wide, down, None, None, None)
    relu, silu = Activation("relu"), Activation("silu")
    small = ops.mlp(x, Projection(up, bias), None, down, back, relu, None, x)
    gated = ops.mlp(x, Projection(up), Projection(gate), down, None, silu, None, None)
    return [first, second, out, plain, small, gated]


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
def test_it_is_torch_within_the_rounding_of_inputs(rows: int) -> None:
    torch.manual_seed(rows)
    x, wide = torch.randn(rows, WIDTH), torch.randn(rows, NEURONS)
    for found, truth in zip(
        results(PromptRows(1), x, wide), results(TorchOps(), x, wide), strict=True
    ):
        assert found.shape == truth.shape
        # An input is off by 2^-16 of the largest, a product's sum by that times some rows' norm.
        assert (found - truth).abs().max() < 2e-4 * truth.abs().max()


def test_a_cut_changes_no_bit() -> None:
    torch.manual_seed(0)
    x, wide = torch.randn(41, WIDTH), torch.randn(41, NEURONS)
    whole = results(PromptRows(2), x, wide)
    for cut in (1, 7, 16, 40):
        parts = [results(PromptRows(1), x[a:b], wide[a:b]) for a, b in ((0, cut), (cut, 41))]
        for joined, one in zip(zip(*parts, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(joined), one)


def test_other_weights_are_torchs() -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(20, WIDTH), Matrix(torch.randn(NEURONS, WIDTH))
    for kind in (matrix, Matrix(matrix.data.bfloat16())):
        found, truth = (ops.linear(x, [Projection(kind)])[0] for ops in (PromptRows(1), TorchOps()))
        assert torch.equal(found, truth)
