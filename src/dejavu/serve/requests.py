"""What clients send: OpenAI's fields and a few of our own, checked."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from dejavu.engine.codec import Message
from dejavu.engine.params import REPETITION_PENALTIES, SamplingParams
from dejavu.serve import fields
from dejavu.serve.errors import ApiError

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class StreamOptions(BaseModel):
    """include_usage: a last chunk that holds the token counts and no choices."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: never added


class Sampling(BaseModel):
    """Fields of both kinds of completion. null means the default everywhere."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str = Field(description="One of /v1/models.")
    max_tokens: int | None = Field(
        None, ge=0, description="New tokens at most; default: up to the end of the context."
    )
    temperature: Number | None = Field(None, ge=0, le=2, description="Default 1; 0 is greedy.")
    top_p: Number | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=128, description="Answers to each prompt.")
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The i-th of n answers draws from seed + i."
    )
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Number] | None = None
    user: str | None = Field(None, description="Stands in the log.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = Field(None, ge=-1, description="Not OpenAI's.")
    min_p: Number | None = Field(None, ge=0, le=1, description="Not OpenAI's.")
    repetition_penalty: Number | None = Field(
        None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1], description="Not OpenAI's."
    )
    stop_token_ids: list[TokenId] | None = Field(None, description="Not OpenAI's.")
    ignore_eos: bool | None = Field(None, description="Not OpenAI's.")
    sparsity: str | None = Field(
        None, description="Not OpenAI's. plan (default), dense, or a level of the plan by its name."
    )
    activity: bool | None = Field(
        None, description="Not OpenAI's. Tell for every token which neurons and heads were active."
    )

    def warnings(self) -> list[str]:
        """Of fields that nobody knows. Raises ApiError for one of OpenAI's without an effect here,
        and for stream_options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream: true", param="stream_options")
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name not in self.unsupported:
                unknown.append(f"the field {name!r} is not known and was ignored")
            elif value is not None and value not in self.unsupported[name]:
                raise ApiError(f"{name} is not supported; leave it out", param=name)
        return unknown

    def sampling(self, choice: int, **special: Any) -> SamplingParams:
        """Of the i-th answer to a prompt. Raises InputError naming a field."""
        return SamplingParams(
            max_tokens=special.pop("max_tokens", self.max_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=self.stop,
            seed=None if self.seed is None else self.seed + choice,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,  # type: ignore[arg-type]
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            **special,
        )


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    unsupported = fields.TEXT

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1)]
        | None
    ) = Field(None, description="Text, token ids, or several of one kind. null: a BOS alone.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives of each token.")
    echo: bool | None = Field(None, description="The prompt goes before the answer.")

    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        prompt = self.prompt
        if prompt is None or isinstance(prompt, str):
            return [prompt or ""]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)

    def params(self, choice: int) -> SamplingParams:
        """Of the i-th answer. `max_tokens: 0` asks for the prompt alone: one token that nobody
        gets to see."""
        return self.sampling(
            choice,
            max_tokens=1 if self.max_tokens == 0 else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class ContentPart(BaseModel):
    """A part of a message; only text is understood."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message; what else it holds goes to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[ContentPart] | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    unsupported = fields.CHAT

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of max_tokens; both are fine if they agree."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def conversation(self) -> list[Message]:
        """As the codec takes it; `developer` is what newer clients call `system`."""
        messages = [m.model_dump(exclude_unset=True) for m in self.messages]
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
        return list(messages)

    def params(self, choice: int) -> SamplingParams:
        """Of the i-th answer. Raises ApiError for fields that contradict each other."""
        newer, older = self.max_completion_tokens, self.max_tokens
        if None not in (newer, older) and newer != older:
            raise ApiError(
                f"max_completion_tokens is {newer} and max_tokens {older}; give one of them",
                param="max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self.sampling(
            choice,
            max_tokens=newer if older is None else older,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class TokenizeRequest(BaseModel):
    """POST /tokenize: text, or the messages of a conversation."""

    model_config = ConfigDict(strict=True)
    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str
    tokens: list[TokenId]


Endpoint = Literal["completions", "chat"]
