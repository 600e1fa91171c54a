"""The engine: token ids in, token ids out, many requests at once. It knows no text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dejavu.engine.activity import Watchable, activity
from dejavu.engine.backend import Step, decode_ops, decode_step, prompt_reader
from dejavu.engine.capacity import Capacity
from dejavu.engine.logprobs import logprob_of, prompt_logprobs
from dejavu.engine.params import SamplingParams
from dejavu.engine.prompt_step import Piece
from dejavu.engine.sampling import Picked, Sampler, pick
from dejavu.engine.scheduler import FinishReason, Request, Scheduler
from dejavu.errors import DejavuError, InputError
from dejavu.kernels.native import MAX_ROWS
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.kv_cache import BLOCK_SIZE, KVCache
from dejavu.registry import unknown
from dejavu.sparsity.meter import Meter, MeteredSelector
from dejavu.sparsity.policy import Dense, Selector

DEFAULT_ARM = "default"
_NO_PROMPT, _NO_TOKEN = "the prompt could not be computed", "the next token could not be computed"


@dataclass(eq=False)
class Arm:
    """A selector, and the decode steps that choose by it. steps: since the engine was last idle."""

    selector: Selector
    step: Step
    steps: int = 0

    @property
    def meter(self) -> Meter | None:
        """What counts what its steps read; None where nothing does."""
        return self.selector.meter if isinstance(self.selector, MeteredSelector) else None


class Engine:
    """Runs requests over one model: prompts piece by piece, and between the pieces all answers in
    common decode steps, one for each arm in use.

    Requests join and leave at every step. On the CPU what runs beside a request changes no bit of
    its tokens. On a GPU a row among others is rounded otherwise than alone, which can turn a near
    tie, and by `whole_layers` it may be computed with more neurons than its selector chose; with
    that off only the rounding is left. Not for several threads at a time.

    arms: by name. max_batch, max_model_len, cache_blocks: see `Capacity`. vocab_size: sampled ids
    lie below it.
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
            into pieces of this length. Default: `capacity.PREFILL_CHUNK`, or that of a GPU.
        lazy_kv: on a GPU, keys and values of heads that a selector leaves out are computed when
            the head is next used, for steps of up to 4 rows; or the arms for which that is so.
        prompt_ops: of prompts; default: the fastest there are, see `backend.prompt_reader`, and
            torch's beside `ops`.
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
        capacity = Capacity.of(
            model, rows=max_batch, length=max_model_len, memory=cache_bytes, chunk=prefill_chunk
        )
        self.max_batch, self.max_model_len = capacity.rows, capacity.length
        self.cache_blocks = capacity.blocks
        self.vocab_size = min(config.vocab_size, vocab_size or config.vocab_size)
        self._model, self._chunk = model, capacity.chunk
        self._eos = frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._cache = KVCache(config, capacity.blocks, device=model.device, dtype=model.cache_dtype)
        self._scheduler = Scheduler(
            self._cache, block_size=BLOCK_SIZE, max_rows=max_batch, max_length=capacity.length
        )
        step_ops = decode_ops(model, threads) if ops is None else ops

        def arm(name: str, selector: Selector) -> Arm:
            lazy = lazy_kv if isinstance(lazy_kv, bool) else name in lazy_kv
            step = decode_step(
                model,
                self._cache,
                selector,
                step_ops,
                max_rows=capacity.rows,
                max_length=capacity.length,
                vocab_size=self.vocab_size,
                lazy_kv=lazy,
                whole_layers=whole_layers,
            )
            return Arm(selector, step)

        selectors = {DEFAULT_ARM: Dense() if selector is None else selector, **(arms or {})}
        self.arms = {name: arm(name, chosen) for name, chosen in selectors.items()}
        if prompt_ops is None and ops is not None:
            prompt_ops = TorchOps()  # ops of the caller's own may know single tokens only
        self._prompts = prompt_reader(
            model,
            self._cache,
            prompt_ops,
            threads=threads,
            max_length=capacity.length,
            vocab_size=self.vocab_size,
        )
        self._samplers: dict[Request, Sampler] = {}

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

    def density_of(self, arm: str = DEFAULT_ARM) -> float | None:
        """Share of the neurons that a row used, mean over an arm's decode steps since the engine
        was last idle; None where the selector does not count."""
        meter = self.arms[arm].meter
        return None if meter is None else meter.density(self._model.config.intermediate_size)

    def whole_share(self, arm: str = DEFAULT_ARM) -> float | None:
        """Share of the MLPs of an arm's decode steps since the engine was last idle that
        `engine.whole_layers` had computed whole; None where the selector does not count."""
        meter = self.arms[arm].meter
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
        if arm not in self.arms:
            raise unknown("arm", arm, self.arms, InputError)
        ends = frozenset(params.stop_token_ids or ())
        request = Request(
            tuple(prompt),
            self.check(prompt, params),
            ends=ends if params.ignore_eos else ends | self._eos,
            client=client,
            arm=arm,
            watched=watched,
        )
        self._samplers[request] = Sampler(params, request.prompt, self.vocab_size)
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
            for arm in self.arms.values():
                arm.steps = 0
                if arm.meter is not None:
                    arm.meter.reset()
        self._scheduler.admit()
        read = self._next_prompts()
        touched = {request: None for request in read if request.token_ids or request.done}
        for name, arm in self.arms.items():
            rows = [request for request in self._scheduler.rows if request.arm == name]
            if rows:
                self._decode(arm, rows)
                touched |= dict.fromkeys(rows)
        return list(touched)

    def _next_prompts(self) -> list[Request]:
        """Compute the next pieces of prompts; whose they were."""
        pieces = [
            Piece(request, end, self._samplers[request].params.prompt_logprobs is not None)
            for request, end in self._scheduler.next_prompts(self._chunk, self._prompts.least)
            if not request.done  # see `_accept`
        ]
        groups = [pieces] if self._prompts.together else [[piece] for piece in pieces]
        for group in groups:
            if any(not piece.request.done for piece in group):
                self._compute(group)
        return [piece.request for piece in pieces]

    def _compute(self, pieces: list[Piece]) -> None:
        """Compute some pieces together; where it fails, their requests end with an error."""
        started = perf_counter()
        with self._ending([piece.request for piece in pieces], _NO_PROMPT):
            for piece, logits in zip(pieces, self._prompts.run(pieces), strict=True):
                with self._ending([piece.request], _NO_PROMPT):  # one's fault is not another's
                    self._advance(piece, logits)
        seconds = perf_counter() - started
        for piece in pieces:
            piece.request.prefill_seconds += seconds

    @contextmanager
    def _ending(self, requests: Sequence[Request], what: str) -> Iterator[None]:
        """What fails within ends these requests: whatever it is, the others' go on (and an
        interrupt ends none, so that `step` can be called again)."""
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
        sampler = self._samplers[request]
        if every:
            top = sampler.params.prompt_logprobs
            following = request.prompt[request.computed + 1 : end + 1]
            request.prompt_logprobs += prompt_logprobs(logits, following, top)
        if end == len(request.prompt):
            row = logits[-1]
            self._take(request, pick(sampler, row), lambda: row)
        self._scheduler.advance(request, end)

    def _decode(self, arm: Arm, rows: list[Request]) -> None:
        """One decode step of an arm's rows; where it fails, they end with an error."""
        started = perf_counter()
        with self._ending(rows, _NO_TOKEN):
            arm.step.run(rows)
            arm.steps += 1
            self._watch(arm, rows)
            self._accept(arm.step, rows)
        seconds = perf_counter() - started
        for request in rows:
            request.decode_seconds += seconds

    def _watch(self, arm: Arm, rows: list[Request]) -> None:
        """Keep what a decode step selected for the requests that want to know."""
        if not any(request.watched for request in rows):
            return
        if isinstance(arm.selector, Watchable):
            c = self._model.config
            width = arm.step.width(len(rows))
            found = activity(arm.selector, width, c.intermediate_size, c.num_key_value_heads)
            for place, request in enumerate(rows):
                if request.watched and not request.done:
                    request.activity.append(found.row(place))

    def _accept(self, step: Step, rows: list[Request]) -> None:
        """Sample each request's next token from its row of a step; end those that are through."""
        tokens = step.pick([self._samplers.get(request) for request in rows])
        for row, (request, token) in enumerate(zip(rows, tokens, strict=True)):
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
        top = self._samplers[request].params.logprobs
        if top is not None:
            request.logprobs.append(logprob_of(logits(), token, top))
        request.token_ids.append(token)
        if token in request.ends:
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
        self._samplers.pop(request, None)


def _not_finite(request: Request) -> DejavuError:
    return DejavuError(
        f"the logits after {len(request.prompt)} prompt and {len(request.token_ids)} answer tokens "
        "are not finite (NaN or Inf): the weights are damaged, or too large for their dtype; try "
        "dtype='fp32'"
    )
