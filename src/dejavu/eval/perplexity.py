"""Perplexity of a model on a text, with its error and everything needed to repeat it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dejavu.eval.forced import Reader
from dejavu.eval.text import EvalText, Setting, Window
from dejavu.kernels.native import MAX_ROWS
from dejavu.kernels.ops import Ops
from dejavu.models.base import DecoderLM
from dejavu.sparsity.losses import Mean, block_mean, token_losses
from dejavu.sparsity.policy import Dense, Selector

Progress = Callable[[int, int], None]  # tokens scored, tokens in all


@dataclass(frozen=True)
class Perplexity:
    """tokens: scored, each once. loss: sum of their negative log-likelihoods over their number, in
    nats. The errors are standard errors over blocks of text, see `blocks`.

    bits_per_byte, word_perplexity: the same sum over the UTF-8 bytes and the words it was about, so
    that models with different tokenizers compare. through, backend: see `Reader`.
    """

    setting: Setting
    through: str
    backend: str
    windows: int
    tokens: int
    bytes: int
    words: int
    loss: float
    loss_error: float | None
    perplexity: float
    perplexity_error: float | None
    bits_per_byte: float
    word_perplexity: float

    def to_json(self) -> dict[str, Any]:
        """Plain values; the setting is a dict of its own."""
        return asdict(self)


@torch.inference_mode()
def evaluate(
    model: DecoderLM,
    text: EvalText,
    selector: Selector | None = None,
    *,
    through: str = "prefill",
    ops: Ops | None = None,
    rows: int = MAX_ROWS,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of the model, with a selector or dense, on a text.

    through, ops, rows: the path, see `Reader`; both paths agree within rounding. Logits exist for
    one window (prefill) or one step (decode) at a time. Raises InputError for a bad option.
    """
    reader = Reader(model, through, ops, rows)
    sums = Sums(text.windows)
    for owners, logits, targets in reader.read(text.windows, selector or Dense()):
        sums.add(owners, token_losses(logits, targets))
        if progress is not None:
            progress(sums.done, sums.total)
    return result(text, reader, sums.mean())


def result(text: EvalText, reader: Reader, loss: Mean) -> Perplexity:
    """A mean loss over all scored tokens of a text, in every unit."""
    size, words = text.size()
    tokens = sum(window.scored for window in text.windows)
    nats = loss.value * tokens
    exponential = loss.exp()
    return Perplexity(
        setting=text.setting,
        through=reader.through,
        backend=reader.backend,
        windows=len(text.windows),
        tokens=tokens,
        bytes=size,
        words=words,
        loss=loss.value,
        loss_error=loss.error,
        perplexity=exponential.value,
        perplexity_error=exponential.error,
        bits_per_byte=nats / math.log(2) / max(size, 1),
        word_perplexity=Mean(nats / max(words, 1), None).exp().value,
    )


class Sums:
    """A figure of each scored token, summed by window."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows
        self._sums = torch.zeros(len(windows), dtype=torch.float64)
        self.done = 0
        self.total = sum(window.scored for window in windows)

    def add(self, owners: torch.Tensor, values: torch.Tensor) -> None:
        """owners: int64 `[n]`, the window of each value `[n]` (of any device)."""
        self._sums.index_add_(0, owners, values.double().cpu())
        self.done += len(owners)

    def mean(self) -> Mean:
        """Over all tokens, with the error over blocks of text."""
        assert self.done == self.total
        sums = self._sums.tolist()
        parts = blocks(self._windows)
        return block_mean(
            [math.fsum(sums[number] for number in part) for part in parts],
            [sum(self._windows[number].scored for number in part) for part in parts],
        )


def blocks(windows: Sequence[Window]) -> list[list[int]]:
    """Numbers of the windows of each block: as many in a row as score a whole window of tokens.

    With a small stride a window scores few tokens, which depend on those of the next window as much
    as on each other. An error over such windows would be too small; over stretches as long as the
    model's view it is nearly honest (documents longer than that still tie blocks together).
    """
    longest = max(len(window.ids) - 1 for window in windows)
    found: list[list[int]] = []
    scored = longest
    for number, window in enumerate(windows):
        if scored >= longest:
            found.append([])
            scored = 0
        found[-1].append(number)
        scored += window.scored
    return found
