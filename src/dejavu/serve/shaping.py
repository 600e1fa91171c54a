"""From the engine's chunks to the pieces of OpenAI's objects."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.engine.activity import LayerActivity
from dejavu.engine.codec import Codec
from dejavu.engine.logprobs import TokenLogprob
from dejavu.engine.output import Chunk
from dejavu.serve.responses import (
    Alternative,
    ChatLogprobs,
    ChatToken,
    LayerActivityOut,
    TextLogprobs,
)

_LEAST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


def activity_of(chunk: Chunk) -> list[LayerActivityOut] | None:
    """Of the chunk's token, layer by layer."""
    return None if chunk.activity is None else [_layer(layer) for layer in chunk.activity]


def chat_logprobs(codec: Codec, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Of the tokens of an answer."""

    def alternative(token: int, logprob: float) -> Alternative:
        raw = codec.token_bytes(token)
        return Alternative(token=_text(raw), logprob=max(logprob, _LEAST), bytes=list(raw))

    return ChatLogprobs(
        content=[
            ChatToken(
                **dict(alternative(entry.token, entry.logprob)),
                top_logprobs=[alternative(*one) for one in entry.top],
            )
            for entry in entries
        ]
    )


class TextLogprobsShaper:
    """Of a text completion, piece by piece: offsets go on from one to the next."""

    def __init__(self, codec: Codec, top: int) -> None:
        self._codec, self._top, self._offset = codec, top, 0

    def prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprob]) -> TextLogprobs:
        """Of an echoed prompt; nothing foretells its first token."""
        first = self._piece([TokenLogprob(ids[0], 0.0)])
        first.token_logprobs[0] = None
        if first.top_logprobs is not None:
            first.top_logprobs[0] = None
        return joined([first, self._piece(entries)])

    def answer(self, chunk: Chunk) -> TextLogprobs:
        """Of a chunk's token."""
        return self._piece([] if chunk.logprob is None else [chunk.logprob])

    def _piece(self, entries: Sequence[TokenLogprob]) -> TextLogprobs:
        piece = TextLogprobs(
            tokens=[],
            token_logprobs=[],
            top_logprobs=[] if self._top else None,
            text_offset=[],
        )
        for entry in entries:
            text = self._name(entry.token)
            piece.tokens.append(text)
            piece.token_logprobs.append(max(entry.logprob, _LEAST))
            piece.text_offset.append(self._offset)
            if piece.top_logprobs is not None:
                piece.top_logprobs.append(
                    {self._name(token): max(value, _LEAST) for token, value in entry.top}
                )
            if entry.token not in self._codec.special_ids:
                self._offset += len(text)
        return piece

    def _name(self, token: int) -> str:
        return _text(self._codec.token_bytes(token))


def joined(pieces: Sequence[TextLogprobs]) -> TextLogprobs:
    """One after another."""
    tops = [piece.top_logprobs for piece in pieces]
    return TextLogprobs(
        tokens=[x for p in pieces for x in p.tokens],
        token_logprobs=[x for p in pieces for x in p.token_logprobs],
        top_logprobs=None if tops[0] is None else [x for top in tops for x in top or ()],
        text_offset=[x for p in pieces for x in p.text_offset],
    )


def _layer(layer: LayerActivity) -> LayerActivityOut:
    return LayerActivityOut(
        neurons=[round(100 * share) for share in layer.neurons],
        density=round(layer.density, 4),
        heads=[int(used) for used in layer.heads],
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
