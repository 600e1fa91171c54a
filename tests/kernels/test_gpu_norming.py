"""Norms that the kernel after them computes: the same numbers, and read right by everybody."""

from __future__ import annotations

import pytest
import torch
from on_device import Cut

from dejavu.kernels.gpu.ops import TritonOps
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.reference import TorchOps

WIDTH = 200  # of the residual: blocks of columns with a rest


@pytest.fixture
def ops(triton_device, monkeypatch):
    """Ops whose norms wait, and which tell how many kernels of their own these took."""
    tuning = None if torch.device(triton_device).type == "cuda" else Cut()
    made = TritonOps(triton_device, tuning=tuning)
    made.fuse_norms = True
    made.norms_alone = 0
    launch = made._launch_norm

    def counted(*arguments):
        made.norms_alone += 1
        launch(*arguments)

    monkeypatch.setattr(made, "_launch_norm", counted)
    return made


def rows_of(ops, inputs, weight, residual):
    return ops.combine(inputs, weight, None, None, residual)


def case(offset: float, device):
    generator = torch.Generator().manual_seed(int(offset) + 5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    return {
        "inputs": normal(1, 64),
        "weight": Matrix(normal(64, WIDTH)),
        "residual": normal(1, WIDTH) + offset,
        "factor": normal(WIDTH),
        "shift": normal(WIDTH),
        "first": Matrix(normal(72, WIDTH)),
        "down": Matrix(normal(72, WIDTH)),
    }


def norm(ops, kind: str, hidden, c):
    if kind == "layer":
        return ops.layer_norm(hidden, c["factor"], c["shift"], 1e-5)
    if kind == "plain":
        return ops.layer_norm(hidden, None, None, 1e-5)
    return ops.rms_norm(hidden, c["factor"], 1e-5)


@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far"])
@pytest.mark.parametrize("kind", ["layer", "plain", "rms"])
def test_the_next_kernel_norms(ops, kind, offset):
    c = case(offset, ops.device)
    found, expected = [], []
    for side, results in ((ops, found), (TorchOps(), expected)):
        up = Projection(c["first"])
        waiting = side.deferring() if side is ops else torch.no_grad()
        with waiting:
            hidden = rows_of(side, c["inputs"], c["weight"], c["residual"])
            x = norm(side, kind, hidden, c)
            results += side.linear(x, [up, up])
            results += side.linear(x, [up])  # the normed row has been written by then
            hidden = rows_of(side, c["inputs"], c["weight"], hidden)
            y = norm(side, kind, hidden, c)
            results.append(side.mlp(y, up, None, c["down"], None, Activation("relu"), None, hidden))
            results += [x, y]
    for ours, theirs in zip(found, expected, strict=True):
        scale = float(theirs.abs().max())
        # An offset of 1000 costs fp32 ten bits of every distance from the mean.
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=scale * (1e-3 if offset else 1e-5))
    assert ops.norms_alone == 0


def test_whoever_reads_a_normed_row_gets_it(ops):
    c = case(0.0, ops.device)
    reference = TorchOps()
    hidden = rows_of(reference, c["inputs"], c["weight"], c["residual"])
    expected = norm(reference, "layer", hidden, c)
    with ops.deferring():
        hidden = rows_of(ops, c["inputs"], c["weight"], c["residual"])
        x = norm(ops, "layer", hidden, c)
        torch.testing.assert_close(ops.add(x, x), 2 * expected, rtol=1e-4, atol=1e-5)
        hidden = rows_of(ops, c["inputs"], c["weight"], c["residual"])
        x = norm(ops, "layer", hidden, c)
        ready = ops.combine(x, Matrix(torch.eye(WIDTH, device=ops.device)), None, None, None)
        torch.testing.assert_close(ready, expected, rtol=1e-4, atol=1e-5)
        assert ops.norms_alone == 2
        hidden = rows_of(ops, c["inputs"], c["weight"], c["residual"])
        last = norm(ops, "layer", hidden, c)
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)
    hidden = rows_of(ops, c["inputs"], c["weight"], c["residual"])  # outside nothing waits
    torch.testing.assert_close(norm(ops, "layer", hidden, c), expected, rtol=1e-4, atol=1e-5)
    assert ops.norms_alone == 4
