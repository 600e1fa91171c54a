"""The answers to one request: several jobs, one stream of their events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from time import monotonic

from dejavu.engine.output import Chunk
from dejavu.errors import DejavuError
from dejavu.serve.errors import ApiError
from dejavu.serve.worker import Job, Worker

log = logging.getLogger("dejavu.serve")


class Answers:
    """Jobs that are on their way; `close` drops those that nobody waits for any more."""

    def __init__(
        self, worker: Worker, jobs: Sequence[Job], request_id: str, user: str | None = None
    ) -> None:
        """Submits the jobs. Raises ApiError as `Worker.submit` does."""
        self.jobs = list(jobs)
        self.request_id = request_id
        self._user = user
        self._worker = worker
        self._mail = jobs[0].mail
        self._began = monotonic()
        self._open = {job.index for job in jobs}
        self._closed = False
        self.completion_tokens = 0
        worker.submit(jobs)

    @property
    def prompt_tokens(self) -> int:
        """Of all jobs; the n answers to one prompt share it."""
        return sum(len(p) for p in {id(job.prompt): job.prompt for job in self.jobs}.values())

    async def events(self) -> AsyncGenerator[list[tuple[int, Chunk]], None]:
        """(index, chunk) in the order in which they come, each time all that are there. Raises the
        error of a job, which ends the others too."""
        try:
            while self._open:
                chunks: list[tuple[int, Chunk]] = []
                failed: DejavuError | None = None
                for index, event in await self._mail.take():
                    if isinstance(event, DejavuError):
                        failed = event
                        break
                    self.completion_tokens += len(event.token_ids)
                    if event.completion is not None:
                        self._open.discard(index)
                    chunks.append((index, event))
                if chunks:
                    yield chunks
                if failed is not None:
                    self.close("error")
                    raise failed
            self.close("finished")
        finally:
            self.close("left")

    def close(self, outcome: str) -> None:
        """Drop the jobs that have not ended; the first call's outcome goes to the log."""
        if not self._closed:
            self._closed = True
            self._worker.cancel(self.jobs)
            self._log(outcome)

    async def gather(self, leaving: Awaitable[None]) -> list[list[Chunk]]:
        """All chunks by index. Raises a job's error, and ClientGoneError when `leaving` ends first,
        which it does when nobody listens any more."""
        collecting = asyncio.ensure_future(self.all())
        left = asyncio.ensure_future(leaving)
        try:
            await asyncio.wait((collecting, left), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ClientGoneError
            return await collecting
        finally:
            for task in (collecting, left):
                task.cancel()
            await asyncio.gather(collecting, left, return_exceptions=True)

    async def all(self) -> list[list[Chunk]]:
        """All chunks by index. Raises a job's error."""
        found: list[list[Chunk]] = [[] for _ in self.jobs]
        async with aclosing(self.events()) as events:
            async for chunks in events:
                for index, chunk in chunks:
                    found[index].append(chunk)
        return found

    def _log(self, outcome: str) -> None:
        job = self.jobs[0]
        log.info(
            "answer",
            extra={
                "id": self.request_id,
                "user": self._user,
                "model": job.served.name,
                "sparsity": job.arm,
                "client": job.client,
                "outcome": outcome,
                "answers": len(self.jobs),
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "queue_seconds": _round(job.started and job.started - job.submitted),
                "seconds": _round(monotonic() - self._began),
            },
        )


class ClientGoneError(ApiError):
    """Nobody is left to read the answer; the status is nginx's for that."""

    def __init__(self) -> None:
        super().__init__("the client left", 499)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
