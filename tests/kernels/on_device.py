"""Ops on a device for tests that build their tensors on the CPU, and cuts of their work."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.gpu.ops import TritonOps
from dejavu.kernels.gpu.tuning import Config, Tuning


class OnDevice:
    """Calls an `Ops` with copies of all arguments on its device, and brings back what it did.

    Whole storages travel: a view arrives as the same view (strides, offset, overlap), tensors that
    share memory still do, and whatever a kernel wrote comes back, asked for or not. Where the
    device is the CPU nothing is copied.
    """

    def __init__(self, ops: TritonOps) -> None:
        self.ops = ops
        self.device = ops.device

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            journey = _Journey(self.device)
            result = method(
                *map(journey.out, args), **{k: journey.out(v) for k, v in kwargs.items()}
            )
            journey.copy_back()
            return journey.back(result)

        return call


class _Journey:
    """One call's copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}  # bytes here, bytes there
        self.moved: list[tuple[Any, Any]] = []

    def out(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if is_dataclass(value) and not isinstance(value, type):
            there = replace(
                value, **{f.name: self.out(getattr(value, f.name)) for f in fields(value)}
            )
            self.moved.append((there, value))
            return there
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.out, value))
        return [self.out(v) for v in value] if isinstance(value, list) else value

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[key] = here, here.to(self.device)
        there = self.storages[key][1].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype, device=self.device).set_(
            there, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def copy_back(self) -> None:
        for here, there in self.storages.values():
            here.copy_(there)

    def back(self, value: Any) -> Any:
        for there, here in self.moved:
            if value is there:
                return here
        if isinstance(value, Tensor):
            return value.cpu()
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{f.name: self.back(getattr(value, f.name)) for f in fields(value)}
            )
        return [self.back(v) for v in value] if isinstance(value, list) else value


class Cut(Tuning):
    """Every kernel cut the same way. parts: programs that share a tile; shares: of a sum; splits:
    of a sequence in attention. The default makes few programs, each with few steps."""

    def __init__(
        self, block: int = 64, width: int = 512, parts: int = 1, shares: int = 2, splits: int = 2
    ) -> None:
        super().__init__(processors=4)
        self.config = Config(block, width, 1, 4, parts)
        self.shares, self.pieces = shares, splits

    def project(self, *shape: Any) -> Config:
        return self.config

    def up(self, *shape: Any) -> Config:
        return self.config

    def sums(self, *shape: Any) -> Config:
        return self.config._replace(shares=self.shares)

    def select(self, *shape: Any) -> Config:
        return self.config

    def lazy(self, *shape: Any) -> Config:
        return self.config._replace(block=16)

    def attention(self, *shape: Any) -> Config:
        return self.config._replace(block=32, shares=self.pieces)
