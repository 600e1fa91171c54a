"""The streaming sum reads everything once, and its time is a rate."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from dejavu.kernels.gpu.bandwidth import ReadBandwidth, stream_sum_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("programs", [1, 3])
def test_the_sum_is_of_everything(programs):
    x = torch.arange(5 * 64, device=DEVICE).remainder(7).half()
    sums = torch.full((programs,), torch.nan, device=DEVICE)
    stream_sum_kernel[(programs,)](x, sums, 5, BLOCK=64, STAGES=3)
    assert sums.sum().item() == x.float().sum().item()


def test_measures():
    memory = ReadBandwidth(DEVICE, 1 << 15)
    assert memory.nbytes == 1 << 15
    assert memory.measure(1) > 0


@pytest.mark.cuda
def test_a_gpu_reads_within_its_abilities():
    rate = ReadBandwidth(DEVICE, 1 << 30).measure()
    assert 100 < rate < 20_000  # GB/s: more would not come from memory
