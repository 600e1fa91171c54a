"""Prompts on the kernels of decode steps: 16 tokens at a time, whosesoever they are.

Rows of a recorded step do not see each other but through the cache, and keys and values of all rows
are in it before any row looks. So several tokens of one prompt may be rows of one step, and so may
tokens of several prompts: short prompts share a step. Where a prompt is cut, and what runs beside
it, changes no bit of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejavu.engine.scheduler import Request
from dejavu.kernels.native import MAX_ROWS, NativeOps, Program
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.policy import Points, Selector, Site

# Programs exist for these numbers of rows; a step is filled up with rows of no sequence.
_WIDTHS = (1, 2, 4, 6, 8, 12, MAX_ROWS)


class Piece(NamedTuple):
    """A prompt's tokens from its `computed` up to place `end`. every: logits of all of them, else
    those after the prompt's last one."""

    request: Request
    end: int
    every: bool


class _Row(NamedTuple):
    """One token. blocks: of its request when the step began, for it may be aborted meanwhile."""

    request: Request
    blocks: list[int]
    place: int
    wanted: bool


class Whole(Selector):
    """Everything; but where an activation is exactly zero its row of `down` may be passed over,
    which changes no bit (`Selection.full`).

    keys_only: of the last layer nothing besides keys and values, where nobody reads its output.
    """

    def __init__(self, model: DecoderLM, *, keys_only: bool) -> None:
        c = model.config
        self._last = c.num_hidden_layers - 1 if keys_only else c.num_hidden_layers
        self._none = {
            Site.HEADS: Selection.empty(c.num_key_value_heads, 1),
            Site.NEURONS: Selection.empty(c.intermediate_size, 1),
        }
        sparse = model.activation.is_sparse
        self._neurons = Selection.full(c.intermediate_size) if sparse else None

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if layer == self._last:
            return self._none[site]
        return self._neurons if site is Site.NEURONS else None


class PromptStep:
    """Computes pieces of prompts of models whose matrices are all int8, the only ones for which
    these kernels beat torch's products of many rows."""

    together = True
    least = 1

    def __init__(
        self,
        model: DecoderLM,
        cache: KVCache,
        ops: NativeOps,
        *,
        max_length: int,
        vocab_size: int,
        recorded: bool = True,
    ) -> None:
        """Prompts of up to `max_length` tokens. vocab_size: logits end there. recorded: off, a step
        goes through Python op by op."""
        self._at_once = not recorded
        self._model, self._cache, self._ops, self._vocab = model, cache, ops, vocab_size
        self._whole = Whole(model, keys_only=False)
        self._keys_only = Whole(model, keys_only=True)
        self._ids = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self._positions = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self._lengths = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self._table = torch.zeros(MAX_ROWS, blocks_for(max_length), dtype=torch.int32)
        self._views = (
            self._ids.numpy(),
            self._positions.numpy(),
            self._lengths.numpy(),
            self._table.numpy(),
        )
        self._recorded: dict[tuple[int, int], tuple[Program, NDArray[np.float32]]] = {}

    @staticmethod
    def suits(model: DecoderLM) -> bool:
        """Whether it is for such a model."""
        w = model.weights
        matrices = [w.lm_head, *(m for m in (w.project_in, w.project_out) if m is not None)]
        for block in w.blocks:
            a, mlp = block.attention, block.mlp
            affine = (a.q, a.k, a.v, a.o, mlp.up, mlp.down, mlp.gate)
            matrices += [one.weight for one in affine if one is not None]
        return model.device.type == "cpu" and all(m.data.dtype == torch.int8 for m in matrices)

    def run(self, pieces: Sequence[Piece]) -> list[NDArray[np.float32]]:
        """Compute them; keys and values enter the cache. Of each piece the wanted logits fp32
        `[n, vocab_size]` in the order of its tokens."""
        rows: list[_Row] = []
        for request, end, every in pieces:
            last = len(request.prompt) - 1
            rows += [
                _Row(request, request.blocks, place, every or place == last)
                for place in range(request.computed, end)
            ]
        # Stable: a prompt's tokens stay in their order, and rows that need the head come last.
        rows.sort(key=lambda row: row.wanted)
        found: dict[Request, list[NDArray[np.float32]]] = {piece.request: [] for piece in pieces}
        for start in range(0, len(rows), MAX_ROWS):
            group = rows[start : start + MAX_ROWS]
            wanted = sum(row.wanted for row in group)
            if wanted == 0:
                self._step(group, 0)
                continue
            logits = self._step(group, wanted)
            for row, scored in zip(group[-wanted:], logits[-wanted:], strict=True):
                found[row.request].append(scored[: self._vocab].copy())
        none = np.empty((0, self._vocab), dtype=np.float32)
        return [np.stack(found[p.request]) if found[p.request] else none for p in pieces]

    def _step(self, group: Sequence[_Row], wanted: int) -> NDArray[np.float32]:
        """Logits of at least the last `wanted` rows of a static buffer."""
        width = _WIDTHS[bisect_left(_WIDTHS, len(group))]
        head = wanted if wanted < 2 else width
        empty = width - len(group)
        ids, positions, lengths, table = self._views
        ids[:empty] = positions[:empty] = lengths[:empty] = 0
        ids[empty:width] = [row.request.prompt[row.place] for row in group]
        places = [row.place for row in group]
        positions[empty:width] = places
        lengths[empty:width] = [place + 1 for place in places]
        for place, row in enumerate(group, empty):
            table[place, : len(row.blocks)] = row.blocks
        self._model.prepare(max(len(row.request.prompt) for row in group))
        if self._at_once:
            at_once: NDArray[np.float32] = self._forward(width, head, self._ops).numpy()
            return at_once
        if (width, head) not in self._recorded:
            self._recorded[width, head] = self._record(width, head)
        program, logits = self._recorded[width, head]
        program.run()
        return logits

    def _record(self, width: int, head: int) -> tuple[Program, NDArray[np.float32]]:
        recorder = self._ops.recorder()
        logits = self._forward(width, head, recorder)
        return recorder.program, logits.numpy()

    def _forward(self, width: int, head: int, ops: Ops) -> Tensor:
        batch = Batch(
            self._ids[:width],
            self._positions[:width],
            self._table[:width],
            self._lengths[:width],
            scored=head,
        )
        selector = self._whole if head else self._keys_only
        return self._model.forward(batch, self._cache, selector, ops)
