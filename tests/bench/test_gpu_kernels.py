"""The MLP benchmark of a GPU: what it rotates over, what it counts, what it compares."""

from __future__ import annotations

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

from dejavu.bench import gpu_kernels, gpu_stack
from dejavu.bench.backend import Backend
from dejavu.bench.gpu_kernels import bench_mlp_on_gpu
from dejavu.bench.kernels import MLPShape
from dejavu.bench.machine import GPU, Machine
from dejavu.bench.table import gpu_kernel_table
from dejavu.errors import InputError
from dejavu.kernels.ops import Projection
from dejavu.kernels.reference import TorchOps

CPU = torch.device("cpu")
CACHE = 1 << 12
SHAPE = MLPShape(24, 96)
RANK = 5


@pytest.fixture
def backend():
    gpu = GPU("a GPU", 1 << 30, CACHE, 2, "sm_90", "13.0", None)
    machine = Machine("a CPU", "x", "y", 1, 1, {}, [], gpu)
    return Backend(CPU, TorchOps(), None, "sm_90", machine, lambda: 100.0)


@pytest.fixture
def done(backend, monkeypatch):
    monkeypatch.setattr(gpu_stack, "_CALLS", 3)
    monkeypatch.setattr(gpu_kernels, "_REPLAYS", 2)
    return bench_mlp_on_gpu(
        SHAPE, (0.25, 0.5), device=CPU, dtype="fp32", rank=RANK, repeats=1, backend=backend
    )


def test_arms_bytes_and_rotation(done):
    dense = ["dense", *(f"cuBLAS, up by {a}, down by {b}" for a in LAYOUTS for b in LAYOUTS)]
    sparse = ["sparse", "sparse with selection", "index_select"]
    assert [one.name for one in done.results] == dense + 2 * sparse
    assert [one.density for one in done.results] == [1.0] * 5 + [0.25] * 3 + [0.5] * 3
    row = 2 * 24 * 4 + 4
    predictor = RANK * (24 + 4) + 96 * (RANK + 4) + 4 * 96
    for one in done.results:
        if one.name == "sparse with selection":
            assert one.bytes == pytest.approx(one.density * 96 * row + predictor, rel=0.4)
        else:
            assert one.bytes == round(one.density * 96) * row
            assert one.cold
            assert (one.layers - 1) * one.bytes >= 4 * CACHE > (one.layers - 2) * one.bytes
        assert one.gb_per_second == pytest.approx(one.bytes / one.us.median / 1e3)
        assert one.of_bandwidth == pytest.approx(one.gb_per_second / 100.0)


LAYOUTS = ("rows", "columns")


def test_ratios_are_to_the_best_of_cublas_and_to_the_gather_of_the_same_density(done):
    best = min(one.us.median for one in done.results if one.name.startswith("cuBLAS"))
    gathers = {o.density: o.us.median for o in done.results if o.name == "index_select"}
    for one in done.results:
        assert one.faster_than["cuBLAS"] == pytest.approx(best / one.us.median)
        assert one.faster_than["dense"] == pytest.approx(done.results[0].us.median / one.us.median)
        if one.density < 1.0:
            expected = gathers[one.density] / one.us.median
            assert one.faster_than["index_select"] == pytest.approx(expected)
        else:
            assert "index_select" not in one.faster_than


def test_all_ways_compute_the_same(backend, monkeypatch):
    results = {}

    def keep(self, work):
        def again() -> float:
            results[len(results)] = work()
            return 1.0

        return again

    monkeypatch.setattr(gpu_stack.Stack, "timer", keep)
    stack = gpu_stack.Stack(SHAPE, 2, torch.float32, RANK, CPU)
    stack.bias.fill_(0.0)  # some neurons inactive: the activation is compared too
    draw = gpu_stack.Draw(stack, 0.25)
    for make in (
        lambda: gpu_kernels._dense_arms(stack, backend.ops, CACHE),
        lambda: gpu_kernels._sparse_arms(stack, draw, backend.ops, CACHE)[::2],
    ):
        arms = make()
        for arm in arms:
            results.clear()
            arm.run()
            arm.results = list(results.values())
        for arm in arms[1:]:
            for ours, theirs in zip(arms[0].results, arm.results, strict=True):
                # fp32 sums of 96 terms in another order
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_draws_are_fresh_and_cuts_come_out_as_asked(backend):
    stack = gpu_stack.Stack(SHAPE, 2, torch.float32, RANK, CPU)
    draw = gpu_stack.Draw(stack, 0.25)
    before = [selection.to_mask(1).clone() for selection in draw.given]
    assert all(mask.sum() == 24 for mask in before)
    assert not torch.equal(before[0], before[1])
    draw.fresh()
    assert not torch.equal(before[0], draw.given[0].to_mask(1))
    for call, selection in enumerate(draw.given):
        assert torch.equal(selection.to_mask(1)[0].nonzero()[:, 0].int(), draw.indices[call])
    for call, out in enumerate(draw.predicted):
        (hidden,) = backend.ops.linear(stack.x[call], [Projection(stack.first[0])])
        backend.ops.select(hidden, stack.second[0], draw.biases[0], out=out)
    # 32 inputs of 96 neurons, whose scores share 5 directions
    assert draw.predicted_neurons() == pytest.approx(24, abs=8)


def test_table_and_json(done):
    told = json.loads(json.dumps(done.to_json()))
    assert told["machine"]["gpu"]["l2_bytes"] == told["machine"]["last_level_cache"] == CACHE
    console = Console(width=200, record=True, file=StringIO())
    console.print(gpu_kernel_table(done))
    shown = console.export_text()
    assert "sparse with selection" in shown
    assert "a GPU" in shown


@pytest.mark.parametrize(
    ("shape", "density"), [(SHAPE, 1.0), (SHAPE, 0.0), (MLPShape(8, 16, True), 0.5)]
)
def test_refuses_what_it_cannot_compare(backend, shape, density):
    with pytest.raises(InputError):
        bench_mlp_on_gpu(shape, (density,), device=CPU, dtype="fp32", backend=backend)


@pytest.mark.cuda
def test_on_a_gpu(monkeypatch):
    done = bench_mlp_on_gpu(
        MLPShape(256, 1024), (0.25,), device=torch.device("cuda", 0), rank=16, repeats=1
    )
    assert done.read_bandwidth > 100
    for one in done.results:
        assert 0 < one.us.median < 1e5
    (predicted,) = (one for one in done.results if one.name == "sparse with selection")
    assert predicted.bytes > 0.1 * done.results[0].bytes
