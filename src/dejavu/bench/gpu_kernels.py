"""The MLP of one layer on a GPU: ours, dense and sparse, cuBLAS, and a gather with a product.

Everything runs from CUDA graphs of some dozens of calls. As on the CPU (`kernels.py`), calls rotate
over distinct layers, so that at least 4 times the last-level cache is read between two uses of a
byte, and every call of a replay has a fresh random selection. All selected neurons are active.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu.bench.backend import Backend, open_backend
from dejavu.bench.forced import gpu_rank
from dejavu.bench.gpu_stack import Draw, Stack
from dejavu.bench.kernels import MLPShape
from dejavu.bench.machine import Machine, Origin, origin
from dejavu.bench.spread import Spread
from dejavu.errors import InputError
from dejavu.kernels.device import on
from dejavu.kernels.matrix import WEIGHT_DTYPES
from dejavu.kernels.ops import Activation, Ops, Projection
from dejavu.kernels.selection import Selection

_REPLAYS = 4  # in a turn, each with selections of its own
_MOST_BYTES = 40 << 30  # of all layers together
_RELU = Activation("relu")
_GATHER = "index_select"


@dataclass(frozen=True)
class GPUKernelResult:
    """One way to compute the MLP of one row at one density (1: of everything).

    name: dense, sparse (the selection is given), sparse with selection (a predictor makes it, in
    the same time), cuBLAS in each layout of the weights, index_select. us: of a call, out of
    memory, mean of a replay; warm_us: of the same layer and selection again and again. layers: that
    the cold calls rotate over. bytes: that a call has to read (`index_select` copies them besides).
    faster_than: others' time over this one's, of the best cuBLAS layout, of our dense kernel and of
    index_select at the same density. cold: whether `us` means memory.
    """

    name: str
    density: float
    layers: int
    us: Spread
    warm_us: Spread
    bytes: float
    gb_per_second: float
    of_bandwidth: float
    faster_than: dict[str, float]
    cold: bool


@dataclass(frozen=True)
class GPUKernelBench:
    """All ways for one shape in one run. rank: of the int8 predictor. cuts: of our kernels,
    see `kernels.gpu.tuning`."""

    shape: MLPShape
    dtype: str
    device: str
    rows: int
    rank: int
    calls: int
    repeats: int
    read_bandwidth: float
    results: list[GPUKernelResult]
    cuts: dict[str, list[int]]
    machine: Machine
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            **asdict(self),
            "machine": self.machine.to_json(),
            "origin": self.origin.to_json(),
        }


def bench_mlp_on_gpu(
    shape: MLPShape,
    densities: Sequence[float] = (0.05, 0.1, 0.2, 0.5),
    *,
    device: torch.device,
    dtype: str = "fp16",
    rank: int | None = None,
    repeats: int = 5,
    seed: int = 0,
    backend: Backend | None = None,
) -> GPUKernelBench:
    """Time an ungated MLP for one row. backend: default, the device's.

    Raises InputError for a gate, or a density outside of (0, 1).
    """
    if shape.gated:
        raise InputError("kernels are compared with cuBLAS for MLPs without a gate only")
    for density in densities:
        if not 0.0 < density < 1.0:
            raise InputError(f"a density must lie in (0, 1), not {density:g}")
    started = origin()
    kind = WEIGHT_DTYPES[dtype]
    backend = open_backend(device, kind) if backend is None else backend
    rank = gpu_rank(shape.hidden_size) if rank is None else rank
    cache = backend.machine.last_level_cache
    with on(device):
        torch.manual_seed(seed)
        row = shape.hidden_size * kind.itemsize
        dense_bytes = 2 * shape.intermediate_size * row
        affordable = max(1, _MOST_BYTES // dense_bytes)
        needed = 1 + -(-4 * cache // round(min((*densities, 1.0)) * dense_bytes))
        stack = Stack(shape, min(needed, affordable), kind, rank, device)
        arms = _dense_arms(stack, backend.ops, cache)
        draws = [Draw(stack, density) for density in densities]
        for draw in draws:
            arms += _sparse_arms(stack, draw, backend.ops, cache)
        bandwidth = _take_turns(arms, draws, backend, repeats)
    return GPUKernelBench(
        shape,
        dtype,
        str(device),
        1,
        rank,
        stack.calls,
        repeats,
        bandwidth,
        [_result(arm, arms, bandwidth, cache) for arm in arms],
        backend.cuts,
        backend.machine,
        started,
    )


Call = Callable[[int, int], Tensor]  # number of the call, number of the layer


class _Arm:
    """One way, captured cold and warm."""

    def __init__(
        self,
        name: str,
        stack: Stack,
        call: Call,
        nbytes: float,
        cache: int,
        draw: Draw | None = None,
        layers: int | None = None,
        count: Callable[[], float] | None = None,
    ) -> None:
        """nbytes: that a call reads, as asked for. layers: that there are for it; default: all.
        count: the bytes that a call of the last replay has read."""
        self.name, self.draw, self.nbytes = name, draw, nbytes
        self.density = 1.0 if draw is None else draw.density
        available = stack.layers if layers is None else layers
        self.layers = min(available, 1 + -(-4 * cache // round(nbytes)))
        self.calls = stack.calls
        self._call = call  # a graph does not keep alive what it reads
        self._count, self._counted = count, list[float]()
        self.us: list[float] = []
        self.warm_us: list[float] = []

        def cold() -> Tensor:
            return [call(i, i % self.layers) for i in range(self.calls)][-1]

        def warm() -> Tensor:
            return [call(0, 0) for _ in range(self.calls)][-1]

        self._cold, self._warm = stack.timer(cold), stack.timer(warm)

    @property
    def bytes(self) -> float:
        """That a call has read."""
        return fmean(self._counted) if self._counted else self.nbytes

    def run(self) -> None:
        """One replay cold, one warm."""
        self.us.append(1e6 * self._cold() / self.calls)
        if self._count is not None:
            self._counted.append(self._count())
        self.warm_us.append(1e6 * self._warm() / self.calls)


def _dense_arms(stack: Stack, ops: Ops, cache: int) -> list[_Arm]:
    """Ours, and cuBLAS with each of up and down by rows (as ours) or by columns."""

    def ours(call: int, layer: int) -> Tensor:
        up = Projection(stack.up[layer], stack.bias)
        down = stack.down[layer]
        return ops.mlp(stack.x[call], up, None, down, None, _RELU, None, stack.residual)

    nbytes = stack.mlp_bytes(stack.neurons)
    arms = [_Arm("dense", stack, ours, nbytes, cache)]
    count = arms[0].layers  # transposed copies of no more layers than cold calls need
    ups = {"rows": [m.data.t() for m in stack.up[:count]]}
    downs = {"rows": [m.data for m in stack.down[:count]]}
    ups["columns"] = [m.contiguous() for m in ups["rows"]]
    downs["columns"] = [m.t().contiguous().t() for m in downs["rows"]]
    for up_layout, up in ups.items():
        for down_layout, down in downs.items():

            def cublas(
                call: int, layer: int, up: list[Tensor] = up, down: list[Tensor] = down
            ) -> Tensor:
                a = F.relu(torch.mm(stack.x[call], up[layer]))
                return torch.mm(a, down[layer])

            name = f"cuBLAS, up by {up_layout}, down by {down_layout}"
            arms.append(_Arm(name, stack, cublas, nbytes, cache, layers=count))
    return arms


def _sparse_arms(stack: Stack, draw: Draw, ops: Ops, cache: int) -> list[_Arm]:
    """Ours with a given and with a predicted selection, and a gather with a product."""

    def mlp(call: int, layer: int, selection: Selection) -> Tensor:
        up = Projection(stack.up[layer], stack.bias)
        down = stack.down[layer]
        return ops.mlp(stack.x[call], up, None, down, None, _RELU, selection, stack.residual)

    def given(call: int, layer: int) -> Tensor:
        return mlp(call, layer, draw.given[call])

    def predicted(call: int, layer: int) -> Tensor:
        (hidden,) = ops.linear(stack.x[call], [Projection(stack.first[layer])])
        out = draw.predicted[call]
        ops.select(hidden, stack.second[layer], draw.biases[layer], out=out)
        return mlp(call, layer, out)

    def gather(call: int, layer: int) -> Tensor:
        chosen = draw.indices[call]
        a = torch.mm(stack.x[call], stack.up[layer].data.index_select(0, chosen).t())
        return torch.mm(F.relu(a), stack.down[layer].data.index_select(0, chosen))

    def count() -> float:
        return stack.mlp_bytes(draw.predicted_neurons()) + stack.predictor_bytes

    nbytes = stack.mlp_bytes(draw.kept)
    both = nbytes + stack.predictor_bytes
    return [
        _Arm("sparse", stack, given, nbytes, cache, draw),
        _Arm("sparse with selection", stack, predicted, both, cache, draw, count=count),
        _Arm(_GATHER, stack, gather, nbytes, cache, draw),
    ]


def _take_turns(
    arms: Sequence[_Arm], draws: Sequence[Draw], backend: Backend, repeats: int
) -> float:
    """Run all arms again and again; returns the best read bandwidth met on the way, GB/s."""
    bandwidth = 0.0
    for _ in range(repeats):
        bandwidth = max(bandwidth, backend.read_bandwidth())
        for _ in range(_REPLAYS):
            for draw in draws:
                draw.fresh()
            for arm in arms:
                arm.run()
    return bandwidth


def _result(arm: _Arm, arms: Sequence[_Arm], bandwidth: float, cache: int) -> GPUKernelResult:
    us = Spread.of(arm.us)
    rate = arm.bytes / us.median / 1e3
    against = {
        "cuBLAS": [a for a in arms if a.name.startswith("cuBLAS")],
        "dense": [a for a in arms if a.name == "dense"],
        _GATHER: [a for a in arms if a.name == _GATHER and a.draw is arm.draw],
    }
    return GPUKernelResult(
        name=arm.name,
        density=arm.density,
        layers=arm.layers,
        us=us,
        warm_us=Spread.of(arm.warm_us),
        bytes=arm.bytes,
        gb_per_second=rate,
        of_bandwidth=rate / bandwidth,
        faster_than={
            name: min(Spread.of(a.us).median for a in others) / us.median
            for name, others in against.items()
            if others
        },
        cold=(arm.layers - 1) * arm.bytes >= 4 * cache,
    )
