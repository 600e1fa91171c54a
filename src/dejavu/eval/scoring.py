"""Log-likelihoods of continuations, several arms side by side, contexts read once.

The tokens of a continuation always go through the arm's selector, each with its own selection, and
so does the last token of the context, which predicts the first of them. The other tokens of the
context are read as `prompts` says:

- `dense`: as in serving, where a prompt is prefilled densely. (Serving predicts the first new token
  from that prefill too; here it is the arm's, so that answers of one token are tested at all.)
- `sparse`: by the arm's selector as well. Harder than serving; what papers do that mask a whole
  forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dejavu.errors import DejavuError, InputError
from dejavu.eval.pairs import Pair
from dejavu.kernels.reference import TorchOps
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import blocks_for
from dejavu.predictor.wide import widened
from dejavu.registry import unknown
from dejavu.sparsity.policy import Dense, Selector

PROMPTS = ("dense", "sparse")
_CHUNK = 64  # selectors keep buffers for every number of rows they have seen


class Scored(NamedTuple):
    """logprob: of the whole continuation, nats. greedy: every token is the likeliest, in its place.
    logits: fp32 `[n, V]`, one row a token of the continuation."""

    logprob: float
    greedy: bool
    logits: Tensor


@dataclass(eq=False)
class _Prompt:
    """A cache and the tokens whose keys and values it holds, all read by one selector."""

    selector: Selector
    held: list[int]

    def __init__(self, model: DecoderLM, selector: Selector, window: int) -> None:
        self.selector = selector
        self.held = []
        self.cache = model.new_cache(window)


class Scorer:
    """Scores pairs through one teacher-forced forward (`TorchOps`) for every arm.

    What the next context has in common with the last one is not read again: the choices of an item,
    and items after the same examples, cost their own tokens only.
    """

    def __init__(
        self,
        model: DecoderLM,
        arms: Mapping[str, Selector],
        *,
        prompts: str = "dense",
        window: int | None = None,
    ) -> None:
        """arms: name -> selector. window: tokens read at most; default, the model's context.

        Raises InputError for another value of `prompts`, or a window beyond the context.
        """
        if prompts not in PROMPTS:
            raise unknown("prompts", prompts, PROMPTS, InputError)
        context = model.config.context_length
        if window is not None and not 1 <= window <= context:
            raise InputError(f"max_length: {window} is not usable, it is 1 to {context}")
        self.window = window or context
        self.prompts = prompts
        self._arms = dict(arms)
        self._ops = TorchOps()
        self._model = widened(model)
        rope = model.config.rope
        # Keys turned with one base do not fit another, and this kind's base follows the length.
        self._keep = rope is None or rope.kind != "dynamic"
        shared = _Prompt(self._model, Dense(), self.window)
        self._prompts = {
            name: shared if prompts == "dense" else _Prompt(self._model, selector, self.window)
            for name, selector in self._arms.items()
        }

    def fits(self, pair: Pair) -> bool:
        """Whether the pair can be read whole."""
        return pair.fed <= self.window

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair]) -> dict[str, list[Scored]]:
        """Every pair by every arm; pairs with a common context best stand together.

        Continuations without tokens have probability 1. Raises DejavuError for logits that are not
        finite, InputError for a token the model does not know.
        """
        longest = max((pair.fed for pair in pairs), default=0)
        assert longest <= self.window, "the caller asks `fits`"
        vocabulary = self._model.config.vocab_size
        for pair in pairs:
            highest = max(pair.context + pair.continuation)
            if highest >= vocabulary:
                raise InputError(f"token id {highest} is beyond the model's {vocabulary}")
        if longest:
            self._model.prepare(longest)
        found: dict[str, list[Scored]] = {name: [] for name in self._arms}
        logits: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        last: tuple[int, ...] | None = None
        for pair in pairs:
            if pair.context != last:
                logits.clear()  # of another context
                last = pair.context
            for name, selector in self._arms.items():
                # Continuations that differ in their last token only are one forward.
                key = name, pair.continuation[:-1]
                if key not in logits and pair.continuation:
                    logits[key] = self._answer(self._prompts[name], selector, pair)
                found[name].append(_scored(logits.get(key), pair.continuation))
        return found

    def _answer(self, prompt: _Prompt, selector: Selector, pair: Pair) -> Tensor:
        """Logits of the continuation's tokens; the cache keeps the context without its last."""
        given = pair.context[:-1]
        start = _common(prompt.held, given) if self._keep else 0
        self._read(prompt, prompt.selector, given[start:], start, last_only=True)
        prompt.held = list(given)
        fed = pair.context[-1:] + pair.continuation[:-1]
        return torch.cat(self._read(prompt, selector, fed, len(given)))

    def _read(
        self,
        prompt: _Prompt,
        selector: Selector,
        ids: Sequence[int],
        start: int,
        *,
        last_only: bool = False,
    ) -> list[Tensor]:
        """Logits of the tokens that follow the first `start` in the cache."""
        size = max(len(ids), 1) if isinstance(selector, Dense) else _CHUNK
        found = []
        for part in (ids[n : n + size] for n in range(0, len(ids), size)):
            end = start + len(part)
            batch = Batch.prefill(
                torch.tensor(part),
                list(range(blocks_for(end))),
                start=start,
                last_only=last_only,
                device=self._model.device,
            )
            found.append(self._model.forward(batch, prompt.cache, selector, self._ops))
            start = end
        return found


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def _scored(logits: Tensor | None, continuation: tuple[int, ...]) -> Scored:
    if logits is None:
        return Scored(0.0, True, torch.empty(0, 0))
    targets = torch.tensor(continuation, device=logits.device)
    each = logits.log_softmax(dim=1).gather(1, targets[:, None])
    total = float(each.double().sum())
    if not torch.isfinite(each).all():
        raise DejavuError(
            "the logits are not finite (NaN or Inf): the weights are damaged, or too large for "
            "their dtype; try dtype='fp32'"
        )
    return Scored(total, bool((logits.argmax(dim=1) == targets).all()), logits)
