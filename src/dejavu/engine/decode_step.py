"""One decode step of B sequences over static tensors, recorded once for every B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejavu.engine.sampling import Picked, Sampler, pick
from dejavu.engine.scheduler import Request
from dejavu.kernels.ops import Ops
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.policy import Selector


class Program(Protocol):
    """Recorded calls: `run` reads the same tensors and fills the same results again."""

    def run(self) -> None:
        """Run them all."""
        ...


class RecordingOps(Ops, Protocol):
    """Ops whose calls are put down in `program` and not run."""

    @property
    def program(self) -> Program:
        """What was recorded so far."""
        ...


@runtime_checkable
class Recordable(Protocol):
    """Ops that can be recorded (`NativeOps`)."""

    def recorder(self) -> RecordingOps:
        """Ops of the same kind that record."""
        ...


class DecodeStep:
    """Feeds the last token of every running request through the model.

    Recorded steps cost no Python but the few writes below: the inputs of B rows are the first B
    rows of one set of tensors, which every program reads in place.
    """

    def __init__(
        self,
        model: DecoderLM,
        cache: KVCache,
        selector: Selector,
        ops: Ops,
        *,
        max_rows: int,
        max_length: int,
        vocab_size: int | None = None,
    ) -> None:
        """Steps of up to `max_rows` sequences of up to `max_length` tokens.

        vocab_size: ids are picked below it; default: the model's.
        """
        self._model, self._cache, self._selector, self._ops = model, cache, selector, ops
        self._ids = torch.zeros(max_rows, dtype=torch.int64)
        self._positions = torch.zeros(max_rows, dtype=torch.int64)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32)
        self._block_table = torch.zeros(max_rows, blocks_for(max_length), dtype=torch.int32)
        # The same memory for writing: an assignment through NumPy takes a tenth of torch's time.
        self._ids_view = self._ids.numpy()
        self._positions_view = self._positions.numpy()
        self._lengths_view = self._lengths.numpy()
        self._block_table_view = self._block_table.numpy()
        self._rows: list[Request] = []
        self._vocab = model.config.vocab_size if vocab_size is None else vocab_size
        self._logits: Tensor | None = None
        self._cut: tuple[Tensor | None, list[NDArray[np.float32]]] = None, []
        self._recorded: dict[int, tuple[Program, Tensor]] = {}

    def run(self, requests: Sequence[Request]) -> Tensor:
        """Logits fp32 `[B, vocab_size]` after each request's latest token, which enters the cache.

        The result may be a static buffer: it holds until the next call.
        """
        rows = len(requests)
        self._ids_view[:rows] = [r.token_ids[-1] for r in requests]
        lengths = [r.length for r in requests]
        self._lengths_view[:rows] = lengths
        self._positions_view[:rows] = [length - 1 for length in lengths]
        if self._rows != requests:
            self._seat(requests)
        self._model.prepare(max(lengths))
        self._logits = self._run(rows)
        return self._logits

    def pick(self, samplers: Sequence[Sampler | None]) -> list[Picked]:
        """The next id of each row of the latest `run`; None also where it has no sampler."""
        rows = zip(samplers, self._host_rows(), strict=True)
        return [None if sampler is None else pick(sampler, row) for sampler, row in rows]

    def row(self, row: int) -> NDArray[np.float32]:
        """Logits `[vocab_size]` of one row of the latest `run`."""
        return self._host_rows()[row]

    def width(self, rows: int) -> int:
        """Rows of the step that so many requests take: no padding here."""
        return rows

    def _host_rows(self) -> list[NDArray[np.float32]]:
        assert self._logits is not None
        if self._logits is not self._cut[0]:  # a program has one buffer, whose rows are cut once
            rows = [row[: self._vocab] for row in self._logits.numpy()]
            self._cut = self._logits, rows
        return self._cut[1]

    def _run(self, rows: int) -> Tensor:
        recorded = self._recorded.get(rows)
        if recorded is None:
            if not (self._selector.capturable and isinstance(self._ops, Recordable)):
                return self._forward(rows, self._ops)
            recorder = self._ops.recorder()
            logits = self._forward(rows, recorder)
            recorded = self._recorded[rows] = recorder.program, logits
        program, logits = recorded
        program.run()
        return logits

    def _seat(self, requests: Sequence[Request]) -> None:
        """Write the block table; only when a row changed hands, for blocks are given for life."""
        for row, request in enumerate(requests):
            self._block_table_view[row, : len(request.blocks)] = request.blocks
        self._rows = list(requests)

    def _forward(self, rows: int, ops: Ops) -> Tensor:
        batch = Batch(
            self._ids[:rows],
            self._positions[:rows],
            self._block_table[:rows],
            self._lengths[:rows],
        )
        return self._model.forward(batch, self._cache, self._selector, ops)
