"""The ASGI app: routes, errors, life from start to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from dejavu import __version__
from dejavu.errors import DejavuError
from dejavu.serve import chat, errors, text
from dejavu.serve.guard import Guard, client_of, error_response
from dejavu.serve.hub import Hub, check_length
from dejavu.serve.models import ServedModel
from dejavu.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from dejavu.serve.responses import (
    ERRORS,
    ChatCompletion,
    Health,
    ModelCard,
    ModelList,
    Text,
    TextCompletion,
    Tokens,
)
from dejavu.serve.settings import Settings
from dejavu.serve.streaming import EventStream

PAGE = Path(__file__).parent / "page"
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


def build_app(
    settings: Settings, served: Mapping[str, ServedModel], *, guarded: bool = True
) -> FastAPI:
    """The app over models that are loaded; its worker lives as long as the app's lifespan.

    guarded: behind a `Guard`; without, something in front of the app has one.

    `app.state.hub` is what the server that runs it needs to stop it cleanly.
    """
    hub = Hub.over(settings, served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        hub.worker.start(asyncio.get_running_loop())
        yield
        hub.worker.stop()

    app = FastAPI(
        title="dejavu",
        summary="OpenAI's API over contextually sparse models.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page of it loads scripts from elsewhere
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.hub = hub
    if guarded:
        app.add_middleware(Guard, settings=settings, metrics=hub.metrics)
    _add_errors(app)
    _add_completions(app, hub)
    _add_models(app, hub)
    _add_operation(app, hub)
    _add_page(app)
    _drop_422(app)
    return app


def _add_completions(app: FastAPI, hub: Hub) -> None:
    @app.post("/v1/completions", response_model=TextCompletion, responses={**ERRORS, **_STREAM})
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        try:
            answers = await hub.ask_text(body, client_of(http.scope))
            if body.stream:
                return EventStream(answers, text.stream(body, answers))
            found = await answers.gather(_left(http))
        except DejavuError as error:
            raise errors.of(error, list(CompletionRequest.model_fields)) from error
        return _json(text.whole(body, answers, found))

    @app.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses={**ERRORS, **_STREAM}
    )
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        try:
            answers = await hub.ask_chat(body, client_of(http.scope))
            if body.stream:
                return EventStream(answers, chat.stream(body, answers))
            found = await answers.gather(_left(http))
        except DejavuError as error:
            raise errors.of(error, list(ChatRequest.model_fields)) from error
        return _json(chat.whole(body, answers, found))


def _add_models(app: FastAPI, hub: Hub) -> None:
    @app.get("/v1/models")
    async def models() -> ModelList:
        """All models."""
        return ModelList(data=[served.card() for served in hub.served.values()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        """One model; its name may hold slashes."""
        return hub.model(name).card()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        """Token ids of a prompt, or of a conversation as its template writes it."""
        served = hub.model(body.model)
        longest = served.engine.max_model_len
        if (body.prompt is None) == (body.messages is None):
            raise errors.ApiError("give a prompt or messages", param="prompt")
        if body.messages is not None:
            messages = [m.model_dump(exclude_unset=True) for m in body.messages]
            ids = await asyncio.to_thread(served.codec.encode_chat, messages)
        else:
            assert body.prompt is not None
            check_length(body.prompt, served.codec, longest)
            ids = await asyncio.to_thread(served.codec.encode, body.prompt)
        return Tokens(tokens=ids, count=len(ids), max_model_len=longest)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Text:
        """Text of token ids; special ones have none."""
        served = hub.model(body.model)
        if body.tokens and (wrong := max(body.tokens)) >= served.engine.vocab_size:
            raise errors.ApiError(
                f"tokens: {wrong} is not below {served.engine.vocab_size}", param="tokens"
            )
        return Text(prompt=await asyncio.to_thread(served.codec.decode, body.tokens))


def _add_operation(app: FastAPI, hub: Hub) -> None:
    @app.get("/health")
    async def health(response: Response) -> Health:
        """Whether it is up, and how busy. 503: it has to be started again."""
        engines = [served.engine for served in hub.served.values()]
        response.status_code = 200 if hub.worker.alive else 503
        up: Literal["ok", "stopping"] = "stopping" if hub.worker.closing else "ok"
        return Health(
            status=up if hub.worker.alive else "failed",
            running=sum(engine.running for engine in engines),
            waiting=sum(engine.waiting for engine in engines),
        )

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(hub.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": _POLICY})

    app.mount("/page", StaticFiles(directory=PAGE), name="page")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(DejavuError)
    async def known(http: Request, error: DejavuError) -> Response:
        return error_response(errors.of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> Response:
        problems = error.errors()
        if problems[0]["loc"] == ("body",):
            kind = http.headers.get("content-type", "")
            return error_response(errors.no_object(error.body, kind))
        return error_response(errors.invalid(problems))

    @app.exception_handler(HTTPException)
    async def framework(http: Request, error: HTTPException) -> Response:
        return error_response(_refused(http, error))

    @app.exception_handler(Exception)
    async def unknown(http: Request, error: Exception) -> Response:
        return error_response(
            errors.ApiError("something went wrong in the server; see its log", 500)
        )


def _refused(http: Request, error: HTTPException) -> errors.ApiError:
    """What the framework refused, in words that say what to do."""
    headers = dict(error.headers or {})
    asked, text = f"{http.method} {http.url.path}", error.detail
    if error.status_code == 404:
        text = f"there is no {asked} here; /openapi.json lists what there is"
    elif error.status_code == 405:
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # see `Guard`
        text = f"there is no {asked} here; this path takes {headers.get('Allow', 'another method')}"
    elif error.__cause__ is not None and (why := errors.unreadable(error.__cause__)):
        text = f"the body cannot be read: {why}"
    return errors.ApiError(text, error.status_code, headers=headers)


def _drop_422(app: FastAPI) -> None:
    """From the schema: FastAPI puts it there by itself, and a wrong request is a 400 here."""
    schema = app.openapi()  # made once, and kept by the app
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _json(body: TextCompletion | ChatCompletion) -> Response:
    content = body.model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json")
