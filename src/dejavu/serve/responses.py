"""What clients get: OpenAI's objects, with a few fields of our own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Finish = Literal["stop", "length"]


class Usage(BaseModel):
    """Token counts of a request, all its answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class LayerActivityOut(BaseModel):
    """One layer for one token: percent selected of each block of neurons and of all, and for each
    group of heads whether it was computed."""

    neurons: list[int]
    density: float
    heads: list[int]


class TextLogprobs(BaseModel):
    """Of a text completion. text_offset: where each token begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Alternative(BaseModel):
    """One token; bytes: of its text, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """One token of the answer with the likeliest ones in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    """Of a chat completion."""

    content: list[ChatToken]
    refusal: None = None


class Choice(BaseModel):
    """activity: with a choice of a stream, one entry a layer; null for a token that was computed
    dense, as the first one is."""

    index: int
    finish_reason: Finish | None
    activity: list[LayerActivityOut] | None = None


class TextChoice(Choice):
    """Of a text completion, whole or a piece."""

    text: str
    logprobs: TextLogprobs | None


class AnswerMessage(BaseModel):
    """The assistant's."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Delta(BaseModel):
    """What a piece adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(Choice):
    """Of a whole chat completion."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice):
    """Of a piece."""

    delta: Delta
    logprobs: ChatLogprobs | None


class Envelope(BaseModel):
    """Around the choices. sparsity: the plan's level, or dense. warnings: what was ignored."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    sparsity: str
    warnings: list[str] | None = None


class TextCompletion(Envelope):
    """A text completion; a stream sends several, with usage in the last if asked for."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = None


class ChatCompletion(Envelope):
    """A whole chat completion."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatChunk(Envelope):
    """A piece of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelShape(BaseModel):
    """What the page draws: layers, blocks of neurons in each, groups of heads."""

    layers: int
    neurons: int
    blocks: int
    heads: int


class ModelCard(BaseModel):
    """A model that can be asked. sparsity: the values that requests may name; level: what `plan`
    and no value mean."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dejavu"
    max_model_len: int
    chat: bool
    sparsity: list[str]
    level: str
    shape: ModelShape


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """Of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    """Of /detokenize."""

    prompt: str


class Health(BaseModel):
    """status: failed where the server has to be started again."""

    status: Literal["ok", "stopping", "failed"]
    running: int
    waiting: int


class ErrorObject(BaseModel):
    """param: the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Of every answer that is no 200."""

    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; `param` names the field."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "No such model or path."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "The queue is full; see Retry-After."},
    503: {"model": ErrorBody, "description": "The server is stopping."},
}
