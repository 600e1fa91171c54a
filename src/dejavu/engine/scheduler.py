"""Which requests run: rows of the decode step and blocks of the cache, first come, first served.

A request gets all blocks it can ever need when it is admitted, so a running one never waits for
memory and never has to be computed twice. No torch here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dejavu.errors import DejavuError, InputError

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

    limit: tokens, prompt and answer together, at which the answer ends.
    token_ids: the answer so far, an end token included.
    finish_reason: "stop" after an end token, "length" at the limit; None while it runs, and after
        an error or an abort.
    error: why it could not go on.
    prefill_seconds, decode_seconds: up to the first token (without waiting), and from it to the
        latest.
    """

    prompt: tuple[int, ...]
    limit: int
    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    done: bool = False
    finish_reason: FinishReason | None = None
    error: DejavuError | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.token_ids)


class Scheduler:
    """Holds the waiting and the running requests; `running` is the row order of a decode step."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_rows: int, max_length: int) -> None:
        """block_size, max_length: in tokens; max_length bounds prompt and answer together."""
        self.max_length = max_length
        self.running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._pool = pool
        self._block_size = block_size
        self._max_rows = max_rows

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

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
        self._waiting.append(request)

    def admit(self) -> list[Request]:
        """Start the requests whose prompts are to be computed now; they hold their blocks.

        Beside running requests it is one at a time: no more than one prompt ever stands between
        two tokens of an answer.
        """
        most = 1 if self.running else self._max_rows
        admitted: list[Request] = []
        while self._waiting and len(admitted) < most and len(self.running) < self._max_rows:
            blocks = self._blocks(self._waiting[0].limit)
            if blocks > self._pool.free_blocks:
                break  # nobody overtakes: a long request must not starve behind short ones
            request = self._waiting[0]
            request.blocks = self._pool.allocate(blocks)
            self.running.append(request)
            self._waiting.popleft()
            admitted.append(request)
        return admitted

    def finish(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: DejavuError | None = None,
    ) -> None:
        """End a request, waiting or running, and free its row and blocks; harmless if done."""
        if request.done:
            return
        for queue in (self.running, self._waiting):
            if request in queue:
                queue.remove(request)
        blocks, request.blocks = request.blocks, []
        self._pool.release(blocks)
        request.finish_reason = reason
        request.error = error
        # Last, so that an interrupted call can be made again.
        request.done = True

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
