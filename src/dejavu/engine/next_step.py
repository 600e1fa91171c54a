"""When a step may begin before the tokens that it reads are on the host.

Between two graphs the host fetches tokens, ends requests and writes inputs: 150 to 260 us, a tenth
of a step of OPT-6.7B. The tokens lie on the device all the while. So a step of the same requests is
sent off behind the one before, and is taken or thrown away when it is asked for: what it wrote into
caches is written again, for the same places, by the step in its stead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dejavu.engine.lazy_rows import KeyValues
from dejavu.engine.sampling import Picked, Sampler
from dejavu.engine.scheduler import Request
from dejavu.engine.whole_layers import Layers

PICKED = -1  # in place of an id: the one that the step before picks


class Variant(NamedTuple):
    """What a step computes, a graph for each. rows: with padding. whole, whole_heads: layers whose
    neurons, or heads, are all computed where the selector would choose."""

    rows: int
    kind: KeyValues
    whole: Layers
    whole_heads: Layers


@dataclass(eq=False)
class Begun:
    """A step under way. ids: what it reads, one a request; `PICKED` until that is known."""

    requests: list[Request]
    lengths: list[int]
    ids: list[int]
    variant: Variant
    logits: Tensor

    def learn(self, picked: Sequence[Picked]) -> None:
        """What the step before has picked."""
        self.ids = [
            (token if isinstance(token, int) else PICKED) if known == PICKED else known
            for known, token in zip(self.ids, picked, strict=True)
        ]

    def serves(self, requests: Sequence[Request]) -> bool:
        """Whether this is the step that these requests want now."""
        return (
            self.requests == list(requests)
            and self.lengths == [r.length for r in requests]
            and self.ids == [r.token_ids[-1] for r in requests]
        )


def may_follow(requests: Sequence[Request], samplers: Sequence[Sampler | None]) -> bool:
    """Whether the next step of these requests may begin when theirs has not ended: each gets its
    token on the device, wants nothing else of this step's logits, and will want another one."""
    return all(
        sampler is not None
        and sampler.plain
        and sampler.params.logprobs is None
        and request.length + 1 < request.limit
        for request, sampler in zip(requests, samplers, strict=True)
    )


def following(requests: Sequence[Request]) -> list[int]:
    """What the next step reads, as far as that does not depend on what is sampled."""
    return [request.fed.get(len(request.token_ids), PICKED) for request in requests]
