"""Static pruning: the same neurons for every token. What contextual sparsity is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dejavu.errors import InputError
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.sparsity.model_view import Cache, ModelView
from dejavu.sparsity.policy import Points, Selector, Site
from dejavu.sparsity.record import Recorder


class Static(Selector):
    """Lists made once, the same for any token. masks: bool `[F]` a layer."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        self._lists = [Selection.from_mask(mask[None]) for mask in masks]

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        return self._lists[layer] if site is Site.NEURONS else None


def static(
    model: ModelView[Cache], windows: Callable[[], Sequence[Tensor]], *, keep: float = 0.5
) -> Selector:
    """The neurons, of all layers together, with the largest mean contribution on a text."""
    if not 0.0 < keep <= 1.0:
        raise InputError(f"policy static: keep must lie in (0, 1], not {keep:g}")
    recorder = Recorder(model)
    layers = model.config.num_hidden_layers
    total = torch.zeros(layers, model.config.intermediate_size, device=model.device)
    with torch.inference_mode():
        for window in windows():
            recorder.clear()
            model.logits(window, model.new_cache(len(window)), recorder, TorchOps())
            for layer in range(layers):
                total[layer] += recorder.scores(Site.NEURONS, layer).sum(dim=0)
    count = max(1, round(keep * total.numel()))
    masks = torch.zeros_like(total, dtype=torch.bool).flatten()
    masks[total.flatten().topk(count).indices] = True
    return Static(list(masks.view_as(total)))
