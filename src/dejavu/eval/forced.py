"""A model reading given text: logits and the tokens that really came next, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from dejavu.engine.backend import decode_ops, decode_step
from dejavu.engine.scheduler import Request
from dejavu.errors import BackendError, InputError
from dejavu.eval.text import Window
from dejavu.kernels.native import MAX_ROWS, NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.models.base import DecoderLM
from dejavu.models.kv_cache import blocks_for
from dejavu.predictor.wide import widened
from dejavu.registry import unknown
from dejavu.sparsity.policy import Selector

THROUGH = ("prefill", "decode")


class Chunk(NamedTuple):
    """Some scored predictions. owners: int64 `[n]`, the window of each; logits: fp32 `[n, V]`, good
    until the next chunk; targets: int64 `[n]`."""

    owners: Tensor
    logits: Tensor
    targets: Tensor


class Stretch(NamedTuple):
    """Windows `begin` to `end` (exclusive), read in so many steps of `rows` rows each."""

    begin: int
    end: int
    steps: int
    rows: int


class Reader:
    """Reads windows through one path.

    `prefill`: a window at once with plain PyTorch, every token with its own selection. `decode`:
    token by token as the engine does it, up to `rows` windows side by side.
    """

    def __init__(
        self,
        model: DecoderLM,
        through: str = "prefill",
        ops: Ops | None = None,
        rows: int = MAX_ROWS,
    ) -> None:
        """ops: default, plain PyTorch for `prefill`, over matrices that are widened once, and the
        compiled kernels, where this installation has them, for `decode`. Raises InputError for a
        bad option."""
        if through not in THROUGH:
            raise unknown("path", through, THROUGH, InputError)
        if not 1 <= rows <= MAX_ROWS:
            raise InputError(f"rows: {rows} is not usable, it is 1 to {MAX_ROWS}")
        self.through = through
        self._rows = rows
        self._ops = ops or (TorchOps() if through == "prefill" else _decode_ops(model))
        self._model = widened(model) if through == "prefill" and ops is None else model

    @property
    def backend(self) -> str:
        """The ops: `torch`, `native` and the instruction set, or `triton`; on a GPU with it."""
        if isinstance(self._ops, NativeOps):
            return f"native {self._ops.isa}"
        name = "torch" if isinstance(self._ops, TorchOps) else "triton"
        device = self._model.device
        return name if device.type == "cpu" else f"{name} {device}"

    def read(self, windows: Sequence[Window], selector: Selector) -> Iterator[Chunk]:
        """All scored predictions; the order depends on the windows alone."""
        path = self._prefill if self.through == "prefill" else self._decode
        return path(windows, selector)

    def stretches(self, windows: Sequence[Window]) -> list[Stretch]:
        """The windows in order, cut where the number of rows changes.

        On the prefill path a token stands for a step: it selects as if alone.
        """
        if self.through == "prefill":
            return [Stretch(0, len(windows), sum(len(w.ids) - 1 for w in windows), 1)]
        found: list[Stretch] = []
        for group in _groups(windows, self._rows):
            steps = len(windows[group[0]].ids) - 1
            if found and found[-1].rows == len(group):
                begin, _, earlier, _ = found.pop()
                found.append(Stretch(begin, group[-1] + 1, earlier + steps, len(group)))
            else:
                found.append(Stretch(group[0], group[-1] + 1, steps, len(group)))
        return found

    def _prefill(self, windows: Sequence[Window], selector: Selector) -> Iterator[Chunk]:
        longest = max(len(window.ids) - 1 for window in windows)
        cache = self._model.new_cache(longest)
        readings = (
            self._model.reading(
                window.ids[:-1],
                cache,
                selector.fork() if self._model.streamed else selector,
                self._ops,
                # The head is a fifth of a small model: not for rows that are context only.
                last_only=window.scored == 1,
            )
            for window in windows
        )
        for number, logits in enumerate(self._model.together(readings, longest)):
            window = windows[number]
            scored = logits if window.scored == 1 else logits[window.skip :]
            targets = window.ids[1 + window.skip :]
            yield Chunk(torch.full((len(targets),), number), scored, targets)

    def _decode(self, windows: Sequence[Window], selector: Selector) -> Iterator[Chunk]:
        longest = max(len(window.ids) - 1 for window in windows)
        rows = min(self._rows, len(windows))
        cache = self._model.new_cache(longest, sequences=rows)
        step = decode_step(
            self._model, cache, selector, self._ops, max_rows=rows, max_length=longest
        )
        blocks = [cache.allocate(blocks_for(longest)) for _ in range(rows)]
        for group in _groups(windows, rows):
            ids = torch.stack([windows[number].ids for number in group])
            skips = torch.tensor([windows[number].skip for number in group])
            owners = torch.tensor(group)
            requests = [Request((), longest, blocks=blocks[row]) for row in range(len(group))]
            for place in range(ids.shape[1] - 1):
                for request, token in zip(requests, ids[:, place].tolist(), strict=True):
                    request.token_ids.append(token)
                logits = step.run(requests)
                scored = skips <= place
                if scored.all():
                    yield Chunk(owners, logits, ids[:, place + 1])
                elif scored.any():
                    yield Chunk(owners[scored], logits[scored], ids[scored, place + 1])


def _groups(windows: Sequence[Window], rows: int) -> Iterator[list[int]]:
    """Numbers of up to `rows` neighbouring windows of one length."""
    for _, equal in groupby(range(len(windows)), key=lambda number: len(windows[number].ids)):
        numbers = list(equal)
        for start in range(0, len(numbers), rows):
            yield numbers[start : start + rows]


def _decode_ops(model: DecoderLM) -> Ops:
    try:
        return decode_ops(model)
    except BackendError:
        return TorchOps()
