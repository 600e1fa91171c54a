"""Measure what a model's MLP costs on the device at hand: see `costs.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from dejavu.kernels.device import on
from dejavu.kernels.gpu.costs import BUCKETS, MLPCost, key
from dejavu.kernels.gpu.ops import TritonOps
from dejavu.kernels.gpu.timing import captured, replay_seconds
from dejavu.kernels.gpu.tune import Shape
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.selection import Selection

SHARES = (0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
_REPEATS = 7
_COLD = 4  # times the last-level cache that is read between two uses of a byte
_MOST_LAYERS = 32
_RELU = Activation("relu")

Timer = Callable[[Callable[[], object]], float]
"""Seconds that some work takes on the device."""


def measure_costs(
    shape: Shape,
    ops: TritonOps,
    dtype: torch.dtype,
    *,
    rows: Sequence[int] = BUCKETS,
    shares: Sequence[float] = SHARES,
    rank: int,
    timer: Timer | None = None,
    cache: int | None = None,
    progress: Callable[[str, MLPCost], None] | None = None,
) -> dict[str, MLPCost]:
    """The cost of one MLP by `costs.key`, out of memory: calls rotate over distinct layers.

    ops: cut as they will run. All listed neurons are active, which is the worst case. timer, cache:
    default, the device's own clock and last-level cache in bytes. rank: of predictors. progress
    gets each entry as soon as it is measured.
    """
    device = ops.device
    timer = _timer(device) if timer is None else timer
    if cache is None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    found: dict[str, MLPCost] = {}
    with on(device):
        layers = _Layers(shape, device, dtype, _COLD * cache, min(shares))
        for batch in rows:
            whole = timer(layers.work(ops, batch, None))
            listed = [(s, timer(layers.work(ops, batch, s))) for s in sorted(shares)]
            choosing = timer(layers.choosing(ops, batch, rank))
            name = key(batch, shape.neurons, shape.hidden_size, dtype.itemsize, gated=shape.gated)
            each = 1e6 / len(layers.ups)
            found[name] = MLPCost(
                whole * each, tuple((s, t * each) for s, t in listed), choosing * each
            )
            if progress is not None:
                progress(name, found[name])
    return found


class _Layers:
    """Random MLPs, as many as it takes to read `cold` bytes at the smallest share."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, cold: int, share: float
    ) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype
        matrices = 3 if shape.gated else 2
        size = shape.neurons * shape.hidden_size * dtype.itemsize
        count = min(max(2, int(-(-cold // (matrices * share * size)))), _MOST_LAYERS)

        def made() -> list[Matrix]:
            weights = (
                torch.empty(shape.neurons, shape.hidden_size, device=device, dtype=dtype)
                for _ in range(count)
            )
            return [Matrix(weight.normal_(0.0, 0.02)) for weight in weights]

        self.ups, self.downs = made(), made()
        self.gates = made() if shape.gated else [None] * count
        self._bias = torch.full((shape.neurons,), 8.0, device=device)  # everything is active

    def work(self, ops: TritonOps, rows: int, share: float | None) -> Callable[[], object]:
        """All layers once, with such a share of the neurons listed for all rows together; None:
        with everything."""
        shape, device = self._shape, self._device
        x = torch.randn(rows, shape.hidden_size, device=device).to(self._dtype)
        residual = torch.randn(rows, shape.hidden_size, device=device)
        lists = [None if share is None else self._selection(rows, share) for _ in self.ups]

        def run() -> None:
            for up, gate, down, chosen in zip(self.ups, self.gates, self.downs, lists, strict=True):
                second = None if gate is None else Projection(gate)
                ops.mlp(x, Projection(up, self._bias), second, down, None, _RELU, chosen, residual)

        return run

    def choosing(self, ops: TritonOps, rows: int, rank: int) -> Callable[[], object]:
        """A predictor for every layer, counted as in a step."""
        shape, device = self._shape, self._device

        def codes(entries: int, width: int) -> list[Matrix]:
            size, scale = (entries, width), torch.ones(entries, device=device)
            made = (
                torch.randint(-127, 128, size, dtype=torch.int8, device=device) for _ in self.ups
            )
            return [Matrix(data, scale) for data in made]

        firsts, seconds = codes(rank, shape.hidden_size), codes(shape.neurons, rank)
        x = torch.randn(rows, shape.hidden_size, device=device).to(self._dtype)
        bias = torch.full((shape.neurons,), -93.0 * rank**0.5, device=device)
        out = Selection.empty(shape.neurons, rows, device=device)
        counter = torch.zeros(3, dtype=torch.int64, device=device)

        def run() -> None:
            for first, second in zip(firsts, seconds, strict=True):
                (hidden,) = ops.linear(x, [Projection(first)])
                ops.tally(ops.select(hidden, second, bias, out=out), rows, counter)

        return run

    def _selection(self, rows: int, share: float) -> Selection:
        density = 1.0 - (1.0 - share) ** (1.0 / rows)
        mask = torch.rand(rows, self._shape.neurons, device=self._device) < density
        return Selection.from_mask(mask)


def _timer(device: torch.device) -> Timer:
    def seconds(work: Callable[[], object]) -> float:
        replay = captured(work, device)
        replay()
        return statistics.median(replay_seconds(replay) for _ in range(_REPEATS))

    return seconds
