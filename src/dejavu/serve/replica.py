"""One copy of the app in an actor of Ray Serve, asked in ASGI's own messages.

Nothing here imports Ray: the actor's methods are plain ones.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any, NamedTuple
from uuid import uuid4

from dejavu.errors import DejavuError
from dejavu.serve.app import build_app
from dejavu.serve.logs import log_to_stderr
from dejavu.serve.mailbox import Mailbox
from dejavu.serve.models import serve_models
from dejavu.serve.process import settle
from dejavu.serve.settings import Settings

Message = MutableMapping[str, Any]


class Told(NamedTuple):
    """What a replica tells of itself. metrics: as Prometheus reads them."""

    name: str
    process: int
    running: int
    waiting: int
    metrics: bytes


class Replica:
    """The models of the settings, and the app over them."""

    async def __init__(self, settings: Settings, log_level: str) -> None:  # type: ignore[misc]
        """Loads the models. Ray Serve awaits this on the event loop that runs the methods.

        Raises DejavuError as `serve_models` does.
        """
        log_to_stderr(log_level)
        app = build_app(settings, serve_models(settings), guarded=False)
        self._app, self._hub = app, app.state.hub
        self._name = uuid4().hex[:8]
        settle()
        self._hub.worker.start(asyncio.get_running_loop())

    async def answer(
        self, scope: dict[str, Any], body: bytes
    ) -> AsyncGenerator[list[Message], None]:
        """The app's messages, each time all that are there: however many tokens came meanwhile,
        they take one journey. The first one has the key `route`, for the log of who asked, and the
        header that names the replica.

        Closing it, which Ray does when the caller cancels, ends the app's work as a client that
        leaves does.
        """
        mail: Mailbox[Message | None] = Mailbox()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.get_running_loop().create_future()  # whoever leaves cancels us
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["route"] = getattr(scope.get("route"), "path", "other")
                message["headers"] = [*message["headers"], (b"x-replica", self._name.encode())]
            mail.put(message)

        working = asyncio.ensure_future(self._app(scope, receive, send))
        working.add_done_callback(lambda _: mail.put(None))
        try:
            while True:
                messages = await mail.take()
                if said := [message for message in messages if message is not None]:
                    yield said
                if None in messages:
                    break
            await working
        finally:
            working.cancel()

    async def told(self) -> Told:
        """How it is."""
        engines = [served.engine for served in self._hub.served.values()]
        running = sum(engine.running for engine in engines)
        waiting = sum(engine.waiting for engine in engines)
        return Told(self._name, os.getpid(), running, waiting, self._hub.metrics.text())

    def check_health(self) -> None:
        """Asked by Ray Serve every few seconds; a replica that raises is replaced."""
        if not self._hub.worker.alive:
            raise DejavuError("the engine's thread has ended, or its GPU has failed")
