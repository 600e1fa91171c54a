"""What a caller gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dejavu.engine.scheduler import FinishReason

if TYPE_CHECKING:
    from dejavu.engine.activity import LayerActivity
    from dejavu.engine.logprobs import TokenLogprob


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    text: without special tokens and without the stop string that ended it.
    token_ids: as sampled, the end token included.
    finish_reason: "stop" (an end token or a stop string) or "length" (max_tokens or the context).
    prefill_seconds: computing the prompt and the first token; decode_seconds: all further tokens.
    density: share of the neurons that a row used, mean over the decode steps since the engine was
        last idle (for an answer alone: its own steps); None where nobody counted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    density: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding, without the prompt; None for an answer of one token."""
        return (len(self.token_ids) - 1) / self.decode_seconds if self.decode_seconds else None

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return asdict(self) | {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: one token's, or what was held back to the end.

    logprob, activity: of the token, if asked for and known, see `Request`; prompt_logprobs: with
        the first chunk.
    text may be empty: while a character is not whole, or while the text may become a stop string.
    The texts of all chunks joined are the completion's text, to the last character.
    completion: the whole answer, with the last chunk; finish_reason is set there too.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    activity: tuple[LayerActivity, ...] | None = None
