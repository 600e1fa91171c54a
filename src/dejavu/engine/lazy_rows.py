"""Which sequence owes keys and values since when (lazy-kv), and what its next step must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from dejavu.engine.scheduler import Request
from dejavu.kernels.lazy import RING
from dejavu.models.base import DecoderLM
from dejavu.models.deferred_kv import Deferral, DeferredKV

KeyValues = Literal["all", "used", "owed"]
"""What a step computes: keys and values of all heads for its own tokens (nothing is owed before),
those that used heads lack, or those that any head lacks."""

MOST_ROWS = 4  # of a step that leaves out keys and values: more rows use nearly every head


class LazyRows:
    """Slots of a `DeferredKV` for requests, from their first step until they are done."""

    def __init__(self, model: DecoderLM, most: int) -> None:
        """most: requests at a time."""
        self._kv = DeferredKV(model.config, most, device=model.device, dtype=model.cache_dtype)
        self._free = list(range(most - 1, -1, -1))
        self._slots: dict[Request, int] = {}
        self._since: dict[Request, int] = {}  # steps since all heads had all they need

    def seat(self, requests: Sequence[Request]) -> list[int]:
        """Each request's slot; new ones come from their prompts, which leave nothing out."""
        if any(request not in self._slots for request in requests):
            for gone in [request for request in self._slots if request.done]:
                self._free.append(self._slots.pop(gone))
                del self._since[gone]
            for request in requests:
                if request not in self._slots:
                    assert self._free, "more requests under way than the step was made for"
                    self._slots[request], self._since[request] = self._free.pop(), 0
                    self._kv.clear(self._slots[request])
        return [self._slots[request] for request in requests]

    def kind(self, requests: Sequence[Request]) -> KeyValues:
        """What the next step of these rows does."""
        most = max(self._since.get(request, 0) for request in requests)
        if len(requests) <= MOST_ROWS and most < RING - 1:
            return "used"
        return "owed" if most else "all"

    def stepped(self, requests: Sequence[Request], kind: KeyValues) -> None:
        """A step of these rows, which are seated, did that."""
        if kind == "used":
            for request in requests:
                self._since[request] += 1
        else:  # all rows together, so that they come due together from then on
            self._since.update(dict.fromkeys(requests, 0))

    def deferral(self, kind: KeyValues, slots: Tensor) -> Deferral | None:
        """For the forward of such a step. slots: int32 `[B]`."""
        return None if kind == "all" else Deferral(self._kv, slots, complete=kind == "owed")
