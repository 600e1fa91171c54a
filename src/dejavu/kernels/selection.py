"""Which entries (neurons, heads, input channels) of a layer are read, and which row uses which."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GPU_TILE = 128  # entries: what one program of the selecting kernel scores


def tile_size(entries: int, device: torch.device | str = "cpu") -> int:
    """Entries a tile: a power of two that gives 8 to 32 tiles, at least 32 entries each; on a GPU
    always `GPU_TILE`, since there a tile is made by one of hundreds of programs.

    A tile costs about a microsecond however few of its entries are listed, so it grows to 512
    entries first and only then are there more of them: 14 % of 2048 neurons take 0.9 times as long
    in 8 tiles as in 16, and 0.65 times as in 32; 10 % of 8192 take 0.93 times as long in 16 tiles
    as in 32 (0.89 in 8, which would leave more than 8 threads idle).

    Tiles are the unit of work sharing and of summation: a tile's partial sum is made by one
    thread, in ascending entry order, and tiles are added up in order. So the bits of a result
    depend neither on the number of threads nor on what other rows selected.
    """
    if torch.device(device).type == "cuda":
        return GPU_TILE
    size = 32
    while entries > 32 * size or (size < 512 and entries >= 16 * size):
        size *= 2
    return size


@dataclass(frozen=True, eq=False)
class Selection:
    """One step's choice among `entries` things.

    indices: int32 `[tiles, tile]`; the first `counts[t]` of tile t are valid, ascending, unique,
        within `[t * tile, (t + 1) * tile)`. The union over the rows: it says what is *read*.
    counts: int32 `[tiles]`.
    mask: uint8 `[rows, entries]`, 1 where a row *uses* an entry; None: every row uses every listed
        entry (always so for one row). An entry that is read for another row never enters a row's
        result.
    active: int64 `[1]` or None; `ops.mlp` adds to it the listed neurons whose activation is not 0
        for some row that uses them: with a selection, down rows of all others are not read either.
    All of static shape, filled in place by selectors, so a captured step can replay.
    """

    entries: int
    indices: Tensor
    counts: Tensor
    mask: Tensor | None = None
    active: Tensor | None = None

    @staticmethod
    def full(entries: int, *, device: str | torch.device = "cpu") -> Selection:
        """Everything listed, for any number of rows: the sparse path with nothing left out.

        Unlike `None` (read everything) it lets `ops.mlp` skip the down rows of neurons that the
        activation itself zeroes, which changes no bit of the result.
        """
        selection = Selection.empty(entries, 1, device=device)
        tiles, tile = selection.indices.shape
        numbers = torch.arange(tiles * tile, dtype=torch.int32, device=device).view(tiles, tile)
        selection.counts.copy_((numbers < entries).sum(dim=1))
        selection.indices.copy_(torch.where(numbers < entries, numbers, 0))
        return selection

    @staticmethod
    def empty(entries: int, rows: int, *, device: str | torch.device = "cpu") -> Selection:
        """Buffers for `rows` rows with nothing selected."""
        tile = tile_size(entries, device)
        tiles = -(-entries // tile)
        mask = torch.zeros(rows, entries, dtype=torch.uint8, device=device) if rows > 1 else None
        return Selection(
            entries,
            torch.zeros(tiles, tile, dtype=torch.int32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
            mask,
        )

    @staticmethod
    def from_mask(mask: Tensor) -> Selection:
        """Selection of a bool or uint8 `[rows, entries]` mask (host work, not to be recorded)."""
        rows, entries = mask.shape
        selection = Selection.empty(entries, rows, device=mask.device)
        used = mask.bool()
        tile = selection.indices.shape[1]
        padded = torch.zeros(selection.indices.numel(), dtype=torch.bool, device=mask.device)
        padded[:entries] = used.any(dim=0)
        tiled = padded.view(-1, tile)
        selection.counts.copy_(tiled.sum(dim=1))
        order = torch.argsort(~tiled, dim=1, stable=True)
        starts = torch.arange(len(tiled), device=mask.device)[:, None] * tile
        selection.indices.copy_(torch.where(torch.gather(tiled, 1, order), order + starts, 0))
        if selection.mask is not None:
            selection.mask.copy_(used)
        return selection

    def to_mask(self, rows: int) -> Tensor:
        """bool `[rows, entries]`: which row uses which entry."""
        if self.mask is not None:
            return self.mask.bool()
        listed = torch.arange(self.indices.shape[1], device=self.indices.device)
        valid = listed < self.counts[:, None]
        used = torch.zeros(self.entries, dtype=torch.bool, device=self.indices.device)
        used[self.indices[valid].long()] = True
        return used.expand(rows, -1)
