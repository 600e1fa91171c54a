"""The MLP benchmark: what it rotates over, what it counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from dejavu.bench import kernels
from dejavu.bench.kernels import MLPShape, bench_mlp
from dejavu.errors import InputError
from dejavu.kernels.native import NativeOps

CACHE = 1 << 16


@pytest.fixture
def small_cache(monkeypatch):
    machine = replace(kernels.this_machine(), caches={"L2": CACHE})
    monkeypatch.setattr(kernels, "this_machine", lambda *_: machine)
    return machine


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_counts_and_rotates(small_cache, gated, dtype):
    hidden, neurons = 24, 96
    done = bench_mlp(MLPShape(hidden, neurons, gated), (0.25,), dtype=dtype, threads=1, repeats=2)
    assert [one.density for one in done.results] == [1.0, 0.25]
    row = hidden * {"fp32": 4, "bf16": 2, "int8": 1}[dtype] + (4 if dtype == "int8" else 0)
    matrices = 3 if gated else 2
    for one in done.results:
        assert one.bytes == one.density * neurons * (matrices * row + (matrices - 1) * 4)
        assert one.cold
        assert (one.layers - 1) * one.bytes >= 4 * CACHE > (one.layers - 2) * one.bytes
        assert one.gb_per_second == pytest.approx(one.bytes / one.us.median / 1e3)
    assert done.results[0].speedup == 1.0
    json.dumps(done.to_json())


def test_says_where_memory_does_not_suffice_to_be_cold(small_cache, monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_BYTES", 1 << 16)
    done = bench_mlp(MLPShape(24, 96), (0.25,), dtype="fp32", threads=1, repeats=1)
    assert [one.cold for one in done.results] == [False, False]


def test_selections_are_fresh_and_every_listed_neuron_is_active():
    generator = torch.Generator().manual_seed(0)
    run = kernels._Rotation(MLPShape(16, 64), 0.25, "fp32", 1 << 14, generator)
    run.draw()
    first = [selection.to_mask(1).clone() for selection in run._selections]
    assert all(mask.sum() == 16 for mask in first)
    assert not torch.equal(first[0], first[1])
    run.draw()
    assert not torch.equal(first[0], run._selections[0].to_mask(1))
    run.repeat_first()
    assert all(torch.equal(s.to_mask(1), run._selections[0].to_mask(1)) for s in run._selections)
    layers = kernels._layers(MLPShape(16, 64, True), 2, "int8", generator)
    assert layers[0].up.weight.data.data_ptr() != layers[1].up.weight.data.data_ptr()
    active = torch.zeros(1, dtype=torch.int64)
    for layer in layers:
        watched = replace(run._selections[0], active=active.zero_())
        NativeOps(1).mlp(
            torch.randn(1, 16), layer.up, layer.gate, layer.down, None, kernels._RELU, watched, None
        )
        assert active.item() == 16


def test_refuses_densities_out_of_range():
    with pytest.raises(InputError, match=r"\(0, 1\]"):
        bench_mlp(MLPShape(16, 64), (0.0,))
