"""Rotary position tables, one function a kind (Su et al., 2021, https://arxiv.org/abs/2104.09864).

Channel pair i of a head turns by `position * frequency[i]`; the kinds differ in how they bend the
frequencies of a model trained on short texts so that long ones stay in the range it knows. The
arithmetic is fp32 throughout, as in Hugging Face's `modeling_rope_utils`: at position 100 000 the
last bit of a frequency is visible in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import ConfigError
from dejavu.registry import unknown

Parameters = Mapping[str, Any]


def _plain(dims: int, theta: float) -> Tensor:
    """theta^(-2i / dims), fp32 `[ceil(dims / 2)]`."""
    return 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)


def _default(dims: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    return _plain(dims, theta), 1.0


def _linear(dims: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Positions divided by `factor` (Chen et al., 2023, https://arxiv.org/abs/2306.15595)."""
    return _plain(dims, theta) / parameters["factor"], 1.0


def _llama3(dims: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Pairs that turn more than `high_freq_factor` times within the original length stay as they
    are, those under `low_freq_factor` turns slow down by `factor`, linear in between (Llama 3.1).
    """
    frequencies = _plain(dims, theta)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / parameters["factor"] * (1 - kept), 1.0


def _yarn(dims: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071), section 3.2 and 3.4.

    Like llama3, but the ramp runs over the pair's number, between the pairs that turn `beta_fast`
    and `beta_slow` times within the original length, and cos and sin are scaled to keep the
    attention's entropy.
    """
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

    def pair_turning(times: float) -> float:
        return dims * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_turning(parameters.get("beta_fast") or 32.0)
    last = pair_turning(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 0.001  # as the reference: a ramp of no width is a step
    frequencies = _plain(dims, theta)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    slowed = ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / factor * slowed, _yarn_attention(parameters)


def _yarn_attention(parameters: Parameters) -> float:
    """What cos and sin are multiplied by: `attention_factor`, else from `factor`.

    DeepSeek's pair `mscale`, `mscale_all_dim` counts only when both are given and not 0.
    """
    explicit = parameters.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def scale(weight: float) -> float:
        factor = parameters["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    ours, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(ours) / scale(all_dims) if ours and all_dims else scale(1.0)


KINDS: dict[str, Callable[[int, float, Parameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # up to the original length; beyond it theta grows, see RopeTable.prepare
    "llama3": _llama3,
    "yarn": _yarn,
}


class RopeTable:
    """cos and sin fp32 `[context_length, rotary / 2]`, attention factor multiplied in.

    The two tensors stay the same objects for life: a recorded decode step points at them.

    Raises ConfigError for an unknown kind or a number of rotary channels that cannot be.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        rope = config.rope
        assert rope is not None
        if rope.kind not in KINDS:
            raise unknown("rope_type", rope.kind, KINDS)
        self._rope = rope
        self._dims = int(config.head_dim * rope.parameters.get("partial_rotary_factor", 1.0))
        pairs = (self._dims + 1) // 2  # an odd number of channels is rounded up, as far as it fits
        least = 3 if rope.kind == "dynamic" else 1
        if self._dims < least or 2 * pairs > config.head_dim:
            raise ConfigError(
                f"config.json: rotary embedding {rope.kind!r} cannot turn {self._dims} channels of "
                f"a head of {config.head_dim}; check head_dim and partial_rotary_factor"
            )
        self._trained = config.max_position_embeddings
        self._stretched = self._trained
        self.cos = torch.empty(config.context_length, pairs, device=device)
        self.sin = torch.empty(config.context_length, pairs, device=device)
        self._fill(rope.theta, rows=config.context_length)

    def prepare(self, length: int) -> None:
        """Make the table right for a step whose longest sequence has `length` tokens after it.

        Only dynamic NTK depends on it, by Hugging Face's rule: beyond `max_position_embeddings`
        theta grows with the longest sequence of the step, for all rows of the step; a step of
        short sequences turns by the unscaled theta again. Keys in the cache keep the angles they
        were written with. So a prompt in several chunks is prepared with its full length each time.
        Unlike there, the table depends on `length` alone and never on longer sequences of before.
        """
        assert 0 <= length <= len(self.cos), "the engine ends sequences at context_length"
        stretched = max(length, self._trained)
        if self._rope.kind != "dynamic" or stretched == self._stretched:
            return
        factor = self._rope.parameters["factor"]
        growth = factor * stretched / self._trained - (factor - 1)
        exponent = self._dims / (self._dims - 2)
        self._fill(self._rope.theta * growth**exponent, rows=stretched)
        self._stretched = stretched

    def _fill(self, theta: float, rows: int) -> None:
        kind = KINDS[self._rope.kind]
        frequencies, attention_factor = kind(self._dims, theta, self._rope.parameters)
        cos, sin = self.cos[:rows], self.sin[:rows]
        places = torch.arange(rows, dtype=torch.float32, device=sin.device)
        torch.outer(places, frequencies.to(sin.device), out=sin)  # angles, so far
        torch.cos(sin, out=cos)
        sin.sin_()
        if attention_factor != 1.0:
            cos *= attention_factor
            sin *= attention_factor
