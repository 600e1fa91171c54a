"""Small inputs of a step, written on the host and sent to the device in one piece."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes


class Staging:
    """Named arrays in one block of memory: pinned on the host, and its copy on the device.

    device: tensors that hold what was written at the last `send`, at fixed addresses.
    """

    def __init__(
        self, device: torch.device, fields: dict[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        """fields: name -> shape and dtype."""
        places: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            places[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)

        def views(block: Tensor) -> dict[str, Tensor]:
            found = {}
            for name, (shape, dtype) in fields.items():
                length = torch.Size(shape).numel() * dtype.itemsize
                found[name] = block[places[name] : places[name] + length].view(dtype).view(shape)
            return found

        self._views: dict[str, NDArray[Any]] = {k: v.numpy() for k, v in views(self._host).items()}
        self._sent = None
        if device.type == "cuda":
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.device = views(self._device)

    def host(self) -> dict[str, NDArray[Any]]:
        """NumPy views to write into (an assignment through NumPy takes a tenth of torch's time).

        Waits until the last `send` is through, which reads the same memory.
        """
        if self._sent is not None:
            self._sent.synchronize()
        return self._views

    def send(self) -> None:
        """Copy everything in the order of the current stream."""
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
