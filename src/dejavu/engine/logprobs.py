"""How likely the model itself held a token, and which others it held likelier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of probabilities by the model's own logits: before biases, penalties,
    temperature and cuts.

    top: the likeliest ids and theirs, the likeliest first; of equals the lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprob_of(logits: Floats, token: int, top: int) -> TokenLogprob:
    """Of one row `[vocab_size]` of finite logits."""
    largest = float(logits.max())
    total = np.exp(logits - np.float32(largest)).sum(dtype=np.float64)
    shift = largest + float(np.log(total))
    return TokenLogprob(
        token,
        float(logits[token]) - shift,
        tuple((i, float(logits[i]) - shift) for i in _likeliest(logits, top)),
    )


def prompt_logprobs(
    logits: Floats, following: Sequence[int], top: int | None
) -> list[TokenLogprob]:
    """Of the tokens that follow the first rows of `[N, vocab_size]`, one a row."""
    rows = zip(logits, following, strict=False)  # the last row may foretell the answer
    return [logprob_of(row, token, top or 0) for row, token in rows]


def _likeliest(logits: Floats, count: int) -> list[int]:
    count = min(count, len(logits))
    if count == 0:
        return []
    cut = np.partition(logits, -count)[-count]
    found = np.flatnonzero(logits >= cut)
    order = np.lexsort((found, -logits[found]))
    return [int(i) for i in found[order[:count]]]
