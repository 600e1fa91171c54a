"""The engine: token ids in, token ids out, many requests at once. It knows no text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dejavu.engine.activity import Watchable, activity
from dejavu.engine.backend import Step, decode_ops, decode_step
from dejavu.engine.logprobs import logprob_of, prompt_logprobs
from dejavu.engine.params import SamplingParams
from dejavu.engine.prompt_pass import PromptPass
from dejavu.engine.prompt_step import Piece, PromptStep
from dejavu.engine.sampling import Picked, Sampler, pick
from dejavu.engine.scheduler import FinishReason, Request, Scheduler
from dejavu.errors import DejavuError, InputError
from dejavu.kernels.native import MAX_ROWS, NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.prompt_rows import PromptRows
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.kv_cache import BLOCK_SIZE, KVCache, blocks_for, cache_budget
from dejavu.registry import unknown
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Dense, Selector

PREFILL_CHUNK = 128  # tokens; of relu-30m on 2 cores 0.1 s, where one token takes 0.03 s
GPU_PREFILL_CHUNK = 2048  # tokens: products this long are bound by arithmetic, not by weights
_LEAST_PIECE = 32  # tokens that a shorter piece costs as much time as
DEFAULT_ARM = "default"
_NO_PROMPT, _NO_TOKEN = "the prompt could not be computed", "the next token could not be computed"


class Engine:
    """Runs requests over one model: each prompt alone and piece by piece, and between the pieces
    all answers in common decode steps, one for each selector in use.

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
        arms: Mapping[str, Selector] | None = None,
        cache_bytes: int | None = None,
        prefill_chunk: int | None = None,
        prompt_ops: Ops | None = None,
        lazy_kv: bool | Collection[str] = False,
        whole_layers: bool = True,
    ) -> None:
        """A cache for `max_batch` sequences of `max_model_len` tokens is reserved, or as much of it
        as fits into `cache_bytes` (default: half of the machine's memory; on a GPU four fifths of
        what is free there).

        selector: of the decode steps; prompts are always dense. Default: dense.
        arms: further selectors by name, among which `add` chooses.
        prefill_chunk: prompt tokens computed at most between two decode steps; prompts are cut
            into pieces of this length. Default: `PREFILL_CHUNK`, on a GPU `GPU_PREFILL_CHUNK`.
        lazy_kv: on a GPU, keys and values of heads that a selector leaves out are computed when
            the head is next used, for steps of up to 4 rows; or the arms for which that is so.
        prompt_ops: of prompts; default: torch's, on the CPU with the kernels for int8 weights, and
            where all are int8 recorded steps (`PromptStep`).
        whole_layers: on a GPU, a plan's steps compute everything where that is faster than what
            the plan chooses, see `engine.whole_layers`.
        max_model_len: tokens of prompt and answer at most; default: the model's context, or what
            the cache holds of it.
        vocab_size: sampled ids lie below it (a tokenizer may have fewer than the model).
        eos_token_ids: end tokens; default: the config's.
        ops: of the decode steps; default: the kernels for the model's device, on the CPU with
            `threads` threads.

        Raises InputError for a bad option, BackendError where the kernels are missing.
        """
        model, config = loaded.model, loaded.model.config
        if not 1 <= max_batch <= MAX_ROWS:
            raise InputError(f"max_batch must lie in 1..{MAX_ROWS}, not {max_batch}")
        token_bytes = KVCache.token_bytes(config, model.cache_dtype)
        memory = cache_budget(model.device) if cache_bytes is None else cache_bytes
        affordable = memory // token_bytes // BLOCK_SIZE * BLOCK_SIZE
        if affordable < 2:
            raise InputError(
                f"a cache of {memory} bytes does not hold one block of {BLOCK_SIZE} tokens, which "
                f"takes {BLOCK_SIZE * token_bytes}: allow more memory"
            )
        if prefill_chunk is None:
            prefill_chunk = PREFILL_CHUNK if model.device.type == "cpu" else GPU_PREFILL_CHUNK
        if prefill_chunk < 1:
            raise InputError(f"prefill_chunk must be at least 1, not {prefill_chunk}")
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
                f"{max_model_len * token_bytes / 1e9:.1f} GB; {affordable} tokens fit into "
                f"{memory / 1e9:.1f} GB"
            )
        self.max_model_len = max_model_len
        self.vocab_size = min(config.vocab_size, vocab_size or config.vocab_size)
        self._model = model
        blocks = min(max_batch * blocks_for(max_model_len), affordable // BLOCK_SIZE)
        self._cache = KVCache(config, blocks, device=model.device, dtype=model.cache_dtype)
        self._scheduler = Scheduler(
            self._cache, block_size=BLOCK_SIZE, max_rows=max_batch, max_length=max_model_len
        )
        self._eos = frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        selectors = {DEFAULT_ARM: Dense() if selector is None else selector, **(arms or {})}
        step_ops = decode_ops(model, threads) if ops is None else ops
        self._steps = {
            name: decode_step(
                model,
                self._cache,
                chosen,
                step_ops,
                max_rows=max_batch,
                max_length=max_model_len,
                vocab_size=self.vocab_size,
                lazy_kv=lazy_kv if isinstance(lazy_kv, bool) else name in lazy_kv,
                whole_layers=whole_layers,
            )
            for name, chosen in selectors.items()
        }
        self.selectors = selectors
        self.steps = dict.fromkeys(selectors, 0)  # decode steps by arm since last idle
        self.max_batch = max_batch
        self.cache_blocks = blocks
        self._chunk = prefill_chunk
        self._prompts: PromptStep | None = None
        kernels_of = prompt_ops if ops is not None or prompt_ops is not None else step_ops
        if isinstance(kernels_of, NativeOps) and PromptStep.suits(model):
            self._prompts = PromptStep(
                model,
                self._cache,
                kernels_of,
                max_length=max_model_len,
                vocab_size=self.vocab_size,
                recorded=prompt_ops is None,
            )
        if prompt_ops is None:
            kernels = ops is None and model.device.type == "cpu"
            prompt_ops = PromptRows(threads) if kernels else TorchOps()
        self._alone = PromptPass(
            model, self._cache, prompt_ops, threads=threads, vocab_size=self.vocab_size
        )
        self._meters = {
            name: chosen.meter
            for name, chosen in selectors.items()
            if isinstance(chosen, MeteredSelector)
        }
        # With its end tokens.
        self._active: dict[Request, tuple[SamplingParams, Sampler, frozenset[int]]] = {}

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a row or for memory."""
        return self._scheduler.waiting

    @property
    def reading(self) -> bool:
        """Whether there is a prompt to compute before the next decode step."""
        return self._scheduler.reading

    @property
    def density(self) -> float | None:
        """Share of the neurons that a row used, mean over the decode steps since the engine was
        last idle; None where the selector does not count. Of the default arm."""
        return self.density_of(DEFAULT_ARM)

    def density_of(self, arm: str) -> float | None:
        """The same of any arm."""
        meter = self._meters.get(arm)
        return None if meter is None else meter.density(self._model.config.intermediate_size)

    def whole_share(self, arm: str = DEFAULT_ARM) -> float | None:
        """Share of the MLPs of an arm's decode steps since the engine was last idle that
        `engine.whole_layers` had computed whole; None where the selector does not count."""
        meter = self._meters.get(arm)
        return None if meter is None else meter.whole_share()

    @property
    def free_blocks(self) -> int:
        """Of the `cache_blocks` blocks of the cache."""
        return self._cache.free_blocks

    def take_memory(self, most: int) -> None:
        """`KVCache.take_memory`, before the first request."""
        self._cache.take_memory(most)

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

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        arm: str = DEFAULT_ARM,
        client: str = "",
        watched: bool = False,
    ) -> Request:
        """Queue a request; `step` makes its tokens appear in it. Raises InputError like `check`.

        arm: the selector of its decode steps. client: among clients, waiting requests take turns.
        watched: keep what was active for every token, see `Request.activity`.
        """
        if arm not in self._steps:
            raise unknown("arm", arm, self._steps, InputError)
        request = Request(
            tuple(prompt), self.check(prompt, params), client=client, arm=arm, watched=watched
        )
        ends = frozenset(params.stop_token_ids or ())
        ends = ends if params.ignore_eos else ends | self._eos
        self._active[request] = params, Sampler(params, request.prompt, self.vocab_size), ends
        self._scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Take a request out at once, wherever it stands; harmless if it has ended."""
        self._finish(request)

    def step(self) -> list[Request]:
        """Compute the next pieces of prompts, then one decode step of all running answers.

        Returns the requests that got tokens or ended. One whose logits are not finite, whose prompt
        cannot be computed or whose sampling fails ends with an `error`, and where a decode step
        fails, all of its rows do; the others go on.
        """
        if not self.running:
            for meter in self._meters.values():
                meter.reset()
            self.steps = dict.fromkeys(self.steps, 0)
        self._scheduler.admit()
        read = self._next_prompts()
        touched = {request: None for request in read if request.token_ids or request.done}
        for arm, step in self._steps.items():
            rows = [r for r in self._scheduler.rows if r.arm == arm]
            if not rows:
                continue
            started = perf_counter()
            with self._ending(rows, _NO_TOKEN):
                step.run(rows)
                self.steps[arm] += 1
                self._watch(rows, step)
                self._accept(rows, step)
            seconds = perf_counter() - started
            for request in rows:
                request.decode_seconds += seconds
            touched |= dict.fromkeys(rows)
        return list(touched)

    def _next_prompts(self) -> list[Request]:
        """Compute the next pieces of prompts; whose they were."""
        least = _LEAST_PIECE if self._prompts is None else 1
        pieces = [
            Piece(request, end, self._active[request][0].prompt_logprobs is not None)
            for request, end in self._scheduler.next_prompts(self._chunk, least)
            if not request.done  # see `_accept`
        ]
        together = [pieces] if self._prompts is not None else [[piece] for piece in pieces]
        for group in together:
            if any(not piece.request.done for piece in group):
                self._compute(group)
        return [piece.request for piece in pieces]

    def _compute(self, pieces: list[Piece]) -> None:
        """Compute some pieces together; where it fails, their requests end with an error."""
        started = perf_counter()
        reader = self._alone if self._prompts is None else self._prompts
        with self._ending([piece.request for piece in pieces], _NO_PROMPT):
            for piece, logits in zip(pieces, reader.run(pieces), strict=True):
                with self._ending([piece.request], _NO_PROMPT):  # one's fault is not another's
                    self._advance(piece, logits)
        seconds = perf_counter() - started
        for piece in pieces:
            piece.request.prefill_seconds += seconds

    @contextmanager
    def _ending(self, requests: Sequence[Request], what: str) -> Iterator[None]:
        """What fails within ends these requests."""
        try:
            yield
        except Exception as error:
            failed = DejavuError(f"{what}: {error}")
            failed.__cause__ = error
            for request in requests:
                self._finish(request, error=failed)

    def _advance(self, piece: Piece, logits: NDArray[np.float32]) -> None:
        """A prompt's next tokens are in the cache, and these are their logits; after the last one
        its first token is sampled."""
        request, end, every = piece
        if request.done:  # aborted meanwhile
            return
        if every:
            top = self._active[request][0].prompt_logprobs
            following = request.prompt[request.computed + 1 : end + 1]
            request.prompt_logprobs += prompt_logprobs(logits, following, top)
        if end == len(request.prompt):
            row = logits[-1]
            self._take(request, pick(self._active[request][1], row), lambda: row)
        self._scheduler.advance(request, end)

    def _watch(self, rows: list[Request], step: Step) -> None:
        """Keep what a decode step selected for the requests that want to know."""
        if not any(request.watched for request in rows):
            return
        selector = self.selectors[rows[0].arm]
        if isinstance(selector, Watchable):
            c = self._model.config
            width = step.width(len(rows))
            found = activity(selector, width, c.intermediate_size, c.num_key_value_heads)
            for place, request in enumerate(rows):
                if request.watched and not request.done:
                    request.activity.append(found.row(place))

    def _accept(self, requests: list[Request], step: Step) -> None:
        """Sample each request's next token from its row of a step; end those that are through."""
        active = [self._active.get(request) for request in requests]
        tokens = step.pick([None if entry is None else entry[1] for entry in active])
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if request.done:  # aborted while the step ran: a dropped stream, now garbage
                continue
            with self._ending([request], _NO_TOKEN):  # one row's fault is not another's
                self._take(request, token, partial(step.row, row))

    def _take(
        self, request: Request, token: Picked, logits: Callable[[], NDArray[np.float32]]
    ) -> None:
        """A request's next token, and how to get the logits it was picked from."""
        if isinstance(token, Exception):
            raise token
        if token is None:
            self._finish(request, error=_not_finite(request))
            return
        params, _, ends = self._active[request]
        if params.logprobs is not None:
            request.logprobs.append(logprob_of(logits(), token, params.logprobs))
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


def _not_finite(request: Request) -> DejavuError:
    return DejavuError(
        f"the logits after {len(request.prompt)} prompt and {len(request.token_ids)} answer tokens "
        "are not finite (NaN or Inf): the weights are damaged, or too large for their dtype; try "
        "dtype='fp32'"
    )
