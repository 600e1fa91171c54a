"""How long work takes on a GPU: captured once, replayed, timed by the device's own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

Replay = Callable[[], object]

_LEAD = 2_000_000  # clock cycles that the GPU sleeps while the host queues a replay


def captured(work: Callable[[], object], device: torch.device) -> Replay:
    """The work as a graph, compiled and run once before; what comes back replays it."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph.replay


def replay_seconds(replay: Replay) -> float:
    """Of one replay on the current device.

    The GPU sleeps until the host has queued everything, so the host's time does not count.
    """
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_LEAD)
    begun.record()
    replay()
    ended.record()
    ended.synchronize()
    milliseconds: float = begun.elapsed_time(ended)
    return milliseconds / 1e3
