"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from dejavu.engine.codec import Codec
from dejavu.engine.output import Chunk
from dejavu.serve.answers import Answers
from dejavu.serve.requests import ChatRequest
from dejavu.serve.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
)
from dejavu.serve.shaping import activity_of, chat_logprobs
from dejavu.serve.streaming import Frame, envelope, event, usage


def whole(body: ChatRequest, answers: Answers, found: Sequence[Sequence[Chunk]]) -> ChatCompletion:
    """The response of a request without a stream."""
    codec = answers.jobs[0].served.codec
    choices = [
        ChatChoice(
            index=index,
            message=AnswerMessage(
                role="assistant",  # said, although the default: what is unset is not sent
                content="".join(chunk.text for chunk in chunks),
                refusal=None,
            ),
            finish_reason=chunks[-1].finish_reason,
            logprobs=_logprobs(body, codec, chunks),
        )
        for index, chunks in enumerate(found)
    ]
    return ChatCompletion(
        **envelope("chatcmpl", body, answers), choices=choices, usage=usage(answers)
    )


async def stream(body: ChatRequest, answers: Answers) -> AsyncGenerator[str, None]:
    """The events of a streamed one; the first ones of each answer tell the role."""
    around = envelope("chatcmpl", body, answers)
    frame = Frame(ChatChunk(**around, choices=[]))
    codec = answers.jobs[0].served.codec
    for index in range(len(answers.jobs)):
        begun = Delta(role="assistant", content="")
        yield frame.around(
            ChatChunkChoice(index=index, delta=begun, finish_reason=None, logprobs=None)
        )

    def piece(index: int, chunk: Chunk) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=Delta(content=chunk.text),
            finish_reason=chunk.finish_reason,
            logprobs=_logprobs(body, codec, [chunk]),
            activity=activity_of(chunk),
        )

    async with aclosing(answers.events()) as events:
        async for chunks in events:
            yield "".join(frame.around(piece(index, chunk)) for index, chunk in chunks)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event(ChatChunk(**around, choices=[], usage=usage(answers)))


def _logprobs(body: ChatRequest, codec: Codec, chunks: Sequence[Chunk]) -> ChatLogprobs | None:
    if not body.logprobs:
        return None
    return chat_logprobs(codec, [c.logprob for c in chunks if c.logprob is not None])
