"""Measure how each kernel is best cut for a model's shapes, on the device at hand.

Every candidate runs in a captured graph over several matrices in turn, so that nothing is read from
the last-level cache that a decode step would not find there.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.kernels.device import on
from dejavu.kernels.gpu import candidates
from dejavu.kernels.gpu.ops import TritonOps
from dejavu.kernels.gpu.timing import captured, replay_seconds
from dejavu.kernels.gpu.tuning import Config, Tuning, read_table
from dejavu.kernels.lazy import RING, DeferredView
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, CacheView, Projection
from dejavu.kernels.selection import Selection

_REPEATS = 9
_COLD = 4  # times the last-level cache that is read between two uses of a byte
_DENSITY, _UNION = 0.1, 0.2  # of selections that listed kernels are measured with: one row, more
_LAZY_ROWS = 4  # steps of more rows do not leave out keys and values


@dataclass(frozen=True)
class Shape:
    """What a decoder's kernels depend on. ranks: of the predictors' bottlenecks."""

    hidden_size: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    gated: bool = False
    ranks: tuple[int, ...] = (64, 128, 256)

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """Of a model."""
        return Shape(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.vocab_size,
            config.gated_mlp,
        )


@dataclass(frozen=True, eq=False)
class Trial:
    """One question: `run(ops)` uses the kernel once a matrix; the configuration that `tuning` is
    asked for under `key` is to be found among candidates."""

    key: str
    candidates: Sequence[Config]
    run: Callable[[TritonOps], object]
    calls: int


def tune(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    only: str = "",
    progress: Callable[[str, Config, float], None] | None = None,
) -> dict[str, Config]:
    """The fastest candidate for every kernel of a decode step of `batch` rows.

    only: those with this in their key.
    progress gets each key as soon as it is measured, with what was chosen for it and the
    microseconds of one call: what it keeps survives an interruption.
    """
    found: dict[str, Config] = {}
    processors = Tuning.of(device).processors
    with on(device):
        for trial in _trials(shape, device, dtype, batch):
            if trial.key in found or only not in trial.key:
                continue
            times = []
            for config in trial.candidates:
                tuning = Tuning(processors, {trial.key: config})
                ops = TritonOps(device, dtype, tuning=tuning)
                times.append((_microseconds(trial, ops), config))
            best, config = min(times)
            if best == float("inf"):
                continue
            found[trial.key] = config
            if progress is not None:
                progress(trial.key, config, best)
    return found


def trials_of(shape: Shape) -> int:
    """Kernels that `tune` asks about at most, for a progress bar."""
    return 11 + 2 * len(shape.ranks)


def write_table(path: Path, device_name: str, table: dict[str, Config]) -> None:
    """Add to a device's table on disk."""
    merged = read_table(path) | table
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"device": device_name, "table": {key: list(merged[key]) for key in sorted(merged)}},
        indent=0,
    )
    aside = path.with_suffix(".new")
    aside.write_text(text + "\n", encoding="utf-8")
    aside.replace(path)


def _microseconds(trial: Trial, ops: TritonOps) -> float:
    """Of one call, the median of some replays; infinite where it does not fit the device
    (registers, shared memory)."""
    try:
        replay = captured(lambda: trial.run(ops), ops.device)
    except Exception as error:
        if "OutOfResources" in type(error).__name__ or "out of resource" in str(error):
            return float("inf")
        raise
    replay()
    seconds = statistics.median(replay_seconds(replay) for _ in range(_REPEATS))
    return seconds * 1e6 / trial.calls


def _trials(shape: Shape, device: torch.device, dtype: torch.dtype, batch: int) -> Iterator[Trial]:
    kind = "1" if batch == 1 else "n"
    itemsize = dtype.itemsize
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    width, neurons, heads = shape.hidden_size, shape.neurons, shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim

    def matrices(rows: int, columns: int, share: float = 1.0) -> list[Matrix]:
        size = rows * columns * itemsize * share
        count = min(max(2, int(-(-_COLD * cache // size))), 48)
        return [
            Matrix(torch.randn(rows, columns, device=device, dtype=dtype) * 0.02)
            for _ in range(count)
        ]

    x = torch.randn(batch, width, device=device).to(dtype)
    residual = torch.randn(batch, width, device=device)
    for outputs, columns, source in (
        (heads + 2 * kv, width, x),
        (heads, width, x),
        (shape.vocab_size, width, x),
    ):
        stored = matrices(outputs, columns)

        def project(ops: TritonOps, stored: list[Matrix] = stored, x: Tensor = source) -> None:
            for matrix in stored:
                ops.linear(x, [Projection(matrix)])

        yield Trial(
            f"project/{kind}/{outputs}x{columns}/{itemsize}",
            candidates.project(batch),
            project,
            len(stored),
        )
    for rank in shape.ranks:
        first = [
            Matrix(
                torch.randint(-127, 128, (rank, width), device=device, dtype=torch.int8),
                torch.ones(rank, device=device),
            )
            for _ in range(64)
        ]

        def predict(ops: TritonOps, stored: list[Matrix] = first) -> None:
            for matrix in stored:
                ops.linear(x, [Projection(matrix)])

        yield Trial(
            f"project/{kind}/{rank}x{width}/1", candidates.project(batch), predict, len(first)
        )
        second = [
            Matrix(
                torch.randint(-127, 128, (neurons, rank), device=device, dtype=torch.int8),
                torch.ones(neurons, device=device),
            )
            for _ in range(32)
        ]
        hidden = torch.randn(batch, rank, device=device)
        bias = torch.full((neurons,), -93.0 * rank**0.5, device=device)
        chosen = Selection.empty(neurons, batch, device=device)

        def select(
            ops: TritonOps, stored: list[Matrix] = second, hidden: Tensor = hidden,
            bias: Tensor = bias, out: Selection = chosen,
        ) -> None:  # fmt: skip
            for matrix in stored:
                ops.select(hidden, matrix, bias, out=out)

        yield Trial(f"select/{kind}/{rank}", candidates.select(batch), select, len(second))
    yield from _mlp_trials(shape, device, batch, kind, itemsize, matrices, x, residual)
    stored = matrices(heads, width)
    y = torch.randn(batch, heads, device=device)

    def combine(ops: TritonOps) -> None:
        for matrix in stored:
            ops.combine(y, matrix, None, None, residual)

    yield Trial(
        f"sums-all/{kind}/{heads}x{width}/{itemsize}",
        candidates.sums(width, batch),
        combine,
        len(stored),
    )
    half = torch.rand(batch, shape.kv_heads, device=device) < 0.5
    some = Selection.from_mask(half)

    def combine_some(ops: TritonOps) -> None:
        for matrix in stored:
            ops.combine(y, matrix, None, some, residual)

    yield Trial(
        f"sums-tiles/{kind}/{heads}x{width}/{itemsize}",
        candidates.sums(width, batch),
        combine_some,
        len(stored),
    )
    yield from _attention_trials(shape, device, dtype, batch)
    if shape.kv_heads == shape.heads and batch <= _LAZY_ROWS:
        yield from _lazy_trials(shape, device, dtype, batch, matrices)


def _mlp_trials(
    shape: Shape,
    device: torch.device,
    batch: int,
    kind: str,
    itemsize: int,
    matrices: Callable[..., list[Matrix]],
    x: Tensor,
    residual: Tensor,
) -> Iterator[Trial]:
    neurons, width = shape.neurons, shape.hidden_size
    bias = torch.full((neurons,), 8.0, device=device)  # every activation is above 0
    relu = Activation("relu")
    for listed in (False, True):
        density = _DENSITY if batch == 1 else _UNION
        share = density if listed else 1.0
        ups = matrices(neurons, width, share)
        downs = ups[1:] + ups[:1]
        lists = [
            Selection.from_mask(torch.rand(batch, neurons, device=device) < density / batch)
            if listed
            else None
            for _ in ups
        ]

        def mlp(
            ops: TritonOps, ups: list[Matrix] = ups, downs: list[Matrix] = downs,
            lists: Sequence[Selection | None] = lists,
        ) -> None:  # fmt: skip
            for up, down, chosen in zip(ups, downs, lists, strict=True):
                gate = Projection(down) if shape.gated else None
                ops.mlp(x, Projection(up, bias), gate, down, None, relu, chosen, residual)

        name = "listed" if listed else "all"
        size = f"{kind}/{neurons}x{width}/{itemsize}"
        yield Trial(f"up-{name}/{size}", candidates.up(batch, listed), mlp, len(ups))
        name = "flat" if listed else "all"
        yield Trial(f"sums-{name}/{size}", candidates.sums(width, batch), mlp, len(ups))


def _attention_trials(
    shape: Shape, device: torch.device, dtype: torch.dtype, batch: int
) -> Iterator[Trial]:
    blocks = 8  # of 32 tokens
    caches = [
        torch.randn(2, blocks * batch, 32, shape.kv_heads, shape.head_dim, device=device).to(dtype)
        for _ in range(24)
    ]
    table = torch.arange(blocks * batch, dtype=torch.int32, device=device).view(batch, blocks)
    lengths = torch.full((batch,), 190, dtype=torch.int32, device=device)
    q = torch.randn(batch, shape.heads, shape.head_dim, device=device)
    k = torch.randn(batch, shape.kv_heads, shape.head_dim, device=device)

    def attention(ops: TritonOps) -> None:
        for keys, values in caches:
            view = CacheView(keys, values, table, lengths)
            ops.attention(q, k, k, view, scale=0.1, window=None, selection=None)

    yield Trial(
        f"attention/{batch * shape.kv_heads}x{shape.head_dim}",
        candidates.attention(),
        attention,
        len(caches),
    )


def _lazy_trials(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    matrices: Callable[..., list[Matrix]],
) -> Iterator[Trial]:
    heads, head_dim, width = shape.heads, shape.head_dim, shape.hidden_size
    stored = matrices(heads * head_dim, width)
    stored += stored[: -len(stored) % 3]
    triples = list(zip(stored[::3], stored[1::3], stored[2::3], strict=True))
    blocks = 8  # of 32 tokens
    keys, values = torch.zeros(
        2, blocks * batch, 32, heads, head_dim, device=device, dtype=dtype
    ).unbind()
    view = CacheView(
        keys,
        values,
        torch.arange(blocks * batch, dtype=torch.int32, device=device).view(batch, blocks),
        torch.full((batch,), 190, dtype=torch.int32, device=device),
    )
    deferred = DeferredView(
        torch.randn(batch, RING, width, device=device).to(dtype),
        torch.zeros(batch, heads, dtype=torch.int32, device=device),
        torch.arange(batch, dtype=torch.int32, device=device),
        complete=False,
    )
    half = Selection.from_mask(torch.rand(batch, heads, device=device) < 0.5)
    x = torch.randn(batch, width, device=device).to(dtype)

    def attend(ops: TritonOps) -> None:
        for q, k, v in triples:
            ops.attend_lazily(
                x, Projection(q), Projection(k), Projection(v), view, deferred, scale=0.1,
                window=None, selection=half,
            )  # fmt: skip

    itemsize = dtype.itemsize
    kind = "1" if batch == 1 else "n"
    yield Trial(
        f"lazy/{kind}/{heads * head_dim}x{width}/{itemsize}",
        candidates.lazy(),
        attend,
        len(triples),
    )
