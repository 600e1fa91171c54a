"""The ids that a step picked: on the device from graph to graph, and at last to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dejavu.engine.device_sampling import draw_rows
from dejavu.engine.sampling import Sampler
from dejavu.engine.staging import Staging
from dejavu.kernels.ops import Ops

_NOT_FINITE = -1  # in place of the id of a row whose logits are not


@runtime_checkable
class Picking(Protocol):
    """Ops with kernels for the end of a step and the beginning of the next."""

    def pick(self, logits: Tensor, out: Tensor) -> None:
        """out int64 `[N]` = each row's likeliest id of fp32 `[N, V]`; `_NOT_FINITE` where one of
        its logits is not."""
        ...

    def follow(self, ids: Tensor, picked: Tensor) -> None:
        """Where ids, int64 `[B]`, are below 0: those picked, int64 `[N]`, row for row and from N on
        the last one's; 0 where that is below 0, too."""
        ...


class PickedIds:
    """One id a row: the likeliest, or one drawn in its place."""

    def __init__(self, rows: int, ops: Ops, device: torch.device) -> None:
        """rows: at most."""
        self._ops = ops
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._host = torch.zeros(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._draws = Staging(
            device,
            {
                "uniform": ((rows,), torch.float64),
                "top_k": ((rows,), torch.int64),
                "temperature": ((rows,), torch.float32),
                "top_p": ((rows,), torch.float32),
                "min_p": ((rows,), torch.float32),
            },
        )

    def take_likeliest(self, logits: Tensor) -> None:
        """Of contiguous logits fp32 `[B, V]`, as the end of a graph."""
        ids = self._ids[: len(logits)]
        if isinstance(self._ops, Picking):
            self._ops.pick(logits, ids)
            return
        lowest, highest = logits.aminmax(dim=1)
        # Infinite or NaN where any logit is: one comparison tells.
        broken = (highest - lowest < torch.inf).logical_not_()
        # Not torch.where, which may copy its scalar to the device: no graph can hold that.
        ids.copy_(self._ops.argmax(logits).masked_fill(broken, _NOT_FINITE))

    def draw(self, logits: Tensor, samplers: Sequence[Sampler | None]) -> None:
        """Replace the likeliest ids by drawn ones where a sampler wants that. logits: fp32
        `[B, V]`."""
        rows, vocab_size = logits.shape
        drawing = [
            (row, s)
            for row, s in enumerate(samplers)
            if s is not None and s.plain and not s.params.greedy
        ]
        if not drawing:
            return
        host, device = self._draws.host(), self._draws.device
        host["temperature"][:rows] = 0.0
        for row, sampler in drawing:
            p = sampler.params
            host["uniform"][row] = sampler.uniform()
            host["temperature"][row], host["top_k"][row] = p.temperature, p.top_k or vocab_size
            host["top_p"][row], host["min_p"][row] = p.top_p, p.min_p
        self._draws.send()
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        found = draw_rows(logits, *(device[name][:rows] for name in names))
        ids = self._ids[:rows]
        drawn = (device["temperature"][:rows] > 0) & (ids != _NOT_FINITE)
        ids.copy_(torch.where(drawn, found, ids))

    def follow(self, ids: Tensor, rows: int) -> None:
        """Put the ids of the first `rows` rows where ids, int64 `[bucket]`, are `PICKED`; beyond
        them the last one's."""
        picked = self._ids[:rows]
        if isinstance(self._ops, Picking):
            self._ops.follow(ids, picked)
        else:
            padded = torch.cat([picked, picked[-1:].expand(len(ids) - rows)]).clamp_min(0)
            ids.copy_(torch.where(ids < 0, padded, ids))

    def send(self) -> None:
        """Begin to copy them to the host, in the order of the current stream."""
        self._host.copy_(self._ids, non_blocking=True)

    def arrived(self, rows: int) -> list[int | None]:
        """Those of the first rows, when `send` is through; None where logits are not finite."""
        return [None if token == _NOT_FINITE else token for token in self._host[:rows].tolist()]
