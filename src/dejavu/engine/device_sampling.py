"""Sampling of many rows at once on the device of their logits, by the rules of `sampling.py`.

Every row is drawn by itself: filters, sums and the search run along rows. The random number of a
row comes from its request's own generator on the host, the same one the host would use, so a seed
means the same answer wherever it is sampled, up to the rounding of `exp` and of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Token ids int64 `[B]` from logits fp32 `[B, V]`, without waiting for the device.

    temperature, top_p, min_p: fp32 `[B]`; top_k: int64 `[B]`, V for all; uniform: fp64 `[B]` in
    [0, 1). Rows of temperature 0, or with logits that are not finite, get some id.
    """
    weights = _weights(logits, temperature, top_k, top_p, min_p)
    running = weights.cumsum(dim=1, dtype=torch.float64)
    target = uniform[:, None] * running[:, -1:]
    # The first place whose running sum exceeds the target: its own weight is above 0.
    place = torch.searchsorted(running, target, right=True)[:, 0]
    return place.clamp_(max=logits.shape[1] - 1)


def _weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """See `sampling.probabilities`: unnormalised, 0 where cut."""
    # The largest score goes first: nothing can overflow then, however small the temperature.
    weights = logits - logits.amax(dim=1, keepdim=True)
    weights = weights.div_(temperature[:, None]).exp_()
    ordered = weights.sort(dim=1, descending=True).values
    cut = ordered.gather(1, top_k.clamp(1, logits.shape[1])[:, None] - 1)
    mass = ordered.masked_fill(ordered < cut, 0.0).double()
    above = mass.cumsum(dim=1)
    total = above[:, -1:].clone()
    above -= mass
    inside = (above < top_p[:, None].double() * total).sum(dim=1, keepdim=True).clamp_(min=1)
    nucleus = ordered.gather(1, inside - 1)
    cut = torch.where(top_p[:, None] < 1.0, torch.maximum(cut, nucleus), cut)
    cut = torch.maximum(cut, min_p[:, None])  # the likeliest token has weight 1
    return weights.masked_fill_(weights < cut, 0.0)
