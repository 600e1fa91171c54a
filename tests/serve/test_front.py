"""What stands before the replicas, with a replica that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from starlette.routing import Route

from dejavu.errors import DejavuError
from dejavu.serve.app import build_app
from dejavu.serve.errors import ApiError
from dejavu.serve.front import Front
from dejavu.serve.guard import ROUTES, Message
from dejavu.serve.metrics import Metrics
from dejavu.serve.replica import Told
from dejavu.serve.settings import settings

SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}


class Endless:
    """A stream that says something at every turn of the event loop until it is cancelled."""

    def __init__(self, kind: bytes) -> None:
        self.cancelled = 0
        self._kind = kind

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        headers = [(b"content-type", self._kind)]
        start = {"type": "http.response.start", "status": 200, "headers": headers, "route": "/v1"}
        yield [start]
        while True:
            await asyncio.sleep(0)
            yield [{"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}]

    def cancel(self) -> None:
        self.cancelled += 1


class Player:
    """`Replicas` of one, whose answers are given."""

    def __init__(self, answering: Endless) -> None:
        self.answering = answering

    def ask(self, scope: dict[str, Any], body: bytes) -> Endless:
        return self.answering

    async def told(self, seconds: float) -> list[Told]:
        return []

    def error_of(self, error: Exception) -> ApiError:
        return ApiError("lost", 503)


def ended(kind: bytes) -> tuple[list[Message], Endless, Front]:
    """What a client got whose stream the server ended in the middle."""
    answering = Endless(kind)
    front = Front(Player(answering), Metrics([]))
    heard: list[Message] = []

    async def scene() -> None:
        unread: list[Message] = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            heard.append(message)
            await asyncio.sleep(0)  # a slow client: others get their turn meanwhile

        asking = asyncio.ensure_future(front(SCOPE | {}, receive, send))
        while len(heard) < 5:
            await asyncio.sleep(0)
        front.fail_all(ApiError("the server is stopping", 503))
        await asyncio.wait_for(asking, 10)

    asyncio.run(scene())
    return heard, answering, front


def test_nothing_comes_after_the_last_words_of_a_stream() -> None:
    heard, answering, front = ended(b"text/event-stream; charset=utf-8")
    assert b"the server is stopping" in heard[-1]["body"]
    assert not heard[-1]["more_body"]
    assert all(b"stopping" not in message.get("body", b"") for message in heard[:-1])
    assert answering.cancelled == 1
    assert front.open_jobs == 0


def test_an_answer_that_is_no_stream_is_broken_off() -> None:
    with pytest.raises(DejavuError, match="stopping"):
        ended(b"application/json")


def test_the_guard_knows_the_routes_of_the_app() -> None:
    app = build_app(settings({"models": [{"name": "a", "source": "a"}]}), {})
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert {path for path in paths if "{" not in path} == ROUTES
