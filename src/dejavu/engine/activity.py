"""What was active for a token: a picture of every layer's selection, coarse enough to send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dejavu.kernels.selection import Selection


@dataclass(frozen=True)
class LayerActivity:
    """One layer for one token.

    neurons: share selected of each block of neurons (see `block_size`; the last may be short).
    density: share of all its neurons. heads: for each KV group whether it was computed.
    """

    neurons: tuple[float, ...]
    density: float
    heads: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class StepActivity:
    """All rows of one step. neurons: fp32 `[rows, layers, blocks]`; density: fp32 `[rows, layers]`;
    heads: bool `[rows, layers, groups]`."""

    neurons: Tensor
    density: Tensor
    heads: Tensor

    def row(self, place: int) -> tuple[LayerActivity, ...]:
        """Of one row, layer by layer."""
        return tuple(
            LayerActivity(tuple(neurons), density, tuple(heads))
            for neurons, density, heads in zip(
                self.neurons[place].tolist(),
                self.density[place].tolist(),
                self.heads[place].tolist(),
                strict=True,
            )
        )


@runtime_checkable
class Watchable(Protocol):
    """A selector that keeps its last selections (`PlanSelector`)."""

    def last(self, rows: int) -> tuple[list[Selection | None], list[Selection | None]]:
        """Of neurons and of heads, by layer, in the last step of so many rows; None: all."""
        ...


def block_size(neurons: int) -> int:
    """Neurons a block: so many that a layer has 32 blocks at most."""
    return -(-neurons // 32)


def activity(selector: Watchable, rows: int, neurons: int, groups: int) -> StepActivity:
    """The last step of `rows` rows. neurons, groups: of a layer."""
    chosen_neurons, chosen_heads = selector.last(rows)
    used = _masks(chosen_neurons, rows, neurons)
    size = block_size(neurons)
    padded = torch.nn.functional.pad(used, (0, -neurons % size))
    sizes = torch.full((padded.shape[-1] // size,), float(size))
    sizes[-1] -= -neurons % size
    return StepActivity(
        padded.view(*padded.shape[:2], -1, size).sum(dim=-1) / sizes,
        used.mean(dim=-1),
        _masks(chosen_heads, rows, groups).bool(),
    )


def _masks(chosen: list[Selection | None], rows: int, entries: int) -> Tensor:
    """fp32 `[rows, layers, entries]`, 1 where a row used an entry."""
    full = torch.ones(rows, entries)
    return torch.stack(
        [full if c is None else c.to_mask(rows).cpu().float() for c in chosen], dim=1
    )
