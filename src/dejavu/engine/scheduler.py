"""Which requests run: rows of the decode step, blocks of the cache, turns of the prompts.

A request gets all blocks it can ever need when it is admitted, so a running one never waits for
memory and never has to be computed twice. Clients take turns, and a client's requests come in
their order. No torch here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Literal, Protocol

from dejavu.errors import DejavuError, InputError

if TYPE_CHECKING:
    from dejavu.engine.activity import LayerActivity
    from dejavu.engine.logprobs import TokenLogprob

FinishReason = Literal["stop", "length"]


class BlockPool(Protocol):
    """What the scheduler needs of a `KVCache`."""

    num_blocks: int

    @property
    def free_blocks(self) -> int:
        """Blocks not handed out."""
        ...

    def allocate(self, blocks: int) -> list[int]:
        """Hand out blocks, at most `free_blocks`."""
        ...

    def release(self, blocks: list[int]) -> None:
        """Take blocks back."""
        ...


@dataclass(eq=False)
class Request:
    """One sequence from prompt to end; `token_ids` grows while it runs.

    limit: tokens, prompt and answer together, at which the answer ends; ends: tokens that end it.
    token_ids: the answer so far, an end token included.
    finish_reason: "stop" after an end token, "length" at the limit; None while it runs, and after
        an error or an abort.
    error: why it could not go on.
    client: whose it is; clients take turns.
    arm: which of the engine's selectors its decode steps use.
    watched: keep `activity`, what each decode step selected for it (nothing where its selector
        cannot tell).
    logprobs, prompt_logprobs: of the answer's tokens, and of the prompt's from the second on; empty
        unless its params ask for them.
    fed: by place in the answer, tokens that its owner puts there in place of sampled ones (for
        measurements), told ahead so that a step may begin before the one ahead of it has ended.
    computed: prompt tokens in the cache, up to the last piece, which brings the first token.
    created, waited: `perf_counter` at its making, and seconds from then to its admission.
    prefill_seconds, decode_seconds: up to the first token (without waiting), and from it to the
        latest.
    """

    prompt: tuple[int, ...]
    limit: int
    ends: frozenset[int] = frozenset()
    client: str = ""
    arm: str = ""
    watched: bool = False
    computed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    activity: list[tuple[LayerActivity, ...]] = field(default_factory=list)
    fed: Mapping[int, int] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    done: bool = False
    finish_reason: FinishReason | None = None
    error: DejavuError | None = None
    created: float = field(default_factory=perf_counter)
    waited: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.token_ids)


class Scheduler:
    """Holds the waiting and the running requests; `running` is in the order of admission."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_rows: int, max_length: int) -> None:
        """block_size, max_length: in tokens; max_length bounds prompt and answer together."""
        self.max_length = max_length
        self.running: list[Request] = []
        self._waiting: dict[str, deque[Request]] = {}  # by client; the first one's turn is next
        self._prompts: deque[Request] = deque()  # running, without a token; the first one is next
        self._pool = pool
        self._block_size = block_size
        self._max_rows = max_rows

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return sum(map(len, self._waiting.values()))

    @property
    def reading(self) -> bool:
        """Whether a prompt is next: of a running request or of one that can start."""
        return bool(self._prompts) or self._next() is not None

    @property
    def rows(self) -> list[Request]:
        """Those of `running` that have a token to feed back: rows of decode steps."""
        return [request for request in self.running if request.token_ids]

    def check(self, prompt_length: int, max_tokens: int | None) -> int:
        """The `limit` of a request. Raises InputError, with both numbers, if it can never run."""
        if prompt_length >= self.max_length:
            raise InputError(
                f"the prompt has {prompt_length} tokens, and the context is {self.max_length} "
                "tokens long, the answer included: shorten the prompt or raise max_model_len"
            )
        longest = self.max_length - prompt_length
        limit = prompt_length + min(longest, max_tokens or longest)
        if self._blocks(limit) > self._pool.num_blocks:
            raise InputError(
                f"prompt and answer may take {limit} tokens, and the cache holds "
                f"{self._pool.num_blocks * self._block_size}: shorten the prompt or max_tokens"
            )
        return limit

    def add(self, request: Request) -> None:
        """Queue a request whose limit came from `check`."""
        self._waiting.setdefault(request.client, deque()).append(request)

    def admit(self) -> list[Request]:
        """Start the requests whose turn it is, as far as rows and blocks go; they hold theirs."""
        admitted: list[Request] = []
        while (request := self._next()) is not None:
            client = request.client
            queue = self._waiting[client]
            blocks = self._blocks(request.limit)
            request.blocks = self._pool.allocate(blocks)
            request.waited = perf_counter() - request.created
            self.running.append(request)
            self._prompts.append(request)
            admitted.append(request)
            queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue
        return admitted

    def _next(self) -> Request | None:
        """Whose turn it is, if there is a row and memory for it. Nobody overtakes: a long request
        must not starve behind short ones."""
        if not self._waiting or len(self.running) >= self._max_rows:
            return None
        request = next(iter(self._waiting.values()))[0]
        return request if self._blocks(request.limit) <= self._pool.free_blocks else None

    def next_prompts(self, chunk: int, least: int) -> list[tuple[Request, int]]:
        """Pieces of prompts to compute in one step, each with the number of tokens it ends at.

        Prompts take turns piece by piece, so a short one soon passes a long one. Where a prompt is
        cut depends on `chunk` alone, so its result cannot depend on the others.

        chunk: tokens of a piece, and of all pieces of the step together; least: what a piece counts
        for at least, however short.
        """
        pieces: list[tuple[Request, int]] = []
        room = chunk
        for request in self._prompts:
            end = min(request.computed + chunk, len(request.prompt))
            room -= max(end - request.computed, least)
            if pieces and room < 0:
                break
            pieces.append((request, end))
        return pieces

    def advance(self, request: Request, end: int) -> None:
        """A piece of a prompt is computed, and after the last one the request has a token."""
        if request in self._prompts:  # it may have ended
            self._prompts.remove(request)
            if end < len(request.prompt):
                request.computed = end
                self._prompts.append(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: DejavuError | None = None,
    ) -> None:
        """End a request, waiting or running, and free its row and blocks; harmless if done."""
        if request.done:
            return
        waiting = self._waiting.get(request.client, deque())
        for queue in (self.running, self._prompts, waiting):
            if request in queue:
                queue.remove(request)
        if not waiting:
            self._waiting.pop(request.client, None)
        blocks, request.blocks = request.blocks, []
        self._pool.release(blocks)
        request.finish_reason = reason
        request.error = error
        # Last, so that an interrupted call can be made again.
        request.done = True

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
