"""The first of two passes: a dense forward, watched.

Deja Vu (section 3) finds contextual sparsity by running a model once in full and noting which
neurons and heads mattered to each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dejavu.kernels.ops import Activation, Ops, Projection
from dejavu.kernels.reference import activate
from dejavu.kernels.selection import Selection
from dejavu.sparsity.model_view import Cache, MLPView, ModelView
from dejavu.sparsity.policy import Points, Selector, Site, Stage


def neuron_activations(x: Tensor, mlp: MLPView, activation: Activation, ops: Ops) -> Tensor:
    """Activation of every neuron, fp32 `[N, F]`, from the MLP's input `[N, D]`."""
    up = Projection(mlp.up.weight, mlp.up.bias)
    if mlp.gate is None:
        (a,) = ops.linear(x, [up])
        return activate(a, activation)
    a, gate = ops.linear(x, [up, Projection(mlp.gate.weight, mlp.gate.bias)])
    return a.mul_(activate(gate, activation))


def down_norms(mlp: MLPView) -> Tensor:
    """`||W_down[:, j]||` of every neuron, fp32 `[F]`: what activation 1 adds."""
    norms: Tensor = torch.linalg.vector_norm(mlp.down.weight.float(), dim=1)
    return norms


def group_norms(heads: Tensor, o: Tensor, groups: int) -> Tensor:
    """L2 norm of what each KV group adds to the residual stream, fp32 `[N, groups]`.

    heads: `[N, H, d]` before the output projection; o: its weight transposed, fp32 `[H * d, D]`.
    The group's own slice of the projection is applied first: a large head output that the
    projection maps to nothing is not a large head.
    """
    slices = o.view(groups, -1, o.shape[1])  # [groups, c, D]
    # ||x W||^2 = x (W W^T) x^T: c columns in place of D, a sixteenth of the work for heads of 32.
    gram = slices @ slices.transpose(1, 2)
    x = heads.flatten(1).view(len(heads), groups, -1).transpose(0, 1)  # [groups, N, c]
    return (x @ gram).mul_(x).sum(dim=2).clamp_min_(0.0).sqrt_().t()


class Recorder(Selector):
    """The dense arm with a notebook; holds one forward at a time.

    activations: fp32 `[N, F]` of each layer. head_norms: fp32 `[N, K]` of each layer, see
    `group_norms`. residuals: the residual stream fp32 `[N, D]` at every half block: entering each
    block, between its attention and MLP, and after the last block.
    """

    capturable = False

    def __init__(self, model: ModelView[Cache]) -> None:
        self._blocks = model.weights.blocks
        self._activation = model.activation
        self._groups = model.config.num_key_value_heads
        self._down_norms = [down_norms(block.mlp) for block in self._blocks]
        self.clear()

    def clear(self) -> None:
        """Forget the last forward; to be called before the next one."""
        self.activations: list[Tensor] = []
        self.head_norms: list[Tensor] = []
        self.residuals: list[Tensor] = []

    def scores(self, site: Site, layer: int) -> Tensor:
        """How much each entry matters to each token, fp32 `[N, entries]`.

        The norm of what it adds to the residual stream: `|a_j| * ||W_down[:, j]||` for a neuron
        (its contribution), `group_norms` for a head.
        """
        if site == Site.HEADS:
            return self.head_norms[layer]
        return self.activations[layer].abs().mul_(self._down_norms[layer])

    def relative_scores(self, site: Site, layer: int) -> Tensor:
        """The same over the norm of the stream that comes out, token by token.

        The stream grows along the layers, so the same addition means less to a later one.
        """
        after = self.residuals[2 * layer + (2 if site == Site.NEURONS else 1)]
        norms: Tensor = torch.linalg.vector_norm(after, dim=1, keepdim=True)
        return self.scores(site, layer) / norms.clamp_(min=1e-30)

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site == Site.NEURONS:
            x = points.source(site, layer)
            mlp = self._blocks[layer].mlp
            self.activations.append(neuron_activations(x, mlp, self._activation, ops))
        return None

    def observe(self, stage: Stage, layer: int, value: Tensor) -> None:
        if stage == Stage.HEAD_OUTPUTS:
            o = self._blocks[layer].attention.o.weight.float()
            self.head_norms.append(group_norms(value, o, self._groups))
        elif stage in (Stage.BLOCK_INPUT, Stage.BLOCK_MIDDLE):
            self.residuals.append(value)
