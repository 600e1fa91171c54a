import importlib.util
import itertools
import types

import pytest
import torch

from dejavu.errors import BackendError
from dejavu.kernels import native
from dejavu.kernels.native import NativeOps
from dejavu.kernels.reference import TorchOps
from triton_once import patched_once

try:
    ISAS = native.available_isas()
except BackendError:
    ISAS = []
CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None


class PoisonedTorch(types.ModuleType):
    """torch as a backend's module sees it, except that fresh memory holds the worst value."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*args, **kwargs):
        fresh = torch.empty(*args, **kwargs)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else -(2**31))

    @staticmethod
    def empty_like(like, dtype=None):
        return PoisonedTorch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


@pytest.fixture(scope="session", autouse=True)
def _patch_once():
    if not TRITON or CUDA:
        yield
        return
    with patched_once():
        yield


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.setattr(native, "torch", PoisonedTorch("torch"))
    if TRITON:
        from dejavu.kernels.gpu import heads, launch
        from dejavu.kernels.gpu import ops as gpu_ops

        for module in (gpu_ops, heads, launch):
            monkeypatch.setattr(module, "torch", PoisonedTorch("torch"))


@pytest.fixture(params=ISAS or [None])
def isa(request):
    if request.param is None:
        pytest.skip("the compiled kernels are not installed")
    return request.param


@pytest.fixture
def native_ops(isa):
    return NativeOps(threads=1, isa=isa)  # more threads: test_bits.py, where it may matter


@pytest.fixture
def triton_device():
    """Where the Triton kernels run: on the GPU, or on CPU tensors in Triton's interpreter."""
    if not TRITON:
        pytest.skip("Triton is not installed")
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture
def triton_ops(triton_device):
    """Makes the Triton backend: `triton_ops(dtype, tuning)`, both optional.

    The interpreter takes its time for every program, so there the kernels are cut into few.
    """
    from on_device import Cut, OnDevice

    from dejavu.kernels.gpu.ops import TritonOps

    def make(dtype=torch.float32, tuning=None):
        if tuning is None and not CUDA:
            tuning = Cut()
        return OnDevice(TritonOps(triton_device, dtype, tuning=tuning))

    return make


@pytest.fixture(params=[*ISAS, "torch", "triton"])
def ops(request):
    """Every backend: each instruction set of the compiled kernels, PyTorch and Triton."""
    if request.param == "torch":
        return TorchOps()
    if request.param == "triton":
        return request.getfixturevalue("triton_ops")()
    return NativeOps(threads=1, isa=request.param)


def is_interpreted(item):
    """Whether a test runs kernels in Triton's interpreter, which is thousands of times slower."""
    if CUDA or not hasattr(item, "callspec"):
        return False
    return "triton_ops" in item.fixturenames or item.callspec.params.get("ops") == "triton"


def pytest_collection_modifyitems(config, items):
    """Of interpreted tests keep those that bring a new pair of parameter values.

    Most faults need no more than two parameters to show (Kuhn et al., IEEE TSE 30(6), 2004).
    """
    seen, kept, dropped = set(), [], []
    for item in items:
        if not is_interpreted(item):
            kept.append(item)
            continue
        test = item.nodeid.partition("[")[0]
        values = [(n, repr(v)) for n, v in sorted(item.callspec.params.items()) if n != "ops"]
        pairs = {(test, *pair) for pair in itertools.combinations(values, 2)} or {(test, *values)}
        (dropped if pairs <= seen else kept).append(item)
        seen |= pairs
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
