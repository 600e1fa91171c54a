"""From a text file to windows of tokens, with every choice on the way written down.

Published perplexities of one model differ by more than any method gains, because these choices
differ: what is joined by what, the window, the stride, the start token. So they travel with the
result, and the classic ones have names.
"""

from __future__ import annotations

import io
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dejavu.errors import InputError
from dejavu.registry import unknown
from dejavu.weights.files import sha256_file

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class Preset:
    """How a file becomes tokens and windows.

    pieces: `whole` file; `documents` between separator lines (.jsonl: the field `text` of every
    line); `rows`, the lines as Hugging Face's WikiText has them (text with its line end, or empty).
    joiner: text between the pieces, or None for the tokenizer's end token.
    window: tokens a forward reads, None for the model's context (a larger one is cut to it).
    start: tokens put before the text once: `none`, `bos`, or what the tokenizer does by `default`.
    scored: `all`, every token but the first, each once; `within`, windows side by side, of which
    the first token is never predicted and a last incomplete one is dropped.
    """

    pieces: str = "documents"
    joiner: str | None = None
    window: int | None = None
    start: str = "none"
    scored: str = "all"


PRESETS = {
    "documents": Preset(),
    "whole": Preset("whole", ""),
    # GPTQ, SparseGPT, Wanda and most papers since: the test split as Hugging Face's rows, joined
    # by two line ends, 2048 tokens a window (github.com/IST-DASLab/gptq, datautils.py, opt.py).
    "wikitext2": Preset("rows", "\n\n", 2048, "default", "within"),
}


@dataclass(frozen=True)
class Setting:
    """What a perplexity was measured on and how; two results compare only where these agree.

    sha256: of the file. start_tokens: ids put before the text. max_tokens: scored at most, None for
    no limit. unit: what a loss is the mean over. The other fields: see `Preset`.
    """

    dataset: str
    split: str | None
    sha256: str
    pieces: str
    joiner: str
    window: int
    stride: int
    start_tokens: tuple[int, ...]
    scored: str
    max_tokens: int | None
    tokenizer: str
    vocab_size: int
    unit: str = "token"


@dataclass(frozen=True, eq=False)
class Window:
    """ids: int64 `[n + 1]`, of which n are read and the n after the first predicted.

    skip: predictions at the start that give context only. offset: of the first id in the text.
    """

    ids: Tensor
    skip: int = 0
    offset: int = 0

    @property
    def scored(self) -> int:
        """Predictions that count."""
        return len(self.ids) - 1 - self.skip


def sliding_windows(ids: Tensor, window: int, stride: int) -> Iterator[Window]:
    """Windows that together score every token but the first, each once.

    Window k reads `window` tokens from `k * stride` on and scores what no window before it has. So
    a token is predicted from at least `window - stride + 1` tokens of context and at most `window`
    (the first `window` tokens: from all before them).
    """
    assert 1 <= stride <= window
    last, scored = len(ids) - 1, 0
    for start in range(0, last, stride):
        end = min(start + window, last)
        yield Window(ids[start : end + 1], scored - start, start)
        scored = end
        if end == last:
            return


def chunks(ids: Tensor, window: int) -> Iterator[Window]:
    """Windows side by side, `window - 1` predictions of each; an incomplete last one is dropped."""
    for start in range(0, len(ids) - window + 1, window):
        yield Window(ids[start : start + window], 0, start)


@dataclass(frozen=True, eq=False)
class EvalText:
    """A tokenised text.

    ids: int64 `[n]`. ends: int64 `[n]`, how many characters of `text` the tokens up to each cover
    (start tokens and joining end tokens cover none).
    """

    setting: Setting
    text: str
    ids: Tensor
    ends: NDArray[np.int64]

    @cached_property
    def windows(self) -> list[Window]:
        """What is read and scored, in order of the text."""
        s = self.setting
        cut = chunks(self.ids, s.window) if s.scored == "within" else None
        return list(cut or sliding_windows(self.ids, s.window, s.stride))

    def size(self) -> tuple[int, int]:
        """UTF-8 bytes and words (runs of non-spaces, counted where they begin) that were scored."""
        spans = [(w.offset + w.skip, w.offset + len(w.ids) - 1) for w in self.windows]
        begin, end = (self.ends[list(side)] for side in zip(*spans, strict=True))
        points = np.frombuffer(self.text.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000).astype(np.int64)
        before = np.concatenate(([0], np.cumsum(widths)))
        starts = np.array(
            [match.start() for match in re.finditer(r"\S+", self.text)], dtype=np.int64
        )
        words = np.searchsorted(starts, end) - np.searchsorted(starts, begin)
        return int((before[end] - before[begin]).sum()), int(words.sum())


def read_text(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    preset: str | Preset = "documents",
    *,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    dataset: str | None = None,
    split: str | None = None,
) -> EvalText:
    """Tokenise a file (.txt or .jsonl, also .xz) as a preset says; the options override it.

    context_length: the model's. stride: default, the window. max_tokens: score no more than the
    first so many. dataset, split: names for the result; default, the file's name and none.

    Raises InputError for a file that cannot be read, an option that cannot be used, and a text with
    nothing to predict.
    """
    path = Path(path)
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise unknown("preset", preset, PRESETS, InputError)
        preset = PRESETS[preset]
    width = _window(preset, window, context_length)
    step = width if stride is None else stride
    if not 1 <= step <= width:
        raise InputError(f"stride: {stride} is not usable, it is 1 to the window, {width}")
    if preset.scored == "within" and step != width:
        raise InputError(f"stride: {stride} is not usable; this preset puts windows side by side")
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens: {max_tokens} is not usable, it is at least 1")
    text, ids, ends = _tokenise(_pieces(path, preset.pieces), preset.joiner, tokenizer)
    start = _start_tokens(preset.start, tokenizer)
    kept = len(start) + len(ids) if max_tokens is None else max_tokens + 1
    setting = Setting(
        dataset=dataset or path.name,
        split=split,
        sha256=sha256_file(path),
        pieces=preset.pieces,
        joiner=tokenizer.eos_token if preset.joiner is None else preset.joiner,
        window=width,
        stride=step,
        start_tokens=tuple(start),
        scored=preset.scored,
        max_tokens=max_tokens,
        tokenizer=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
    )
    found = EvalText(
        setting,
        text,
        torch.tensor([*start, *ids][:kept], dtype=torch.int64),
        np.array([*[0] * len(start), *ends][:kept], dtype=np.int64),
    )
    if not sum(w.scored for w in found.windows):
        raise InputError(
            f"{path}: {len(found.ids)} tokens leave nothing to predict with a window of {width}; "
            "give a longer text or a smaller window"
        )
    return found


def _window(preset: Preset, window: int | None, context_length: int) -> int:
    if window is None:
        return min(preset.window or context_length, context_length)
    least = 2 if preset.scored == "within" else 1
    if not least <= window <= context_length:
        raise InputError(
            f"window: {window} is not usable, it is {least} to the context, {context_length}"
        )
    return window


def _pieces(path: Path, kind: str) -> list[str]:
    try:
        # Bytes first: reading as text would turn \r\n into \n, and bits per byte count bytes.
        data = path.read_bytes()
        content = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if kind == "whole":
        return [content]
    if kind == "rows":
        return [line if line.strip() else "" for line in _lines(content)]
    if kind != "documents":
        raise unknown("pieces", kind, ("whole", "documents", "rows"), InputError)
    if ".jsonl" in path.suffixes:
        return [_field(path, number, line) for number, line in enumerate(_lines(content), 1)]
    found = re.split(rf"(?:^|(?<=\n)){re.escape(SEPARATOR)}\r?(?:\n|$)", content)
    trimmed = [*(re.sub(r"\r?\n$", "", piece) for piece in found[:-1]), found[-1]]
    return [piece for piece in trimmed if piece.strip()]


def _lines(content: str) -> Iterator[str]:
    """Lines with their ends; str.splitlines would also split at form feeds and their like."""
    return iter(io.StringIO(content, newline="\n"))


def _field(path: Path, number: int, line: str) -> str:
    try:
        value: Any = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}, line {number}: no JSON object with a field `text`") from error
    return str(value)


def _tokenise(
    pieces: Sequence[str], joiner: str | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[int], list[int]]:
    """The whole text, its token ids, and how many characters the tokens up to each cover."""
    if joiner is not None:
        pieces = [joiner.join(pieces)]
    elif tokenizer.eos_token_id is None:
        raise InputError("joiner: the tokenizer has no end token; join the pieces by a text")
    encoded = tokenizer(
        list(pieces) or [""],
        add_special_tokens=False,
        return_offsets_mapping=True,
        verbose=False,  # no warning that the text is longer than the model's context
    )
    ids: list[int] = []
    ends: list[int] = []
    done = 0
    for piece, piece_ids, spans in zip(
        pieces, encoded["input_ids"], encoded["offset_mapping"], strict=False
    ):
        if ids:
            ids.append(tokenizer.eos_token_id)
            ends.append(done)
        ids += piece_ids
        # Several tokens of one character share its span, so ends never fall.
        ends += (done + np.maximum.accumulate([0, *(end for _, end in spans)])[1:]).tolist()
        done += len(piece)
    return "".join(pieces), ids, ends


def _start_tokens(kind: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if kind == "none":
        return []
    if kind == "bos":
        if tokenizer.bos_token_id is None:
            raise InputError("start: the tokenizer has no start token; choose `none`")
        return [tokenizer.bos_token_id]
    if kind != "default":
        raise unknown("start", kind, ("none", "bos", "default"), InputError)
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    place = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return list(full[:place])
