"""Server-sent events, and what stands around the choices of every response."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dejavu import __version__
from dejavu.errors import DejavuError
from dejavu.serve import errors
from dejavu.serve.answers import Answers
from dejavu.serve.requests import Sampling
from dejavu.serve.responses import Envelope, Usage


class EventStream(StreamingResponse):
    """Pieces as server-sent events. However it ends, the jobs end with it."""

    def __init__(self, answers: Answers, pieces: AsyncGenerator[Envelope, None]) -> None:
        super().__init__(
            _lines(pieces),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that leaves cancels this."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close("left")


async def _lines(pieces: AsyncGenerator[Envelope, None]) -> AsyncGenerator[str, None]:
    try:
        async for piece in pieces:
            yield f"data: {piece.model_dump_json(exclude_unset=True)}\n\n"
        yield "data: [DONE]\n\n"
    except DejavuError as error:
        # The status is out already; clients know an error object in place of a piece.
        yield f"data: {json.dumps(errors.of(error).body())}\n\n"


def envelope(prefix: str, body: Sampling, answers: Answers) -> dict[str, Any]:
    """The fields of `Envelope`, and `object` set to its default so that it is sent."""
    job = answers.jobs[0]
    fields = {
        "id": f"{prefix}-{answers.request_id}",
        "object": {
            ("cmpl", False): "text_completion",
            ("cmpl", True): "text_completion",
            ("chatcmpl", False): "chat.completion",
            ("chatcmpl", True): "chat.completion.chunk",
        }[prefix, bool(body.stream)],
        "created": int(time.time()),
        "model": job.served.name,
        "system_fingerprint": f"dejavu-{__version__}",
        "sparsity": job.arm,
    }
    if warnings := body.warnings():
        fields["warnings"] = warnings
    return fields


def usage(answers: Answers, *, silent: bool = False) -> Usage:
    """Token counts; silent: the answers were not asked for."""
    said = 0 if silent else answers.completion_tokens
    return Usage(
        prompt_tokens=answers.prompt_tokens,
        completion_tokens=said,
        total_tokens=answers.prompt_tokens + said,
    )
