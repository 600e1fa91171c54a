"""Run the app: a process that stops without losing anybody's answer."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from dejavu.errors import DejavuError, InputError
from dejavu.serve.app import build_app
from dejavu.serve.errors import ApiError
from dejavu.serve.models import serve_models
from dejavu.serve.process import settle, unsettle
from dejavu.serve.settings import Settings

log = logging.getLogger("dejavu.serve")
_BACKLOG = 2048  # connections that may wait to be taken up


class Working(Protocol):
    """What answers requests, and has to end some day."""

    @property
    def open_jobs(self) -> int:
        """Those that have not ended."""
        ...

    def close(self) -> None:
        """Refuse new ones; those that are open go on."""
        ...

    def fail_all(self, error: DejavuError) -> None:
        """End all open ones with an error."""
        ...


class Server(uvicorn.Server):
    """Lets running answers finish when asked to stop, and tells those that do not get to."""

    def __init__(self, config: uvicorn.Config, working: Working, grace: float) -> None:
        """grace: seconds that running answers get."""
        super().__init__(config)
        self._working, self._grace = working, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, wait, then end what is left with an error of its own."""
        self._working.close()
        log.info("stopping", extra={"open": self._working.open_jobs})
        ending = asyncio.ensure_future(self._end_late_ones())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_ones(self) -> None:
        await asyncio.sleep(self._grace)
        stopped = ApiError("the server is stopping; the answer is not complete", 503)
        self._working.fail_all(stopped)


def run(settings: Settings) -> None:
    """Load the models and serve until SIGINT or SIGTERM; a second one ends it at once.

    Raises DejavuError where a model cannot be loaded or the address cannot be used.
    """
    listener = listen(settings)
    try:
        allow_many_connections()
        app = build_app(settings, serve_models(settings))
        settle()
        serve_on(listener, app, app.state.hub.worker, settings)
    finally:
        listener.close()
        unsettle()


def serve_on(listener: socket.socket, app: ASGIApp, working: Working, settings: Settings) -> None:
    """Serve an app until SIGINT or SIGTERM, then let what is `working` behind it end cleanly."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # A little longer than the answers get, so that their last words are heard.
        timeout_graceful_shutdown=int(settings.grace) + 5,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    models = [entry.name for entry in settings.models]
    log.info("serving", extra={"url": f"http://{shown}:{port}", "models": models})
    Server(config, working, settings.grace).run([listener])


def listen(settings: Settings) -> socket.socket:
    """The listening socket, taken before a model is loaded, so that a busy port shows at once.

    Raises InputError naming the address.
    """
    try:
        info = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = info[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise InputError(f"cannot listen on {settings.host}:{settings.port}: {error}") from error


def allow_many_connections() -> None:
    """As many open files as the system lets this process have; a connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
