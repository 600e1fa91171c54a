"""How fast a GPU's memory can be read: what every decode step is measured against."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dejavu.kernels.device import on

_PASSES = 4  # over the memory in one timing
_LEAD = 2_000_000  # clock cycles that the GPU sleeps while the host queues the passes


class _Cut(NamedTuple):
    block: int
    stages: int
    warps: int
    programs: int  # a multiprocessor


# The best of a dozen on an H200, and two for devices that prefer smaller programs.
_CUTS = (_Cut(8192, 3, 8, 4), _Cut(4096, 3, 8, 4), _Cut(4096, 4, 4, 8))


@triton.jit
def stream_sum_kernel(x, sums, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Each program adds up every n-th block of x, n being the number of programs."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.arange(0, BLOCK).to(tl.int64)
    for block in tl.range(program, blocks, tl.num_programs(0), num_stages=STAGES):
        total += tl.load(x + (place + tl.cast(block, tl.int64) * BLOCK)).to(tl.float32)
    tl.store(sums + program, tl.sum(total, axis=0))


class ReadBandwidth:
    """Measures again and again over the same memory, which it holds."""

    def __init__(self, device: torch.device, size: int) -> None:
        """size: bytes to read; well above any cache."""
        self._device = device
        largest = max(cut.block for cut in _CUTS)
        count = max(1, size // 2 // largest) * largest
        # Random numbers, a piece again and again: zeros would draw less power than weights do.
        piece = torch.randn(min(count, 1 << 24), device=device, dtype=torch.float16)
        self._memory = piece.repeat(-(-count // len(piece)))[:count]
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = [cut.programs * processors for cut in _CUTS]
        self._sums = torch.empty(max(self._programs), device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        return self._memory.nbytes

    def measure(self, repeats: int = 3) -> float:
        """The best rate in GB/s of all kernels and repeats."""
        with on(self._device):
            seconds = [
                self._seconds(cut, programs)
                for _ in range(repeats)
                for cut, programs in zip(_CUTS, self._programs, strict=True)
            ]
        return self.nbytes / min(seconds) / 1e9

    def _seconds(self, cut: _Cut, programs: int) -> float:
        """Of one pass."""

        def one() -> None:
            stream_sum_kernel[(programs,)](
                self._memory, self._sums, len(self._memory) // cut.block,
                BLOCK=cut.block, STAGES=cut.stages, num_warps=cut.warps,
            )  # fmt: skip

        one()  # compiled, and on its way
        if self._device.type != "cuda":
            started = perf_counter()
            one()
            return perf_counter() - started
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_LEAD)
        begun.record()
        for _ in range(_PASSES):
            one()
        ended.record()
        ended.synchronize()
        seconds: float = begun.elapsed_time(ended) / 1e3
        return seconds / _PASSES
