"""From a context and a continuation to token ids, with the border where it belongs.

A token may span the border of two texts, so neither half can be tokenised alone. What the harness
of the field does (EleutherAI/lm-evaluation-harness, `TemplateLM._encode_pair`) is done here, and
defined where it leaves cases open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dejavu.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """Token ids to be given (`context`, never empty) and to be predicted (`continuation`)."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def fed(self) -> int:
        """Tokens a model reads for it: the last one is predicted only."""
        return len(self.context) + max(len(self.continuation) - 1, 0)


class PairEncoder:
    """A tokenizer that encodes pairs. prefix: the token that stands for an empty context."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool | None = None
    ) -> None:
        """add_special_tokens: before a context; None does what the tokenizer does by itself.

        Raises InputError for a tokenizer with neither a start nor an end token.
        """
        self.tokenizer = tokenizer
        self._special = add_special_tokens
        found = tokenizer.bos_token_id
        found = tokenizer.eos_token_id if found is None else found
        if not isinstance(found, int):
            raise InputError(
                "the tokenizer has neither a start nor an end token to put before a text"
            )
        self.prefix: int = found
        self._prefix_text = str(tokenizer.decode([found]))

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Token ids. special: whether start and end tokens are added; None does what `__init__`
        was told, and never puts a second start token before a text that begins with one."""
        if special is None:
            special = False if text.startswith(self._prefix_text) else self._special
        options = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(text, verbose=False, **options))

    def pair(self, context: str, continuation: str) -> Pair:
        """Spaces at the end of the context belong to the continuation; at least one token of a
        continuation that is not empty is scored.

        Where the last token of the context grows into the continuation so that the cut at the
        context's length leaves nothing, the continuation is encoded alone.
        """
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            ids = self.encode(continuation, special=False)
            if ids[:1] == [self.prefix] and len(ids) > 1:
                return Pair((self.prefix,), tuple(ids[1:]))
            return Pair((self.prefix,), tuple(ids))
        ids = self.encode(stripped) or [self.prefix]
        rest = self.encode(stripped + continuation)[len(ids) :]
        if continuation and not rest:
            rest = self.encode(continuation, special=False)
        return Pair(tuple(ids), tuple(rest))


def rolling(ids: Sequence[int], prefix: int, window: int) -> Iterator[Pair]:
    """Pairs that score every token of a text once, each from at most `window` tokens.

    The first window starts from `prefix` alone; the last one reads as many tokens as the others and
    scores only what none before it has (the harness's rule for whole documents).
    """
    end = min(window, len(ids))
    if ids:
        yield Pair((prefix,), tuple(ids[:end]))
    while end < len(ids):
        start, end = end, min(end + window, len(ids))
        yield Pair(tuple(ids[max(end - window - 1, 0) : start]), tuple(ids[start:end]))


def cut(pair: Pair, window: int) -> Pair | None:
    """The pair with its context cut from the left to what a model of `window` tokens can read.

    The border moves with the cut, and the last token of the continuation is not read. None where
    the continuation alone is too long.
    """
    room = window + 1 - len(pair.continuation)
    return Pair(pair.context[-room:], pair.continuation) if room >= 1 else None
