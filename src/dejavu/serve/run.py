"""Run the app: a process that stops without losing anybody's answer."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket

import uvicorn

from dejavu.errors import InputError
from dejavu.serve.app import build_app
from dejavu.serve.errors import ApiError
from dejavu.serve.hub import Hub
from dejavu.serve.models import serve_models
from dejavu.serve.settings import Settings

log = logging.getLogger("dejavu.serve")
_BACKLOG = 2048  # connections that may wait to be taken up


class Server(uvicorn.Server):
    """Lets running answers finish when asked to stop, and tells those that do not get to."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, wait, then end what is left with an error of its own."""
        worker = self._hub.worker
        worker.close()
        log.info("stopping", extra={"open": worker.open_jobs})
        ending = asyncio.ensure_future(self._end_late_ones())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late_ones(self) -> None:
        await asyncio.sleep(self._hub.settings.grace)
        stopped = ApiError("the server is stopping; the answer is not complete", 503)
        self._hub.worker.fail_all(stopped)


def run(settings: Settings) -> None:
    """Load the models and serve until SIGINT or SIGTERM; a second one ends it at once.

    Raises DejavuError where a model cannot be loaded or the address cannot be used.
    """
    listener = listen(settings)
    try:
        _allow_many_connections()
        served = serve_models(settings)
        app = build_app(settings, served)
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
        log.info("serving", extra={"url": f"http://{shown}:{port}", "models": list(served)})
        Server(config, app.state.hub).run([listener])
    finally:
        listener.close()


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


def _allow_many_connections() -> None:
    """As many open files as the system lets this process have; a connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
