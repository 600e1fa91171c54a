"""What every request passes first: its host, its key, its size; and what it leaves in the log.

Plain ASGI: the framework's middleware base class would hide a client that leaves.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any

from starlette.responses import JSONResponse

from dejavu.serve.errors import ApiError
from dejavu.serve.metrics import Metrics
from dejavu.serve.settings import Settings

log = logging.getLogger("dejavu.serve")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = ("/", "/health")  # and the page's files: without them nobody could enter a key
# Names for what is refused before it gets to a route; any other path is `other`, however many.
ROUTES = frozenset(
    {
        "/",
        "/health",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    }
)


class Guard:
    """Wraps the app."""

    def __init__(self, app: App, settings: Settings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._limit = settings.max_body
        # A page from elsewhere can make a browser ask a server on this machine under a name of its
        # own (DNS rebinding). Where there is no key, only names of this machine get an answer.
        self._local_only = is_loopback(settings.host) and self._key is None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Refuse or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = monotonic()
        status = 0
        asked = scope
        if head := scope["method"] == "HEAD":  # what GET would say, without its body
            scope = {**scope, "method": "GET"}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-content-type-options", b"nosniff"))
            elif head:
                message["body"] = b""
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await error_response(refusal)(scope, receive, sending)
            else:
                await self._app(scope, await self._read(receive), sending)
        except ApiError as error:
            await error_response(error)(scope, receive, sending)
        finally:
            known = scope["path"] if scope["path"] in ROUTES else "other"
            route = getattr(scope.get("route"), "path", known)
            self._metrics.response(route, status)
            log.info(
                "http",
                extra={
                    "method": asked["method"],
                    "route": route,
                    "status": status,
                    "client": client_of(scope),
                    "seconds": round(monotonic() - began, 4),
                },
            )

    def _refusal(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        headers = dict(scope["headers"])
        if self._local_only and not is_loopback(_host(headers.get(b"host", b""))):
            return ApiError(
                "this server answers to names of this machine only; start it with --api-key or "
                "another --host to change that",
                403,
            )
        path = scope["path"]
        if self._key is not None and path not in OPEN and not path.startswith("/page/"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._key):
                return ApiError(
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._limit:
            return self._too_large()
        return None

    async def _read(self, receive: Receive) -> Receive:
        """The whole body, for its length may not be declared; what comes after it as it comes."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                break
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_large()
            if not message.get("more_body", False):
                message = {"type": "http.request", "body": bytes(body), "more_body": False}
                break
        waiting = [message]

        async def receiving() -> Message:
            return waiting.pop() if waiting else await receive()

        return receiving

    def _too_large(self) -> ApiError:
        return ApiError(f"the body is larger than {self._limit} bytes", 413)


def error_response(error: ApiError) -> JSONResponse:
    """The error as a response."""
    headers = error.headers
    if error.status == 413:
        headers = {**headers, "Connection": "close"}  # what still comes is not read
    return JSONResponse(error.body(), error.status, headers)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client_of(scope: MutableMapping[str, Any]) -> str:
    """Whose turn a request takes: the address it came from."""
    client = scope.get("client")
    return client[0] if client else ""


def _host(header: bytes) -> str:
    host = header.decode("latin-1")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
