"""Files of requests, in the format of OpenAI's batch API, answered here without HTTP.

A line asks for one completion (https://platform.openai.com/docs/guides/batch): `custom_id`,
`method`, `url`, `body`. A few more lines than fit into the engine's batch are open at any time, so
that it stays full. A request that the server would refuse has its status and error in `response`;
a line that is no request has `error`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from dejavu.errors import DejavuError, InputError
from dejavu.serve import chat, errors, text
from dejavu.serve.batch_files import (
    LONGEST_LINE,
    Line,
    Results,
    partial_of,
    read_kept,
    read_lines,
)
from dejavu.serve.errors import ApiError
from dejavu.serve.hub import Hub
from dejavu.serve.models import serve_models
from dejavu.serve.requests import ChatRequest, CompletionRequest
from dejavu.serve.settings import Settings

log = logging.getLogger("dejavu.serve")
Progress = Callable[[int, int], None]
_CLIENT = "batch"


class BatchLine(BaseModel):
    """What a line holds; other keys are ignored."""

    model_config = ConfigDict(strict=True)
    custom_id: str | None = None
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass
class Summary:
    """lines, errors: of the whole file. kept: lines answered by earlier runs. The tokens (those of
    answers in `tokens`) and seconds are of this run."""

    lines: int
    errors: int = 0
    kept: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of answers; 0 where nothing was left to do."""
        return self.tokens / self.seconds if self.seconds else 0.0


Record = Callable[[Line, dict[str, Any]], None]
Answering = Callable[[Settings, Iterable[Line], Record], None]


def run_batch(
    settings: Settings,
    source: Path,
    out: Path,
    progress: Progress = lambda done, total: None,
    answering: Answering | None = None,
) -> Summary:
    """Answer every line of a file. OUT appears when all are there, in the order of the input.

    progress: called with lines done and all lines. What is interrupted, by whatever, goes on from
    OUT.partial at the next call with the same input and models.
    answering: answers lines, in whatever order, and records each; default: `answer_here`.

    Raises InputError where the input has no lines or a `custom_id` twice, where OUT holds something
    else or the partial file is of another input, DejavuError as `serve_models` does or where
    nothing can be written.
    """
    if not source.is_file():
        raise InputError(f"cannot read {source}: it is no file")
    if out.is_dir():
        raise InputError(f"{out} is a folder; name a file for the answers")
    if out.exists() and out.samefile(source):
        raise InputError(f"{out} is the input; choose another file for the answers")
    run = _fingerprint(settings)
    wanted = _wanted(source, run)
    if out.exists():
        return _complete(out, wanted)
    with Results(out) as results:
        for number, one in results.kept.items():
            if wanted.get(number) != one.digest:
                raise InputError(
                    f"{results.partial} was begun with another input or other options (line "
                    f"{number} differs); use those again, delete it, or choose another OUT"
                )
        summary = Summary(lines=len(wanted), kept=len(results.kept))
        progress(summary.kept, summary.lines)

        def record(line: Line, answer: dict[str, Any]) -> None:
            response = answer["response"]
            failed = response is None or response["status_code"] != 200
            results.add(line, answer, failed=failed)
            if not failed:
                usage = response["body"]["usage"]
                summary.prompt_tokens += usage["prompt_tokens"]
                summary.tokens += usage["completion_tokens"]
            progress(len(results.kept), summary.lines)

        if summary.kept < summary.lines:
            left = (line for line in read_lines(source, run) if line.number not in results.kept)
            began = perf_counter()
            (answering or answer_here)(settings, left, record)
            summary.seconds = perf_counter() - began
        results.finish()
        summary.errors = sum(one.failed for one in results.kept.values())
    return summary


def _wanted(source: Path, run: str) -> dict[int, str]:
    """Digests of the lines, by number. Raises InputError where there is none, or where two have the
    same `custom_id`: nobody could tell their answers apart."""
    wanted: dict[int, str] = {}
    first: dict[str, int] = {}
    for line in read_lines(source, run):
        wanted[line.number] = line.digest
        try:
            custom_id = _parse(line).custom_id
        except _NoRequestError:  # answered as an error in its place
            continue
        if custom_id is not None and first.setdefault(custom_id, line.number) != line.number:
            raise InputError(
                f"{source}: the lines {first[custom_id]} and {line.number} have the same custom_id "
                f"{custom_id!r}; give each one of its own"
            )
    if not wanted:
        raise InputError(f"{source} holds no requests; give one a line")
    return wanted


def _fingerprint(settings: Settings) -> str:
    """Of what the answers depend on beside the input."""
    options: list[Any] = [[entry.model_dump() for entry in settings.models], settings.max_model_len]
    if settings.on_gpu:  # where texts differ from a CPU's by rounding, on all GPUs alike
        options.append(["cuda", settings.lazy_kv, settings.whole_layers])
    told = json.dumps(options, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _complete(out: Path, wanted: dict[int, str]) -> Summary:
    try:
        kept = read_kept(out)
    except OSError as error:
        raise InputError(f"{out} exists and cannot be read: {error.strerror or error}") from error
    found = {number: one.digest for number, one in kept.items()}
    why = None
    if max((one.end for one in kept.values()), default=0) != out.stat().st_size:
        why = f"it is damaged behind its first {len(kept)} answers"
    elif wrong := [n for n, digest in wanted.items() if found.get(n, digest) != digest]:
        why = f"it has the answers to another input or of other options (line {wrong[0]} differs)"
    elif found.keys() != wanted.keys():
        why = f"it has {len(found)} answers, and the input {len(wanted)} lines"
    if why is not None:
        raise InputError(f"{out} exists: {why}; delete it or choose another OUT")
    partial_of(out).unlink(missing_ok=True)  # of a run that was killed after it wrote OUT
    failed = sum(one.failed for one in kept.values())
    return Summary(lines=len(wanted), kept=len(kept), errors=failed)


def answer_here(settings: Settings, left: Iterable[Line], record: Record) -> None:
    """By models in this process."""
    asyncio.run(_answer_all(batch_hub(settings), left, record))


def batch_hub(settings: Settings) -> Hub:
    """With models loaded and room for all lines that are open at once: nothing is ever refused
    because the queue is full. Its worker is not started. Raises DejavuError as `serve_models`."""
    room = {"max_queue": open_lines(settings) * settings.max_choices}
    settings = settings.model_copy(update=room)
    return Hub.over(settings, serve_models(settings))


def open_lines(settings: Settings) -> int:
    """Lines that are being answered at any time."""
    return 2 * settings.max_batch


async def _answer_all(hub: Hub, left: Iterable[Line], record: Record) -> None:
    hub.worker.start(asyncio.get_running_loop())
    lines = iter(left)  # all lanes take from it

    async def lane() -> None:
        for line in lines:
            record(line, await answer_line(hub, line))
            await asyncio.sleep(0)  # many bad lines in a row must not keep Ctrl-C waiting

    lanes = [asyncio.create_task(lane()) for _ in range(open_lines(hub.settings))]
    try:
        await asyncio.gather(*lanes)
    finally:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        hub.worker.stop()


class _NoRequestError(Exception):
    """A line that is none; the text says why."""

    def __init__(self, why: str, custom_id: str | None = None) -> None:
        super().__init__(why)
        self.custom_id = custom_id


async def answer_line(hub: Hub, line: Line) -> dict[str, Any]:
    """What stands in the answers for a line, without its id."""
    try:
        asked = _parse(line)
    except _NoRequestError as error:
        told = {"code": "invalid_line", "message": f"line {line.number}: {error}"}
        return {"custom_id": error.custom_id, "response": None, "error": told}
    try:
        status, body = 200, await _ask(hub, asked, line.id)
    except ApiError as error:
        status, body = error.status, error.body()
    except Exception:  # a bug of ours must not cost the other lines
        log.exception("a line failed", extra={"line": line.number})
        unknown = ApiError("something went wrong; see the log", 500)
        status, body = unknown.status, unknown.body()
    response = {"status_code": status, "request_id": line.id, "body": body}
    return {"custom_id": asked.custom_id, "response": response, "error": None}


def _parse(line: Line) -> BatchLine:
    if line.content is None:
        raise _NoRequestError(f"it is longer than {LONGEST_LINE} bytes")
    try:
        # utf-8-sig: some editors begin a file with a mark.
        entry = json.loads(line.content.decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _NoRequestError(str(errors.unreadable(error))) from error
    try:
        return BatchLine.model_validate(entry)
    except ValidationError as error:
        given = entry.get("custom_id") if isinstance(entry, dict) else None
        why = str(errors.invalid(error.errors()))
        raise _NoRequestError(why, given if isinstance(given, str) else None) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


async def _ask(hub: Hub, asked: BatchLine, request_id: str) -> dict[str, Any]:
    kind = ChatRequest if asked.url == "/v1/chat/completions" else CompletionRequest
    completion: BaseModel
    try:
        request = kind.model_validate(asked.body)
        if request.stream:
            raise ApiError("stream: a batch has whole answers only; leave it out", param="stream")
        if isinstance(request, ChatRequest):
            answers = await hub.ask_chat(request, _CLIENT, request_id)
            completion = chat.whole(request, answers, await answers.all())
        else:
            answers = await hub.ask_text(request, _CLIENT, request_id)
            completion = text.whole(request, answers, await answers.all())
    except ValidationError as error:
        raise errors.invalid(error.errors()) from error
    except DejavuError as error:
        raise errors.of(error, list(kind.model_fields)) from error
    return completion.model_dump(mode="json", exclude_unset=True)
