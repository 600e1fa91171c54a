"""What listens under `--ray`: hands each request to a replica and passes on what it says.

Ray Serve has a proxy of its own. This one is here because that one breaks off a stream whose
replica dies without a word, where clients of OpenAI's API expect an error object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response

from dejavu.errors import DejavuError
from dejavu.serve import errors
from dejavu.serve.errors import ApiError
from dejavu.serve.guard import Message, Receive, Send, error_response
from dejavu.serve.metrics import Metrics
from dejavu.serve.replica import Told

_TOLD_SECONDS = 5.0  # that replicas get to tell of themselves
_REQUEST = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")
_ABOUT = ("root_path", "headers", "client", "server")


class Answering(Protocol):
    """A request at a replica: its messages as they come, until cancelled."""

    def __aiter__(self) -> AsyncIterator[Sequence[Message]]: ...

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        ...


class Replicas(Protocol):
    """Those that run at the moment."""

    def ask(self, scope: dict[str, Any], body: bytes) -> Answering:
        """Hand over a request."""
        ...

    async def told(self, seconds: float) -> list[Told]:
        """Of each one that says so in time."""
        ...

    def error_of(self, error: Exception) -> ApiError:
        """What a client gets to hear of an error that `ask` or its messages raised."""
        ...


class Front:
    """The ASGI app before the replicas; behind a `Guard`, which reads the body first."""

    def __init__(self, replicas: Replicas, metrics: Metrics) -> None:
        self._replicas, self._metrics = replicas, metrics
        self._ends: set[asyncio.Future[None]] = set()  # one an open request; set to end it
        self._closing = False

    @property
    def open_jobs(self) -> int:
        """Requests that have not ended."""
        return len(self._ends)

    def close(self) -> None:
        """Refuse new requests; those that are open go on."""
        self._closing = True

    def fail_all(self, error: DejavuError) -> None:
        """End all open requests with an error."""
        self._closing = True
        for end in self._ends:
            if not end.done():
                end.set_exception(error)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["path"] == "/health":
            scope["route"] = SimpleNamespace(path="/health")
            await (await self._health())(scope, receive, send)
        elif scope["path"] == "/metrics":
            scope["route"] = SimpleNamespace(path="/metrics")
            await (await self._text())(scope, receive, send)
        elif self._closing:
            await error_response(ApiError("the server is stopping", 503))(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        kind: bytes | None = None  # of the answer, once it has begun
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        answering: Answering | None = None

        async def relay() -> None:
            nonlocal kind, answering
            answering = self._replicas.ask(_plain(scope), body)
            async for messages in answering:
                for message in messages:
                    if (route := message.pop("route", None)) is not None:
                        scope["route"] = SimpleNamespace(path=route)
                        kind = dict(message["headers"]).get(b"content-type", b"")
                    await send(message)

        relaying = asyncio.ensure_future(relay())
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((relaying, leaving, end), return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
            elif end.done():
                end.result()
        except Exception as error:
            relaying.cancel()  # before the last words, or the replica's might come after them
            await asyncio.gather(relaying, return_exceptions=True)
            told = errors.of(self._told(error))
            if kind is None:
                await error_response(told)(scope, receive, send)
            elif kind.startswith(b"text/event-stream"):
                last = f"data: {json.dumps(told.body())}\n\n".encode()
                await send({"type": "http.response.body", "body": last, "more_body": False})
            else:
                raise  # the server breaks the connection off: the answer is not whole
        finally:
            self._ends.discard(end)
            for task in (relaying, leaving, end):
                task.cancel()
            await asyncio.gather(relaying, leaving, end, return_exceptions=True)
            if answering is not None:
                answering.cancel()

    def _told(self, error: Exception) -> DejavuError:
        return error if isinstance(error, DejavuError) else self._replicas.error_of(error)

    async def _health(self) -> Response:
        told = await self._replicas.told(_TOLD_SECONDS)
        status = "stopping" if self._closing else "ok" if told else "no replica"
        content = {
            "status": status,
            "running": sum(one.running for one in told),
            "waiting": sum(one.waiting for one in told),
            "replicas": [
                {
                    "name": one.name,
                    "process": one.process,
                    "running": one.running,
                    "waiting": one.waiting,
                }
                for one in told
            ],
        }
        return JSONResponse(content, 200 if told else 503)

    async def _text(self) -> Response:
        told = await self._replicas.told(_TOLD_SECONDS)
        both = CollectorRegistry()
        texts = [("front", self._metrics.text())]
        texts += [(one.name, one.metrics) for one in told]
        both.register(_Labelled(texts))
        return Response(
            generate_latest(both), media_type="text/plain; version=1.0.0; charset=utf-8"
        )


class _Labelled(Collector):
    """Several texts of metrics as one, each sample with the label of its text."""

    def __init__(self, texts: Iterable[tuple[str, bytes]]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        """All of them, by name."""
        found: dict[str, Metric] = {}
        for replica, text in self._texts:
            for metric in text_string_to_metric_families(text.decode()):
                whole = found.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                whole.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in metric.samples
                ]
        return found.values()


def _plain(scope: Message) -> dict[str, Any]:
    """What of a scope can travel."""
    return {key: scope[key] for key in (*_REQUEST, *_ABOUT) if key in scope}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
