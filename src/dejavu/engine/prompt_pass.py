"""Prompts through the plain forward: the tokens of a piece side by side, one prompt at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from dejavu.engine.prompt_step import Piece
from dejavu.kernels.device import on
from dejavu.kernels.ops import Ops
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache
from dejavu.sparsity.policy import Dense


class PromptPass:
    """Computes pieces of prompts of any model; for what `PromptStep` does not suit."""

    together = False
    least = 32  # tokens that a shorter piece costs as much time as

    def __init__(
        self, model: DecoderLM, cache: KVCache, ops: Ops, *, threads: int | None, vocab_size: int
    ) -> None:
        """threads: of torch's own operators. vocab_size: logits end there."""
        self._model, self._cache, self._ops = model, cache, ops
        self._threads, self._vocab = threads, vocab_size

    def run(self, pieces: Sequence[Piece]) -> list[NDArray[np.float32]]:
        """Compute them; keys and values enter the cache. Of each piece logits fp32
        `[n, vocab_size]`: of all its tokens where they are wanted, else of the last one."""
        return [self._logits(piece) for piece in pieces]

    def _logits(self, piece: Piece) -> NDArray[np.float32]:
        request, end, every = piece
        batch = Batch.prefill(
            list(request.prompt[request.computed : end]),
            request.blocks,
            start=request.computed,
            last_only=not every,
            device=self._model.device,
        )
        self._model.prepare(len(request.prompt))
        with _torch_threads(self._threads), on(self._model.device):
            logits = self._model.forward(batch, self._cache, Dense(), self._ops)
        found: NDArray[np.float32] = logits[:, : self._vocab].cpu().numpy()
        return found


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """So many threads for torch's own operators; the number is torch's, so it is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
