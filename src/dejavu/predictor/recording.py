"""Dense forwards over calibration windows, and what is kept of them: bounded, in fp16."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dejavu.kernels.device import free_memory
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.models.base import DecoderLM
from dejavu.models.kv_cache import KVCache
from dejavu.models.streaming import Pass
from dejavu.sparsity.losses import token_losses
from dejavu.sparsity.policy import Key, Points, Selector, Site, Stage, point
from dejavu.sparsity.record import group_norms

_HALF_MAX = 65504.0
GIB = 1 << 30
Tick = Callable[[int, int], None]  # windows done, windows in all


@dataclass(frozen=True, eq=False)
class Recorded:
    """inputs: fp16 `[N, D]` of a site and layer. head_norms: fp32 `[N, K]`, see `group_norms`.

    All on the model's device.
    """

    inputs: dict[Key, Tensor] = field(default_factory=dict)
    head_norms: dict[int, Tensor] = field(default_factory=dict)

    def source(self, site: Site, layer: int, distance: float) -> Tensor | None:
        """What a look-ahead of 0, 0.5 or 1 block reads; None where no block is that far back, or
        the inputs were not recorded."""
        return self.inputs.get(source_key(site, layer, distance))

    def first(self, rows: int) -> Recorded:
        """The first tokens of everything (views)."""
        return Recorded(
            {key: x[:rows] for key, x in self.inputs.items()},
            {layer: norms[:rows] for layer, norms in self.head_norms.items()},
        )


def room(device: torch.device, memory_gib: float) -> float:
    """Bytes for recorded inputs: as allowed, on a GPU half of what is free there by now."""
    return memory_gib * GIB if device.type == "cpu" else free_memory(device) / 2


def source_key(site: Site, layer: int, distance: float) -> Key:
    """Site and layer whose own input a look-ahead reads (a negative layer: there is none)."""
    number = point(site, layer, distance)
    return (Site.NEURONS if number % 2 else Site.HEADS), number // 2


class _Enough(Exception):  # noqa: N818 - no error: it ends a forward early
    """Everything that is recorded of this window has been seen."""


class InputRecorder(Selector):
    """The dense arm, as far as anything is recorded; copies inputs into buffers of fixed rows."""

    capturable = False

    def __init__(
        self, model: DecoderLM, rows: int, inputs: Collection[Key], heads: Collection[int]
    ) -> None:
        """rows: tokens to come. heads: layers whose head norms are kept."""
        c = model.config

        def buffer(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=model.device)

        self.recorded = Recorded(
            {key: buffer(c.hidden_size, torch.float16) for key in inputs},
            {layer: buffer(c.num_key_value_heads, torch.float32) for layer in heads},
        )
        self._groups = c.num_key_value_heads
        self._blocks = model.weights.blocks
        self._o: dict[int, Tensor] = {}  # of the layer that was last seen, one for all windows
        self._start = 0
        self._last = max([layer for _, layer in inputs] + list(heads), default=-1)

    def at(self, start: int) -> InputRecorder:
        """One that writes into the same buffers from a row on, for one window."""
        other = copy(self)
        other._start = start
        return other

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if layer > self._last:
            raise _Enough
        buffer = self.recorded.inputs.get((site, layer))
        if buffer is not None:
            x = points.source(site, layer)
            buffer[self._start : self._start + len(x)] = x.clamp(-_HALF_MAX, _HALF_MAX)
        return None

    def observe(self, stage: Stage, layer: int, value: Tensor) -> None:
        if stage == Stage.HEAD_OUTPUTS and layer in self.recorded.head_norms:
            if layer not in self._o:
                self._o.clear()
                self._o[layer] = self._blocks[layer].attention.o.weight.float()
            norms = group_norms(value, self._o[layer], self._groups)
            self.recorded.head_norms[layer][self._start : self._start + len(value)] = norms


def record(
    model: DecoderLM,
    windows: Tensor,
    inputs: Collection[Key],
    heads: Collection[int],
    ops: Ops,
    tick: Tick,
) -> Recorded:
    """Run windows int64 `[n, T + 1]` densely and keep what is asked for, all their tokens."""
    length = windows.shape[1] - 1
    recorder = InputRecorder(model, len(windows) * length, inputs, heads)
    cache = model.new_cache(length)

    def reading(number: int) -> Pass[None]:
        mine = recorder.at(number * length)
        with suppress(_Enough):
            yield from model.reading(windows[number, :-1], cache, mine, ops, last_only=True)

    readings = (reading(number) for number in range(len(windows)))
    for done, _ in enumerate(model.together(readings, length), 1):
        tick(done, len(windows))
    return recorder.recorded


def window_losses(
    model: DecoderLM, windows: Tensor, selector: Selector, ops: Ops, tick: Tick | None = None
) -> list[float]:
    """Loss in nats of each window, summed over its tokens; every token has its own selection."""
    cache = model.new_cache(windows.shape[1] - 1)
    losses = []
    for done, logits in enumerate(_each(model, windows, cache, selector, ops), 1):
        losses.append(float(token_losses(logits, windows[done - 1, 1:]).sum()))
        if tick is not None:
            tick(done, len(windows))
    return losses


def divergences(
    model: DecoderLM,
    windows: Tensor,
    trials: Iterable[Sequence[Selector]],
    dense: Tensor,
    ops: Ops,
) -> Iterator[float]:
    """Mean KL divergence in nats a token from the dense model, trial by trial.

    trials: a selector for each window. dense: log-probs `[n, T, V]`.
    """
    length = windows.shape[1] - 1
    cache = model.new_cache(length)
    readings = (
        model.reading(ids[:-1], cache, selector, ops)
        for selectors in trials
        for ids, selector in zip(windows, selectors, strict=True)
    )
    total = 0.0
    for done, logits in enumerate(model.together(readings, length), 1):
        p, q = dense[(done - 1) % len(dense)], torch.log_softmax(logits, dim=1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        if done % len(dense) == 0:
            yield total / (dense.shape[0] * dense.shape[1])
            total = 0.0


def log_probabilities(model: DecoderLM, windows: Tensor, ops: Ops) -> Tensor:
    """Of the dense model, fp32 `[n, T, V]`: for a few windows only."""
    cache = model.new_cache(windows.shape[1] - 1)
    each = _each(model, windows, cache, Selector(), ops)
    return torch.stack([torch.log_softmax(logits, dim=1) for logits in each])


def _each(
    model: DecoderLM, windows: Tensor, cache: KVCache, selector: Selector, ops: Ops
) -> Iterator[Tensor]:
    yield from model.together(
        (
            model.reading(ids[:-1], cache, selector.fork() if model.streamed else selector, ops)
            for ids in windows
        ),
        windows.shape[1] - 1,
    )
