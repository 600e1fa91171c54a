import types

import pytest
import torch

from dejavu.errors import BackendError
from dejavu.kernels import native
from dejavu.kernels.native import NativeOps
from dejavu.kernels.reference import TorchOps

try:
    ISAS = native.available_isas()
except BackendError:
    ISAS = []


class PoisonedTorch(types.ModuleType):
    """torch as the native module sees it, except that fresh memory holds the worst value."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*args, **kwargs):
        fresh = torch.empty(*args, **kwargs)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else -(2**31))


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.setattr(native, "torch", PoisonedTorch("torch"))


@pytest.fixture(params=ISAS or [None])
def isa(request):
    if request.param is None:
        pytest.skip("the compiled kernels are not installed")
    return request.param


@pytest.fixture
def native_ops(isa):
    return NativeOps(threads=1, isa=isa)  # more threads: test_bits.py, where it may matter


@pytest.fixture(params=[*ISAS, "torch"])
def ops(request):
    """Every backend: each instruction set of the compiled kernels, and the PyTorch ops."""
    if request.param == "torch":
        return TorchOps()
    return NativeOps(threads=1, isa=request.param)
