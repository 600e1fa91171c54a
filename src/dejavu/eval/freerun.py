"""Two engines writing freely from the same prompts: how long, and how often, they say the same.

Teacher-forced figures put both models back on the same track after every token; here a single other
choice changes all that follows. So this is the strictest of all comparisons, and says nothing about
which text is better.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dejavu.engine.llm import LLM
from dejavu.engine.params import SamplingParams
from dejavu.eval.paired import mean

Progress = Callable[[int, int], None]
_AT_ONCE = 16


@dataclass(frozen=True)
class FreeRun:
    """identical: share of prompts whose whole greedy answers are equal. together: tokens up to the
    first difference over `new_tokens`, mean over prompts. Errors are standard errors over prompts.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    identical: float
    identical_error: float | None
    together: float
    together_error: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def free_run(
    dense: LLM,
    sparse: LLM,
    prompts: Sequence[list[int]],
    new_tokens: int,
    progress: Progress | None = None,
) -> FreeRun:
    """Greedy answers of `new_tokens` tokens (end tokens do not end them) to prompts of one length.

    Raises InputError for prompts that leave no room for the answers.
    """
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    together: list[float] = []
    for start in range(0, len(prompts), _AT_ONCE):
        part = list(prompts[start : start + _AT_ONCE])
        for one, other in zip(
            dense.generate(part, params), sparse.generate(part, params), strict=True
        ):
            pairs = zip(one.token_ids, other.token_ids, strict=True)
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
            together.append(place / len(one.token_ids))
        if progress is not None:
            progress(len(together), len(prompts))
    same, shared = mean([float(share == 1) for share in together]), mean(together)
    return FreeRun(
        prompts=len(prompts),
        prompt_tokens=len(prompts[0]),
        new_tokens=new_tokens,
        identical=same.value,
        identical_error=same.error,
        together=shared.value,
        together_error=shared.error,
    )


def draw_prompts(
    texts: Sequence[Sequence[int]], count: int, tokens: int, seed: int
) -> list[list[int]]:
    """The beginnings, `tokens` long, of a draw of texts that are longer than that."""
    long = [list(text[:tokens]) for text in texts if len(text) > tokens]
    random.Random(seed).shuffle(long)
    return long[:count]
