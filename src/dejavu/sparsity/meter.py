"""Count what selections make the ops read, in buffers that a recorded step can add to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.sparsity.accounting import LayerReads
from dejavu.sparsity.policy import Key, Selector, Site


class Meter:
    """Entries listed, used and active, by site and layer, summed over steps.

    On a GPU steps count there, and only the questions below wait for it.

    live: int32 `[1]` on the device, rows of a step that count, the others being padding; None: all.
    """

    def __init__(self, layers: int, device: torch.device | None = None) -> None:
        """device: of the selections."""

        def zeros(columns: int) -> Tensor:
            return torch.zeros(layers, columns, dtype=torch.int64, device=device)

        # Filled by `Ops.tally`: entries read, entries used summed over rows, rows.
        self._counters = {site: zeros(3) for site in Site}
        self._active = zeros(1)
        self._rows = 1
        self._steps = self._lazy = 0
        # The same three numbers of places that a step computes whole, and such steps.
        self._whole = {site: np.zeros((layers, 4), dtype=np.int64) for site in Site}
        self.live: Tensor | None = None

    def watch(self, layer: int, selection: Selection) -> Selection:
        """The same selection of neurons, whose active ones are counted by `Ops.mlp`."""
        return replace(selection, active=self._active[layer])

    def tally(self, site: Site, layer: int, selection: Selection, rows: int, ops: Ops) -> None:
        """Count one step's selection."""
        self._rows = rows
        ops.tally(selection, rows, self._counters[site][layer], live=self.live)

    def stepped(self, rows: int, *, lazy: bool, whole: Mapping[Key, int] | None = None) -> None:
        """A step of so many live rows ran; lazy: without k and v of unused heads. whole: sites and
        layers that computed all their entries in place of selecting, with the number of these."""
        self._rows = rows
        self._steps += 1
        self._lazy += lazy
        for (site, layer), entries in (whole or {}).items():
            self._whole[site][layer] += entries, entries * rows, rows, 1

    def choosing(self, site: Site, layer: int) -> float:
        """Share of the steps since the last reset in which a place was not computed whole."""
        return 1.0 - float(self._whole[site][layer, 3]) / max(self._steps, 1)

    def whole_share(self) -> float:
        """Share of the MLPs of all steps since the last reset that were computed whole in place of
        choosing from them."""
        return float(self._whole[Site.NEURONS][:, 3].mean()) / max(self._steps, 1)

    def reset(self) -> None:
        """Start anew."""
        for counter in self._counters.values():
            counter.zero_()
        self._active.zero_()
        self._steps = self._lazy = 0
        for whole in self._whole.values():
            whole.fill(0)

    def snapshot(self) -> list[Tensor]:
        """The counts as they are, for `restore`."""
        return [tensor.clone() for tensor in (*self._counters.values(), self._active)]

    def restore(self, counts: list[Tensor]) -> None:
        """Forget what was counted since a snapshot."""
        for tensor, before in zip((*self._counters.values(), self._active), counts, strict=True):
            tensor.copy_(before)

    def used(self, site: Site = Site.NEURONS) -> list[float]:
        """Entries that a row used, mean over rows and steps, by layer; 0 where nothing selects."""
        return [used / max(rows, 1) for _, used, rows in self._counted(site)]

    def chosen(self, site: Site) -> list[float | None]:
        """Entries that a row chose, mean over rows and the steps in which it did, by layer; None
        where it never did."""
        return [used / rows if rows else None for _, used, rows in self._counters[site].tolist()]

    def density(self, neurons: int) -> float:
        """Share of a layer's `neurons` that a row used, mean over layers, rows and steps.

        Steps may have had any numbers of rows. A layer that never selected has used all.
        """
        counted = self._counted(Site.NEURONS)
        shares = [used / (rows * neurons) if rows else 1.0 for _, used, rows in counted]
        return sum(shares) / len(shares)

    def reads(self, steps: int | None = None) -> list[LayerReads]:
        """Mean over the steps since the last reset, by layer: what any row of a step read.

        steps: how many there were; default: as if all had as many rows as the last one. A site that
        never selected has read everything.
        """
        found = []
        all_active = self._whole[Site.NEURONS][:, 0]
        for neurons, active, heads in zip(
            self._counted(Site.NEURONS),
            (self._active[:, 0].cpu().numpy() + all_active).tolist(),
            self._counted(Site.HEADS),
            strict=True,
        ):
            of_neurons, of_heads = (
                (rows // self._rows if steps is None else steps) if rows else 0
                for rows in (neurons[2], heads[2])
            )
            found.append(
                LayerReads(
                    neurons=neurons[0] / of_neurons if of_neurons else None,
                    active=active / of_neurons if of_neurons else None,
                    groups=heads[0] / of_heads if of_heads else None,
                    lazy=self._lazy / max(self._steps, 1) if of_heads else 0.0,
                )
            )
        return found

    def _counted(self, site: Site) -> list[list[int]]:
        """Entries read, entries used, rows, by layer."""
        counted: NDArray[np.int64] = self._counters[site].cpu().numpy() + self._whole[site][:, :3]
        found: list[list[int]] = counted.tolist()
        return found


class MeteredSelector(Selector):
    """A selector with a meter, that says what its steps read and what choosing costs.

    predictor_bytes: read by a step to choose, whatever is chosen.
    """

    predictor_bytes: float = 0

    def __init__(self, layers: int, device: torch.device | None = None) -> None:
        self.meter = Meter(layers, device)

    def reset(self) -> None:
        """Start counting anew."""
        self.meter.reset()

    def reads(self) -> list[LayerReads]:
        """Mean over the steps since the last reset, by layer."""
        return self.meter.reads()
