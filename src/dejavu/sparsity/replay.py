"""A selector that plays back masks chosen beforehand, one row a token: the second of two passes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.sparsity.policy import Key, Points, Selector, Site

Masks = Mapping[Key, Tensor]


class Replay(Selector):
    """Selects what the masks say; a site and layer without a mask computes everything.

    masks: bool `[N, entries]` by (site, layer), row i for the i-th token of the one forward the
    masks are meant for.
    """

    capturable = False

    def __init__(self, masks: Masks) -> None:
        self._masks = masks

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        mask = self._masks.get((site, layer))
        if mask is None:
            return None
        assert len(mask) == len(points.source(site, layer)), "masks of another window"
        return Selection.from_mask(mask)
