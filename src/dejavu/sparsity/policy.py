"""The seam: a model's forward asks a `Selector` what to compute, and cannot tell selectors apart.

Dense, oracle, predictor, threshold, static pruning and the recorder are all selectors, so that
measuring, collecting, evaluating and serving run one forward.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, Self

from torch import Tensor

from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection


class Site(StrEnum):
    """Where a block can skip work. Entries of HEADS are KV groups (heads, without GQA)."""

    HEADS = "heads"
    NEURONS = "neurons"


Key = tuple[Site, int]
"""A site of a layer."""


def point(site: Site, layer: int, distance: float = 0.0) -> int:
    """The number of the point (see `Points`) that a site reads at a look-ahead of 0, 0.5 or 1
    block; below 0 where no block is that far back."""
    return 2 * layer + (site == Site.NEURONS) - round(2 * distance)


class Stage(StrEnum):
    """Intermediate results a selector may look at, beside the points it selects from."""

    BLOCK_INPUT = "block_input"  # the stream [N, D] entering block `layer` (and after the last)
    BLOCK_MIDDLE = "block_middle"  # the stream [N, D] between attention and MLP
    HEAD_OUTPUTS = "head_outputs"  # [N, H, d], before the output projection
    LOGITS = "logits"  # [N, V]


class Points:
    """The inputs of attention and MLP of every block so far, in the order they were computed.

    Selections read from them: distance 0 is the site's own input, 1/2 the one half a block before,
    1 the same site's of the previous block (look-ahead; Deja Vu, section 4.2).
    """

    REACH = 3  # inputs that a distance of 1 reaches over, the site's own included

    def __init__(self, positions: Tensor | None = None, *, brief: bool = False) -> None:
        """positions: int64 `[N]`, places of the rows in their texts. brief: let go of inputs that
        no distance reaches any more. (Not where work ahead may still be reading them on a GPU.)"""
        self.positions = positions
        self._inputs: list[Tensor | None] = []
        self._brief = brief

    def add(self, hidden: Tensor) -> None:
        """Append the next input, fp32 `[N, D]` (after its norm, as the projections read it)."""
        self._inputs.append(hidden)
        if self._brief and len(self._inputs) > self.REACH:
            self._inputs[-1 - self.REACH] = None

    def source(self, site: Site, layer: int, distance: float = 0.0) -> Tensor:
        """fp32 `[N, D]`: what `site` of `layer` reads at a look-ahead of 0, 0.5 or 1 block."""
        index = point(site, layer, distance)
        assert index >= 0, "a plan never looks ahead of the first block"
        found = self._inputs[index]
        assert found is not None, "a plan looks one block ahead at most"
        return found


class InputReader(Protocol):
    """How one block reads its projections where a selector skips input channels; it stands in for
    the block's dense projections, and nothing is selected at the sites of `Site` then."""

    def qkv(self, x: Tensor, points: Points, ops: Ops) -> list[Tensor]:
        """q, k, v of the attention's input fp32 `[N, D]`."""
        ...

    def o(self, heads: Tensor, residual: Tensor, points: Points, ops: Ops) -> Tensor:
        """residual + output projection of the heads' outputs fp32 `[N, H * d]`."""
        ...

    def mlp(self, x: Tensor, residual: Tensor, points: Points, ops: Ops) -> Tensor:
        """residual + MLP of its input fp32 `[N, D]`."""
        ...


class Selector:
    """Base of all selectors; by itself the dense arm: everything is selected.

    capturable: whether `select` works through `ops` alone, on static buffers, so that a recorded
    decode step may replay it.
    """

    capturable = True

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        """What `layer` computes at `site` for each row; None: everything."""
        return None

    def inputs(self, layer: int) -> InputReader | None:
        """What reads the projections of `layer`; None: the model itself, all input channels."""
        return None

    def observe(self, stage: Stage, layer: int, value: Tensor) -> None:
        """See an intermediate result; never change it."""

    def fork(self) -> Self:
        """One for a forward that runs in turns with others: itself, where it keeps nothing from
        one layer to the next. What is counted is counted by both together."""
        return self


class Dense(Selector):
    """Everything is selected."""
