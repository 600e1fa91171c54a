"""The Python face: checks, views, lifetimes, and what happens without the extension."""

import gc

import pytest
import torch
from truth import random_weight

from dejavu.errors import BackendError, InputError
from dejavu.kernels import compiled, native
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.selection import Selection


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(compiled, "_native", None)
    with pytest.raises(BackendError, match=r"reinstall.*compiler"):
        NativeOps()
    with pytest.raises(BackendError, match="reinstall"):
        native.measure_read_bandwidth(1)


def test_an_unknown_isa_names_those_there(isa):
    with pytest.raises(BackendError, match="portable"):
        NativeOps(isa="sse9")
    with pytest.raises(InputError, match="threads"):
        NativeOps(threads=0, isa=isa)


def test_default_threads():
    assert native.default_threads() >= 1


def test_read_bandwidth(isa):
    assert native.measure_read_bandwidth(2, size=1 << 22, repeats=2) > 0


def test_views_give_what_their_copies_give(native_ops):
    weight = random_weight(33, 8, "fp32", torch.Generator().manual_seed(0))
    base = torch.randn(16, 32)
    for view in (
        base[:8, :6].T,
        base[:, ::4],
        base[1:, 8:16],
        base[:1, 3:11].expand(4, 8),
        base[::2, :8],
    ):
        copy = view.contiguous()
        for op in (
            lambda x: native_ops.linear(x, [Projection(weight)])[0],
            lambda x: native_ops.rms_norm(x, weight.data[0], 1e-6),
            lambda x: native_ops.layer_norm(x, None, None, 1e-6),
            lambda x: native_ops.add(x, x),
            lambda x: native_ops.combine(x, Matrix(weight.data[:8].contiguous()), None, None, None),
            native_ops.argmax,
        ):
            assert torch.equal(op(view), op(copy))


def test_a_view_cannot_be_recorded(native_ops):
    recorder = native_ops.recorder()
    with pytest.raises(InputError, match="contiguous"):
        recorder.argmax(torch.ones(4, 3).T)


def test_wrong_inputs_are_named(native_ops):
    weight = random_weight(33, 8, "fp32", torch.Generator().manual_seed(0))
    projection = Projection(weight)
    for message, x in (
        ("float32", torch.ones(2, 8, dtype=torch.float64)),
        ("17 rows", torch.ones(17, 8)),
        ("0 rows", torch.ones(0, 8)),
        ("wide", torch.ones(2, 9)),
        ("CPU", torch.ones(2, 8, device="meta")),
    ):
        with pytest.raises(InputError, match=message):
            native_ops.linear(x, [projection])
    with pytest.raises(InputError, match="bias"):
        native_ops.linear(torch.ones(2, 8), [Projection(weight, torch.ones(32))])
    with pytest.raises(InputError, match="entries"):
        native_ops.linear(torch.ones(2, 8), [Projection(weight, None, Selection.full(10))])
    with pytest.raises(InputError, match="3 rows"):
        made_for_three = Selection.from_mask(torch.ones(3, 33))
        native_ops.linear(torch.ones(2, 8), [Projection(weight, None, made_for_three)])
    with pytest.raises(InputError, match="activation"):
        native_ops.mlp(
            torch.ones(1, 8), projection, None, weight, None, Activation("swish"), None, None
        )
    with pytest.raises(InputError, match="program"):
        _ = native_ops.program


def test_a_program_keeps_what_it_needs(native_ops):
    recorder = native_ops.recorder()

    def record():
        g = torch.Generator().manual_seed(0)
        weight, x = random_weight(64, 32, "int8", g), torch.randn(1, 32, generator=g)
        bias = torch.randn(64, generator=g)
        h = recorder.add(x, x)
        chosen = recorder.select(h, weight, bias)
        y = recorder.mlp(h, Projection(weight), None, weight, None, Activation("relu"), chosen, h)
        expected = native_ops.add(x, x)
        chosen = native_ops.select(expected, weight, bias)
        return y, native_ops.mlp(
            expected, Projection(weight), None, weight, None, Activation("relu"), chosen, expected
        )

    result, expected = record()
    gc.collect()
    _ = [torch.full((64, 32), 7, dtype=torch.int8) for _ in range(50)]
    recorder.program.run()
    assert torch.equal(result, expected)


def test_an_empty_program_runs(native_ops):
    native_ops.recorder().program.run()
