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
from dejavu.serve.responses import Choice, Envelope, Usage


class EventStream(StreamingResponse):
    """Server-sent events, and the one that ends them. However it ends, the jobs end with it."""

    def __init__(self, answers: Answers, events: AsyncGenerator[str, None]) -> None:
        super().__init__(
            _to_the_end(events),
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


class Frame:
    """The events of one stream: all of a piece but its choice is the same, so it is written once.

    Checked and written by pydantic in one, a piece took 14 us; a choice takes 6.
    """

    def __init__(self, empty: Envelope) -> None:
        """empty: a piece without choices, which come last in it."""
        text = empty.model_dump_json(exclude_unset=True)
        assert text.endswith("[]}")
        self._before = f"data: {text[:-2]}"

    def around(self, choice: Choice) -> str:
        """The event of a piece with that choice alone."""
        return f"{self._before}{choice.model_dump_json(exclude_unset=True)}]}}\n\n"


def event(piece: Envelope) -> str:
    """A piece as an event."""
    return f"data: {piece.model_dump_json(exclude_unset=True)}\n\n"


async def _to_the_end(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    try:
        async for some in events:
            yield some
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
