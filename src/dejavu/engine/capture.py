"""Forwards that repeat without Python: as CUDA graphs, or run anew where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.device import on
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps

Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
"""From a forward to what repeats it: reads the same inputs, returns logits fp32 `[bucket, V]`."""


class CudaGraphs:
    """Captures forwards into CUDA graphs that share one pool of memory.

    They may: no replay leaves anything behind but the results, which stay referenced, and replays
    run one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, forward: Replay) -> Replay:
        with on(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # Once outside of the capture: kernels are compiled and tuned, workspaces made.
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                forward()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads (a server loads, or answers on another GPU) may go on meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def capture_for(ops: Ops, device: torch.device) -> Capture | None:
    """How steps of these ops are captured; None: they are not (plain PyTorch waits for the device).

    Without a GPU a forward stands for its graph: it runs again, over the same padded rows.
    """
    if isinstance(ops, TorchOps):
        return None
    return CudaGraphs(device) if device.type == "cuda" else lambda forward: forward
