"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from dejavu.engine.output import Chunk
from dejavu.serve.answers import Answers
from dejavu.serve.requests import CompletionRequest
from dejavu.serve.responses import TextChoice, TextCompletion, TextLogprobs
from dejavu.serve.shaping import TextLogprobsShaper, activity_of, joined
from dejavu.serve.streaming import Frame, envelope, event, usage


class _Choice:
    """One answer as text, piece by piece, the echoed prompt before it."""

    def __init__(self, body: CompletionRequest, answers: Answers, index: int) -> None:
        self._job = answers.jobs[index]
        self._index = index
        self._silent = body.max_tokens == 0  # the prompt alone was asked for
        self._echo = bool(body.echo)
        self._text = body.prompts()[index // (body.n or 1)]
        codec = self._job.served.codec
        self._shaper = None if body.logprobs is None else TextLogprobsShaper(codec, body.logprobs)

    def piece(self, chunk: Chunk) -> TextChoice:
        """What a chunk adds."""
        text = ""
        logprobs: list[TextLogprobs] = []
        if self._echo:
            self._echo = False
            text, logprobs = self._prompt(chunk)
        if not self._silent:
            said, scored = self._answer(chunk)
            text, logprobs = text + said, logprobs + scored
        return TextChoice(
            index=self._index,
            text=text,
            finish_reason=chunk.finish_reason,
            logprobs=joined(logprobs) if logprobs else None,
            activity=activity_of(chunk),
        )

    def _answer(self, chunk: Chunk) -> tuple[str, list[TextLogprobs]]:
        return chunk.text, [] if self._shaper is None else [self._shaper.answer(chunk)]

    def _prompt(self, chunk: Chunk) -> tuple[str, list[TextLogprobs]]:
        ids = self._job.prompt
        text = self._text if isinstance(self._text, str) else self._job.served.codec.decode(ids)
        if self._shaper is None:
            return text, []
        return text, [self._shaper.prompt(ids, chunk.prompt_logprobs)]


def whole(
    body: CompletionRequest, answers: Answers, found: Sequence[Sequence[Chunk]]
) -> TextCompletion:
    """The response of a request without a stream."""
    choices = []
    for index, chunks in enumerate(found):
        choice = _Choice(body, answers, index)
        pieces = [choice.piece(chunk) for chunk in chunks]
        scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        choices.append(
            TextChoice(
                index=index,
                text="".join(piece.text for piece in pieces),
                finish_reason=pieces[-1].finish_reason,
                logprobs=joined(scored) if scored else None,
            )
        )
    counted = usage(answers, silent=body.max_tokens == 0)
    return TextCompletion(**envelope("cmpl", body, answers), choices=choices, usage=counted)


async def stream(body: CompletionRequest, answers: Answers) -> AsyncGenerator[str, None]:
    """The events of a streamed one."""
    around = envelope("cmpl", body, answers)
    frame = Frame(TextCompletion(**around, choices=[]))
    choices = [_Choice(body, answers, index) for index in range(len(answers.jobs))]
    async with aclosing(answers.events()) as events:
        async for chunks in events:
            yield "".join(frame.around(choices[index].piece(chunk)) for index, chunk in chunks)
    if body.stream_options is not None and body.stream_options.include_usage:
        counted = usage(answers, silent=body.max_tokens == 0)
        yield event(TextCompletion(**around, choices=[], usage=counted))
