"""How long a decode step's parts take here, so that a plan never runs sparse where dense is faster.

Times are lines in the bytes read, fitted to a few runs of the compiled kernels over all layers in
turn: one for neurons chosen by number, one for predictors.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import BackendError
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import NativeOps
from dejavu.kernels.nibbles import Nibbles
from dejavu.kernels.ops import Projection
from dejavu.kernels.selection import Selection
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import BLOCK_SIZE
from dejavu.predictor.curve import Figures
from dejavu.predictor.network import Predictor
from dejavu.predictor.search import Candidate, Place
from dejavu.sparsity.accounting import neuron_bytes
from dejavu.sparsity.policy import Dense, Site

_DENSITIES = (0.05, 0.15, 0.4, 1.0)
_RANKS = (16, 128)
_REPEATS, _MOST_REPEATS = 7, 400
_LEAST_NS = 200_000_000
_BUSY = 1.5  # median over best: on an idle machine it is under 1.1
_CONTEXT = 8 * BLOCK_SIZE  # tokens in the cache of the step that is timed


@dataclass(frozen=True)
class Line:
    """ns = start + slope * bytes."""

    start: float
    slope: float

    @staticmethod
    def through(points: Sequence[tuple[float, float]]) -> Line:
        """Least squares over (bytes, ns), start and slope at least 0."""
        x, y = (torch.tensor(v, dtype=torch.float64) for v in zip(*points, strict=True))
        spread = (x - x.mean()).square().sum()
        slope = 0.0
        if float(spread) > 0:
            slope = max(float(((x - x.mean()) * (y - y.mean())).sum() / spread), 0.0)
        return Line(max(float(y.mean()) - slope * float(x.mean()), 0.0), slope)

    def at(self, size: float) -> float:
        """ns for so many bytes."""
        return self.start + self.slope * size


@dataclass(frozen=True)
class StepTimes:
    """Nanoseconds of one token. step: the whole dense step. mlp: dense, of one layer. rows: what a
    layer's MLP takes with a selection, by bytes read. predictor: both stages of one, by its bytes.
    """

    step: float
    mlp: float
    rows: Line
    predictor: Line

    @property
    def dense_speed(self) -> float:
        """Tokens/s of one sequence."""
        return self.speed(0.0)

    def speed(self, saved: float) -> float:
        """Tokens/s when so many ns of a step are saved."""
        return 1e9 / max(self.step - saved, 1.0)

    def dense(self, place: Place) -> float:
        """Everything computed; heads by the rate of the MLP."""
        if place.key[0] == Site.NEURONS:
            return self.mlp
        return self.rows.slope * place.dense_bytes

    def full(self, place: Place) -> float:
        """Everything listed, zeros skipped."""
        return self.rows.at(place.full_bytes)

    def sparse(self, place: Place, candidate: Candidate, figures: Figures) -> float:
        """Predictor, selection and what it leaves."""
        size = candidate.predictor.nbytes
        rows = place.sparse_bytes(candidate, figures) - size
        own = self.rows.at(rows) if place.key[0] == Site.NEURONS else self.rows.slope * rows
        return self.predictor.at(size) + own


def measured_times(model: DecoderLM, bits: int = 4) -> StepTimes | str:
    """Time the model's own layers on the compiled kernels, or say why that could not be done."""
    if model.device.type != "cpu":
        return f"steps on {model.device} are not timed here"
    try:
        ops = NativeOps(threads=torch.get_num_threads())
    except BackendError:
        return "this installation has no compiled kernels"
    generator = torch.Generator().manual_seed(0)
    layers = len(model.weights.blocks)
    x = torch.randn(1, model.config.hidden_size, generator=generator)
    dense = _times(_mlp(model, ops, x, [None] * layers))
    if statistics.median(dense) > _BUSY * min(dense):
        return "the machine was busy with other work: times of one run differed widely"
    if ops.threads > 1 and min(dense) > _best(
        _mlp(model, NativeOps(threads=1), x, [None] * layers)
    ):
        # Steady times can be steadily wrong: one of two cores taken, an MLP of 57 us took 1 ms.
        return "the machine was busy with other work: all threads were slower than one"
    rows = [_selected(model, ops, x, density, generator) for density in _DENSITIES]
    ranks = [_predicted(model, ops, x, rank, bits, generator) for rank in _RANKS]
    return StepTimes(
        step=_whole_step(model, ops),
        mlp=min(dense) / layers,
        rows=Line.through(rows),
        predictor=Line.through(ranks),
    )


def _selected(
    model: DecoderLM, ops: NativeOps, x: Tensor, density: float, generator: torch.Generator
) -> tuple[float, float]:
    """(bytes, ns) of one layer's MLP at a density of random neurons."""
    c, blocks = model.config, model.weights.blocks
    active = torch.zeros(len(blocks), 1, dtype=torch.int64)
    selections, listed = [], 0
    for count in active:
        mask = torch.rand(1, c.intermediate_size, generator=generator) < density
        listed += int(mask.sum())
        s = Selection.from_mask(mask)
        selections.append(Selection(s.entries, s.indices, s.counts, None, count))
    run = _mlp(model, ops, x, selections)
    run()
    scores, down = neuron_bytes(blocks[0].mlp)
    size = (listed * scores + int(active.sum()) * down) / len(blocks)
    return size, _best(run) / len(blocks)


def _mlp(
    model: DecoderLM, ops: NativeOps, x: Tensor, selections: Sequence[Selection | None]
) -> Callable[[], None]:
    recorder = ops.recorder()
    for block, selection in zip(model.weights.blocks, selections, strict=True):
        mlp = block.mlp
        recorder.mlp(
            x,
            Projection(mlp.up.weight, mlp.up.bias),
            None if mlp.gate is None else Projection(mlp.gate.weight, mlp.gate.bias),
            mlp.down.weight,
            mlp.down.bias,
            model.activation,
            selection,
            None,
        )
    return recorder.program.run


def _predicted(
    model: DecoderLM, ops: NativeOps, x: Tensor, rank: int, bits: int, generator: torch.Generator
) -> tuple[float, float]:
    """(bytes, ns) of choosing one layer's neurons at random through a predictor of some rank."""
    c, layers = model.config, len(model.weights.blocks)
    recorder, size = ops.recorder(), 0
    for _ in range(layers):
        if bits == 4:
            first = Nibbles.from_float(torch.randn(rank, c.hidden_size, generator=generator))
            second = Nibbles.from_float(torch.randn(c.intermediate_size, rank, generator=generator))
            p = Predictor(first, second, torch.full((c.intermediate_size,), -_spread(c, rank)))
            recorder.select_nibbles(x, first, second, p.limits(0.0))
        else:
            one = _random(rank, c.hidden_size, generator)
            two = _random(c.intermediate_size, rank, generator)
            p = Predictor(one, two, torch.full((c.intermediate_size,), -1.0))
            (hidden,) = recorder.linear(x, [Projection(one)])
            recorder.select(hidden, two, p.bias)
        size += p.nbytes
    return size / layers, _best(recorder.program.run) / layers


def _spread(config: ModelConfig, rank: int) -> float:
    """Of the scores of normal inputs by normal weights."""
    return math.sqrt(config.hidden_size * rank)


def _random(rows: int, columns: int, generator: torch.Generator) -> Matrix:
    data = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
    return Matrix(data, torch.full((rows,), 1 / (73 * columns**0.5)))


def _whole_step(model: DecoderLM, ops: NativeOps) -> float:
    context = min(_CONTEXT, model.config.context_length)
    model.prepare(context)
    cache = model.new_cache(context)
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    blocks = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
    batch = Batch(
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([context - 1]),
        blocks,
        torch.tensor([context], dtype=torch.int32),
    )
    recorder: Any = ops.recorder()
    model.forward(batch, cache, Dense(), recorder)
    return _best(recorder.program.run)


def _best(run: Callable[[], None]) -> float:
    """ns of the fastest of many runs: whatever else the machine does only ever adds."""
    return float(min(_times(run)))


def _times(run: Callable[[], None]) -> list[int]:
    """ns of every run; repeated for a while, so that a few escape a short disturbance."""
    times: list[int] = []
    while len(times) < _REPEATS or (sum(times) < _LEAST_NS and len(times) < _MOST_REPEATS):
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return times
