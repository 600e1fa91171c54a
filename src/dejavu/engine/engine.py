"""The engine: token ids in, token ids out, many requests at once. It knows no text."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejavu.engine.decode_step import DecodeStep
from dejavu.engine.params import SamplingParams
from dejavu.engine.sampling import Sampler
from dejavu.engine.scheduler import FinishReason, Request, Scheduler
from dejavu.errors import DejavuError, InputError
from dejavu.kernels.native import MAX_ROWS, NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.base import Batch
from dejavu.models.kv_cache import BLOCK_SIZE, KVCache, blocks_for
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Dense, Selector


class Engine:
    """Runs requests over one model: each prompt alone, then all answers in common decode steps.

    Requests join and leave at every step, and none is ever padded: a request's tokens do not
    depend on what runs beside it. Not for several threads at a time.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        selector: Selector | None = None,
        *,
        threads: int | None = None,
        max_batch: int = MAX_ROWS,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        ops: Ops | None = None,
    ) -> None:
        """A cache for `max_batch` sequences of `max_model_len` tokens is reserved, or as much of it
        as half of the machine's memory holds.

        selector: of the decode steps; prompts are always dense. Default: dense.
        max_model_len: tokens of prompt and answer at most; default: the model's context, or what
            the cache holds of it.
        vocab_size: sampled ids lie below it (a tokenizer may have fewer than the model).
        eos_token_ids: end tokens; default: the config's.
        ops: of the decode steps; default: the compiled kernels with `threads` threads.

        Raises InputError for a bad option, BackendError where the compiled kernels are missing.
        """
        model, config = loaded.model, loaded.model.config
        if not 1 <= max_batch <= MAX_ROWS:
            raise InputError(f"max_batch must lie in 1..{MAX_ROWS}, not {max_batch}")
        token_bytes = _cache_bytes(1, loaded)
        affordable = _memory() // 2 // token_bytes // BLOCK_SIZE * BLOCK_SIZE
        if max_model_len is None:
            max_model_len = min(config.context_length, affordable)
        elif not 2 <= max_model_len <= config.context_length:
            raise InputError(
                f"max_model_len must lie in 2..{config.context_length}, the context of this model, "
                f"not {max_model_len}"
            )
        elif max_model_len > affordable:
            raise InputError(
                f"max_model_len {max_model_len} needs a cache of "
                f"{max_model_len * token_bytes / 1e9:.1f} GB; {affordable} tokens fit into half of "
                "this machine's memory"
            )
        self.max_model_len = max_model_len
        self.vocab_size = min(config.vocab_size, vocab_size or config.vocab_size)
        self._model = model
        blocks = min(max_batch * blocks_for(max_model_len), affordable // BLOCK_SIZE)
        self._cache = KVCache(config, blocks)
        self._scheduler = Scheduler(
            self._cache, block_size=BLOCK_SIZE, max_rows=max_batch, max_length=max_model_len
        )
        self._eos = frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._threads = threads
        self._step = DecodeStep(
            model,
            self._cache,
            Dense() if selector is None else selector,
            NativeOps(threads) if ops is None else ops,
            max_rows=max_batch,
            max_length=max_model_len,
        )
        self._seen: Tensor | None = None
        self._rows: list[NDArray[np.float32]] = []
        self._meter = selector.meter if isinstance(selector, MeteredSelector) else None
        self._active: dict[Request, tuple[Sampler, frozenset[int]]] = {}  # with its end tokens

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a row or for memory."""
        return self._scheduler.waiting

    @property
    def density(self) -> float | None:
        """Share of the neurons that a row used, mean over the decode steps since the engine was
        last idle; None where the selector does not count."""
        if self._meter is None:
            return None
        return self._meter.density(self._model.config.intermediate_size)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Tokens at which such a request would end at the latest.

        Raises InputError where it can never run; nothing has been done for it then.
        """
        if not prompt:
            raise InputError("the prompt is empty")
        rows = self._model.config.vocab_size
        if (wrong := min(prompt)) < 0 or (wrong := max(prompt)) >= rows:
            raise InputError(f"the prompt has token id {wrong}; the model knows 0 to {rows - 1}")
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids or ()),
        ):
            if ids and (wrong := max(ids)) >= self.vocab_size:
                raise InputError(f"{name}: token id {wrong} is not below {self.vocab_size}")
        return self._scheduler.check(len(prompt), params.max_tokens)

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request; `step` makes its tokens appear in it. Raises InputError like `check`."""
        request = Request(tuple(prompt), self.check(prompt, params))
        ends = frozenset(params.stop_token_ids or ())
        ends = ends if params.ignore_eos else ends | self._eos
        self._active[request] = Sampler(params, request.prompt, self.vocab_size), ends
        self._scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Take a request out at once, wherever it stands; harmless if it has ended."""
        self._finish(request)

    def step(self) -> list[Request]:
        """Compute the prompts that may start and one decode step of all running requests.

        Returns the requests that got tokens or ended. One whose logits are not finite ends with an
        `error`; the others go on.
        """
        if self._meter is not None and not self.running:
            self._meter.reset()
        self._scheduler.admit()
        # Not only those just admitted: an interrupted step may have left some without a token.
        fresh = [r for r in self._scheduler.running if not r.token_ids]
        for request in fresh:
            if request.done:  # see `_accept`
                continue
            started = perf_counter()
            self._accept([request], self._prefill(request))
            request.prefill_seconds = perf_counter() - started
        rows = list(self._scheduler.running)
        if rows:
            started = perf_counter()
            self._accept(rows, self._step.run(rows))
            seconds = perf_counter() - started
            for request in rows:
                request.decode_seconds += seconds
        return list(dict.fromkeys((*fresh, *rows)))

    def _prefill(self, request: Request) -> Tensor:
        """Logits fp32 `[1, vocab_size]` after the whole prompt, which enters the cache."""
        batch = Batch.prefill(list(request.prompt), request.blocks)
        self._model.prepare(len(request.prompt))
        with _torch_threads(self._threads):
            return self._model.forward(batch, self._cache, Dense(), TorchOps())

    def _accept(self, requests: list[Request], logits: Tensor) -> None:
        """Sample each request's next token from its row; end those that are through."""
        if logits is not self._seen:  # a recorded step has one buffer, whose rows are cut once
            self._seen = logits
            self._rows = [row[: self.vocab_size] for row in logits.numpy()]
        for request, row in zip(requests, self._rows, strict=True):
            if request.done:  # aborted while the step ran: a dropped stream, collected as garbage
                continue
            if not _finite(row):
                self._finish(request, error=_not_finite(request))
                continue
            sampler, ends = self._active[request]
            token = sampler.sample(row)
            request.token_ids.append(token)
            if token in ends:
                self._finish(request, "stop")
            elif request.length >= request.limit:
                self._finish(request, "length")

    def _finish(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: DejavuError | None = None,
    ) -> None:
        self._scheduler.finish(request, reason, error)
        self._active.pop(request, None)


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """So many threads for torch's own operators; the number is torch's, so it is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finite(row: NDArray[np.float32]) -> bool:
    """Whether no value is NaN or infinite.

    argmin and argmax stop at a NaN, and come without the machinery of NumPy's reductions: after a
    decode step has swept the caches, `min` and `max` take 80 us, these under 10.
    """
    return math.isfinite(row.item(row.argmin())) and math.isfinite(row.item(row.argmax()))


def _not_finite(request: Request) -> DejavuError:
    return DejavuError(
        f"the logits after {len(request.prompt)} prompt and {len(request.token_ids)} answer tokens "
        "are not finite (NaN or Inf): the weights are damaged, or too large for their dtype; try "
        "dtype='fp32'"
    )


def _cache_bytes(tokens: int, loaded: LoadedModel) -> int:
    config = loaded.model.config
    return 8 * tokens * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def _memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
