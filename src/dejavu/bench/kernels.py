"""The MLP of one layer alone: dense, and sparse at given densities, out of memory and out of cache.

The cold figures rotate over distinct layers, so that at least 4 times the last-level cache is read
between two uses of a byte, and every use of a layer has a fresh random selection. All listed
neurons are active here: a density says what share of up, gate and down rows is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from dejavu.bench.machine import Machine, Origin, origin, this_machine
from dejavu.bench.spread import Spread
from dejavu.errors import InputError
from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.kernels.native import NativeOps, Program, measure_read_bandwidth
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.selection import Selection

_MOST_BYTES = 3 << 30  # of all layers together
_BLOCK_BYTES = 16 << 20  # of random data, repeated: what the numbers are costs no time
_RELU = Activation("relu")


@dataclass(frozen=True)
class MLPShape:
    """hidden_size D and intermediate_size F of a layer, with or without a gate."""

    hidden_size: int
    intermediate_size: int
    gated: bool = False

    def matrix_count(self) -> int:
        """Matrices `[F, D]`."""
        return 3 if self.gated else 2


@dataclass(frozen=True)
class KernelResult:
    """One density; 1 is the dense kernel, which has no selection.

    us: of one call, out of memory; warm_us: of one layer and selection again and again, out of
    cache where they fit. layers: that the cold calls rotated over. bytes: that a call read.
    of_bandwidth: achieved GB/s over measured ones. speedup: dense over this, both cold.
    cold: whether enough was read between two uses of a byte for `us` to mean memory.
    """

    density: float
    layers: int
    us: Spread
    warm_us: Spread
    bytes: int
    gb_per_second: float
    of_bandwidth: float
    speedup: float
    cold: bool


@dataclass(frozen=True)
class KernelBench:
    """All densities of one shape in one run."""

    shape: MLPShape
    dtype: str
    threads: int
    isa: str
    rows: int
    repeats: int
    read_bandwidth: float
    results: list[KernelResult]
    machine: Machine
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            **asdict(self),
            "machine": self.machine.to_json(),
            "origin": self.origin.to_json(),
        }


def bench_mlp(
    shape: MLPShape,
    densities: Sequence[float] = (0.05, 0.1, 0.2, 0.5),
    *,
    dtype: str = "bf16",
    threads: int | None = None,
    isa: str | None = None,
    repeats: int = 7,
    seed: int = 0,
) -> KernelBench:
    """Time the MLP kernel for one row. Raises InputError for a density outside of (0, 1]."""
    for density in densities:
        if not 0.0 < density <= 1.0:
            raise InputError(f"a density must lie in (0, 1], not {density:g}")
    started, machine, ops = origin(), this_machine(), NativeOps(threads, isa)
    generator = torch.Generator().manual_seed(seed)
    wanted = [1.0, *(d for d in densities if d != 1.0)]
    cache = machine.last_level_cache
    runs = [_Rotation(shape, density, dtype, cache, generator) for density in wanted]
    most = max(run.layers for run in runs)
    layers = _layers(shape, most, dtype, generator)
    cold = [run.program(ops, layers[: run.layers]) for run in runs]
    warm = [run.program(ops, [layers[0]] * run.layers) for run in runs]
    bandwidth = 0.0
    cold_us: list[list[float]] = [[] for _ in runs]
    warm_us: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        size = max(1 << 28, 8 * cache)
        bandwidth = max(bandwidth, measure_read_bandwidth(ops.threads, size=size, repeats=2))
        for place, run in enumerate(runs):
            run.draw()
            cold_us[place].append(_microseconds(cold[place]) / run.layers)
            run.repeat_first()
            warm[place].run()
            warm_us[place].append(_microseconds(warm[place]) / run.layers)
    dense_us = Spread.of(cold_us[0]).median
    results = []
    for run, cold_times, warm_times in zip(runs, cold_us, warm_us, strict=True):
        spread = Spread.of(cold_times)
        rate = run.bytes / spread.median / 1e3
        results.append(
            KernelResult(
                density=run.density,
                layers=run.layers,
                us=spread,
                warm_us=Spread.of(warm_times),
                bytes=run.bytes,
                gb_per_second=rate,
                of_bandwidth=rate / bandwidth,
                speedup=dense_us / spread.median,
                cold=(run.layers - 1) * run.bytes >= 4 * cache,
            )
        )
    return KernelBench(
        shape, dtype, ops.threads, ops.isa, 1, repeats, bandwidth, results, machine, started
    )


@dataclass(frozen=True, eq=False)
class _Layer:
    up: Projection
    gate: Projection | None
    down: Matrix


class _Rotation:
    """One density: how many layers its calls rotate over, and their selections."""

    def __init__(
        self, shape: MLPShape, density: float, dtype: str, cache: int, generator: torch.Generator
    ) -> None:
        neurons = shape.intermediate_size
        self.density = density
        self._kept = max(1, round(density * neurons))
        self._neurons = neurons
        self._hidden = shape.hidden_size
        self._generator = generator
        row = shape.hidden_size * WEIGHT_DTYPES[dtype].itemsize + (4 if dtype == "int8" else 0)
        biases = 4 * (shape.matrix_count() - 1)
        self.bytes = self._kept * (shape.matrix_count() * row + biases)
        affordable = max(1, _MOST_BYTES // (neurons * shape.matrix_count() * row))
        self.layers = min(1 + -(-4 * cache // self.bytes), affordable)
        self._selections = [Selection.empty(neurons, 1) for _ in range(self.layers)]

    def draw(self) -> None:
        """A fresh random selection for every layer, in the place of the old."""
        for selection in self._selections:
            mask = torch.zeros(1, self._neurons, dtype=torch.bool)
            chosen = torch.randperm(self._neurons, generator=self._generator)[: self._kept]
            mask[0, chosen] = True
            _replace(selection, Selection.from_mask(mask))

    def repeat_first(self) -> None:
        """The first layer's selection everywhere."""
        for selection in self._selections[1:]:
            _replace(selection, self._selections[0])

    def program(self, ops: NativeOps, layers: Sequence[_Layer]) -> Program:
        """A call for each of the layers, one after the other, on one input."""
        recorder = ops.recorder()
        x = torch.randn(1, self._hidden, generator=self._generator)
        for layer, selection in zip(layers, self._selections, strict=True):
            chosen = None if self.density == 1.0 else selection
            recorder.mlp(x, layer.up, layer.gate, layer.down, None, _RELU, chosen, None)
        return recorder.program


def _replace(old: Selection, new: Selection) -> None:
    old.indices.copy_(new.indices)
    old.counts.copy_(new.counts)


def _layers(shape: MLPShape, count: int, dtype: str, generator: torch.Generator) -> list[_Layer]:
    """Layers of random weights, whose biases keep every activation above 0."""
    matrices = _matrices(shape, dtype, generator)
    high = torch.full((shape.intermediate_size,), 1e4)
    made = []
    for _ in range(count):
        up = Projection(next(matrices), high)
        gate = Projection(next(matrices), high) if shape.gated else None
        made.append(_Layer(up, gate, next(matrices)))
    return made


def _matrices(shape: MLPShape, dtype: str, generator: torch.Generator) -> Iterator[Matrix]:
    """Distinct random matrices `[F, D]` without end."""
    size = (shape.intermediate_size, shape.hidden_size)
    elements = size[0] * size[1]
    block = torch.randint(-127, 128, (_BLOCK_BYTES,), dtype=torch.int8, generator=generator)
    while True:
        data = torch.empty(elements, dtype=WEIGHT_DTYPES[dtype])
        for start in range(0, elements, len(block)):
            part = data[start : start + len(block)]
            part.copy_(block[: len(part)])
        scale = torch.full(size[:1], 3e-4) if dtype == "int8" else None
        yield Matrix(data.view(size), scale)


def _microseconds(program: Program) -> float:
    started = perf_counter()
    program.run()
    return 1e6 * (perf_counter() - started)
