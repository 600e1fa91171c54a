"""What a benchmark runs on: the kernels, the machine, and how fast its memory can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dejavu.bench.machine import Machine, this_machine
from dejavu.errors import InputError
from dejavu.kernels.ops import Ops

_LEAST_READ = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes of a streaming sum; at least 8 caches


@dataclass(frozen=True, eq=False)
class Backend:
    """threads: of the kernels, None on a GPU. isa: instruction set, or `sm_90` on a GPU.
    read_bandwidth: measures anew, GB/s."""

    device: torch.device
    ops: Ops
    threads: int | None
    isa: str
    machine: Machine
    read_bandwidth: Callable[[], float]

    @property
    def cuts(self) -> dict[str, list[int]]:
        """How the GPU's kernels were cut, of all that have run so far; empty on the CPU."""
        asked = getattr(getattr(self.ops, "tuning", None), "asked", {})
        return {key: list(config) for key, config in sorted(asked.items())}


def open_backend(
    device: torch.device,
    dtype: torch.dtype,
    *,
    threads: int | None = None,
    isa: str | None = None,
    machine: Machine | None = None,
    repeats: int = 3,
) -> Backend:
    """The kernels of a device. dtype: of norm outputs on a GPU, see `TritonOps`. threads, isa: of
    CPU kernels. machine: default, `this_machine`. repeats: of each measurement of bandwidth.

    Raises InputError for an option without effect, BackendError where kernels are missing.
    """
    machine = this_machine(device) if machine is None else machine
    size = max(_LEAST_READ[device.type], 8 * machine.last_level_cache)
    if device.type == "cpu":
        from dejavu.kernels.native import NativeOps, measure_read_bandwidth

        ops = NativeOps(threads, isa)

        def measure() -> float:
            return measure_read_bandwidth(ops.threads, size=size, repeats=repeats)

        return Backend(device, ops, ops.threads, ops.isa, machine, measure)
    if threads is not None or isa is not None:
        raise InputError(f"threads and isa are of the CPU kernels; {device} has none of them")
    from dejavu.kernels.gpu.bandwidth import ReadBandwidth
    from dejavu.kernels.gpu.ops import TritonOps

    memory = ReadBandwidth(device, size)
    capability = "gpu" if machine.gpu is None else machine.gpu.capability
    return Backend(
        device,
        TritonOps(device, dtype),
        None,
        capability,
        machine,
        lambda: memory.measure(repeats),
    )
