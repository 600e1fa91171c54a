"""Text out of a stream of token ids: whole characters only, and nothing past a stop string.

Both classes take constant time for a token and are the only way to text: an answer that is not
streamed is the same pieces joined, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_PARTIAL = "\N{REPLACEMENT CHARACTER}"  # how decoders show bytes that are no whole character (yet)
_MOST_HELD = 16  # tokens; a character has 4 bytes at most, so this many hold bytes of no character
_CONTEXT = 6  # prompt tokens that go before the answer's first ones


class Detokenizer:
    """Text of an answer, token by token.

    A token's text depends on the tokens before it (spaces, characters of several tokens), so a
    small window is decoded with and without the new tokens and the difference is the text. The
    tokenizers library has a stream decoder of the same kind, but one that cannot hand out what it
    holds, raises on some windows, and decodes ever longer ones while tokens have no text.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        skip: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        """decode: ids -> text; skip: ids without text (special ones); prompt: what comes before."""
        self._decode = decode
        self._skip = skip
        self._window = [i for i in prompt[-_CONTEXT:] if i not in skip]
        self._told = len(self._window)  # tokens of the window whose text has been given out
        self._context = decode(self._window) if self._window else ""

    def push(self, token: int) -> str:
        """The text that one more token completes; empty while a character is not whole."""
        if token in self._skip:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(_PARTIAL):
            return self._advance(len(self._window), text)
        if len(self._window) - self._told <= _MOST_HELD:
            return ""
        end = len(self._window) - 3  # what follows may still become a character
        return self._advance(end, self._decode(self._window[:end]))

    def flush(self) -> str:
        """What is held back, at the end of the answer: bytes that never became a character."""
        if len(self._window) == self._told:
            return ""
        return self._advance(len(self._window), self._decode(self._window))

    def _advance(self, end: int, text: str) -> str:
        """Give out `text` (of window[:end]) beyond the context; the given tokens become context."""
        new = text[len(self._context) :]
        if new:
            del self._window[: self._told]
            self._told = end - self._told
            self._context = self._decode(self._window[: self._told])
        elif len(self._window) > _CONTEXT + _MOST_HELD:  # tokens without any text
            del self._window[:-_CONTEXT]
            self._told = len(self._window)
            self._context = self._decode(self._window)
        return new


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may become one.

    The stop string that is complete first ends the text (of several, the longest), character by
    character: how the text is cut into tokens does not matter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(stops)  # characters of each stop string that the text ends with
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to give out now. Once `matched` is set there is no more."""
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        pending = self._held + text
        for place, character in enumerate(text, len(self._held) + 1):
            for i, (stop, borders) in enumerate(self._patterns):
                state = self._states[i]
                while state and stop[state] != character:
                    state = borders[state]
                self._states[i] = state + (stop[state] == character)
            complete = [
                stop
                for (stop, _), state in zip(self._patterns, self._states, strict=True)
                if state == len(stop)
            ]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return pending[: place - len(self.matched)]
        keep = len(pending) - max(self._states)
        self._held = pending[keep:]
        return pending[:keep]

    def flush(self) -> str:
        """What is held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _borders(pattern: str) -> list[int]:
    """For each length, that of the longest proper prefix which is also a suffix (Knuth, Morris,
    Pratt 1977): how much of a match is left when the next character does not fit."""
    borders = [0] * (len(pattern) + 1)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length]
        length += pattern[i] == pattern[length]
        borders[i + 1] = length
    return borders
