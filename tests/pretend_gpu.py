"""A GPU that is not there: CPU tensors that claim to lie on `cuda:0`.

`pretend_gpu` lets code that moves tensors to a GPU run without one and raises where a real GPU
would: tensors of two devices in one operation, NumPy views of device memory. Kernels, graphs,
streams and numbers are the CPU's; only where things lie is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
_MIXING = {Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, Tensor.to, Tensor.cpu}
_cpu_generator = torch.Generator


class OnGpu(Tensor):
    """Shares memory with a CPU tensor."""

    device = DEVICE
    is_cuda = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Everything(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Generator(torch.Generator):
    def __new__(cls, device: object = None) -> Any:
        return _cpu_generator.__new__(_cpu_generator)


def _device(value: object) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    return torch.device(value) if isinstance(value, str) else None


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    gpu = [x for x in tensors if isinstance(x, OnGpu)]
    name = getattr(func, "__name__", "")
    written = name.endswith("_") and not name.endswith("__")
    if gpu and func not in _MIXING:
        if func is Tensor.numpy:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        here = [x for x in tensors if not isinstance(x, OnGpu)]
        if any(x.ndim or (written and x is args[0]) for x in here):
            raise RuntimeError(f"{name}: tensors on cuda:0 and on the cpu")
    if (
        func in (Tensor.__getitem__, Tensor.__setitem__)
        and not isinstance(args[0], OnGpu)
        and any(isinstance(x, OnGpu) for x in tree_flatten(args[1])[0])
    ):
        raise RuntimeError("indices on cuda:0 of a tensor on the cpu")
    target = _device(kwargs.get("device"))
    if func is Tensor.to:
        for arg in args[1:]:
            target = _device(arg) or target
    if func is Tensor.cpu:
        target = torch.device("cpu")
    on_gpu = bool(gpu) if target is None else target.type == "cuda"

    def bare(x: Any) -> Any:
        if isinstance(x, OnGpu):
            return x.as_subclass(Tensor)
        # A copy to the GPU never shares memory with what was copied, so nor may the pretence.
        return "cpu" if isinstance(x, torch.device) and func is not torch.device else x

    with torch._C.DisableTorchFunction():
        bare_args = tree_map(bare, args)
        bare_kwargs = {k: bare(v) for k, v in kwargs.items() if k != "pin_memory"}
        if "device" in kwargs and target is not None:
            bare_kwargs["device"] = "cpu"
        if func is torch.mm and "out_dtype" in kwargs:
            a, b = bare_args
            assert a.dtype == b.dtype
            result = a.to(kwargs["out_dtype"]) @ b.to(kwargs["out_dtype"])
        else:
            result = func(*bare_args, **bare_kwargs)
        moved = target is not None and tensors and on_gpu != bool(gpu)
        if moved and isinstance(result, Tensor):
            result = result.clone()
        if (written or func is Tensor.__setitem__) and isinstance(result, Tensor):
            return args[0]
        if isinstance(kwargs.get("out"), Tensor):
            return kwargs["out"]
        if not on_gpu:
            return result
        return tree_map(lambda x: x.as_subclass(OnGpu) if isinstance(x, Tensor) else x, result)


@contextmanager
def pretend_gpu(free: int = 1 << 40) -> Iterator[torch.device]:
    """Inside, `cuda` exists: one GPU with so many free bytes."""
    nothing = mock.MagicMock()
    patches = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda *_: (free, free),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "get_device_capability": lambda *_: (9, 0),
        "device": lambda *_: nothing,
        "Event": lambda *_, **__: nothing,
        "current_stream": lambda *_: nothing,
        "synchronize": lambda *_: None,
    }
    generator = mock.patch.object(torch, "Generator", _Generator)
    with mock.patch.multiple(torch.cuda, **patches), generator, _Everything():
        yield DEVICE
