"""Calibration text: from files to windows of tokens, a part of them held out."""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from dejavu.errors import InputError

SEPARATOR = "<|endoftext|>"
_PIECE = 1 << 16  # characters tokenised at a time
_REACH = 4  # tokens looked at for each token used: samples spread over more documents
_HELD_OUT = 0.15  # of the text, its end: other documents than those trained on


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> int | None:
        """Put between documents."""
        ...

    def encode(self, text: str, **options: Any) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows int64 `[n, T + 1]`: T tokens are read, each predicts its successor."""

    train: Tensor
    held_out: Tensor

    @property
    def length(self) -> int:
        """Tokens a window reads."""
        return self.train.shape[1] - 1

    def fingerprint(self) -> str:
        """SHA-256 of all token ids."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(str(tuple(part.shape)).encode())
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()


def documents(texts: Iterable[str | Path]) -> Iterator[str]:
    """Documents of texts (`str`) and text files (`Path`; .txt, or .xz unpacked on the way).

    A line `<|endoftext|>` ends a document. Files are read only as far as documents are taken.
    Raises InputError naming a file that cannot be read.
    """
    for text in texts:
        lines = text.splitlines(keepends=True) if isinstance(text, str) else _lines(text)
        collected: list[str] = []
        for line in lines:
            if line.strip() == SEPARATOR:
                yield "".join(collected)
                collected = []
            else:
                collected.append(line)
        yield "".join(collected)


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _lines(path: Path) -> Iterator[str]:
    try:
        with _opened(path) as file:
            yield from file
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise InputError(f"calibration text {path} cannot be read: {error}") from error


def make_windows(
    texts: Iterable[str | Path],
    tokenizer: Tokenizer,
    *,
    length: int,
    train: int,
    held_out: int,
    separator: int | None,
) -> Windows:
    """Windows spread evenly over the beginning (`train`) and the end (`held_out`) of the texts.

    length: tokens a window reads; train, held_out: windows wanted, fewer where the text is short.
    Documents are joined by the token `separator` (None: the tokenizer's end token).

    Raises InputError for text too short for two windows of each part, a tokenizer without an end
    token, or an unreadable file.
    """
    ids = _pack(texts, tokenizer, _REACH * (train + held_out) * length + 1, separator)
    count = (len(ids) - 1) // length
    parts = int(count * (1 - _HELD_OUT))
    if parts < 2 or count - parts < 2:
        raise InputError(
            f"calibration text of {len(ids)} tokens is too short: windows of {length} tokens need "
            f"at least {14 * length}; give more text (2 MB are a good start)"
        )
    cut = ids.unfold(0, length + 1, length)
    return Windows(
        _spread(cut[:parts], train).contiguous(), _spread(cut[parts:], held_out).contiguous()
    )


def _pack(
    texts: Iterable[str | Path], tokenizer: Tokenizer, limit: int, separator: int | None
) -> Tensor:
    end = tokenizer.eos_token_id if separator is None else separator
    if end is None:
        raise InputError(
            "neither the model's config nor its tokenizer names an end token (eos_token_id), which "
            "has to stand between documents"
        )
    ids: list[int] = []
    for document in documents(texts):
        text = document.strip("\n")
        if not text:
            continue
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            ids += tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        ids.append(end)
        if len(ids) >= limit:
            break
    return torch.tensor(ids[:limit], dtype=torch.int64)


def _spread(windows: Tensor, wanted: int) -> Tensor:
    """`wanted` rows at even distances, or all."""
    if wanted >= len(windows):
        return windows
    return windows[torch.arange(wanted) * len(windows) // wanted]
