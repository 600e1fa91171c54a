"""Selections recorded on real text, replayed by a model whose weights are random.

How much of what a token needs is in memory already depends on the text: a random model would need
almost the same neurons for every token, or entirely different ones, and either says nothing. So
the true active sets of the embedded model are recorded on its held-out books, and a layer of the
larger shape follows them group by group: neurons `g * F .. (g + 1) * F` of a layer are the `F`
neurons of a recorded layer, as they were active on a stretch of text of the group's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu.bench.forced import default_rank, random_predictors
from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.device import CPU
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.models.base import DecoderLM
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.policy import Key, Points, Selector, Site
from dejavu.sparsity.record import neuron_activations

__all__ = ["Replayed", "Trace", "record_trace"]

_FAR = 1e30  # a bias that no score outweighs


@dataclass(frozen=True, eq=False)
class Trace:
    """What every layer of a shape selects for every token. masks: bool `[tokens, layers, neurons]`.

    stretches: how many pieces of text it was recorded on.
    """

    masks: Tensor
    stretches: int

    @property
    def density(self) -> float:
        """Share of neurons selected, mean over tokens and layers."""
        return float(self.masks.float().mean())

    @property
    def repeated(self) -> float:
        """Share of a token's selections that the token before had selected too."""
        both = (self.masks[1:] & self.masks[:-1]).sum()
        return float(both / self.masks[1:].sum().clamp_min(1))

    @property
    def jaccard(self) -> float:
        """Neurons selected by both of two neighbouring tokens over those of either, mean over
        tokens and layers."""
        both = (self.masks[1:] & self.masks[:-1]).sum(dim=2)
        either = (self.masks[1:] | self.masks[:-1]).sum(dim=2)
        return float((both / either.clamp_min(1)).mean())


class _ActiveSets(Selector):
    """The dense arm, noting which neurons are not zero."""

    capturable = False

    def __init__(self, model: DecoderLM) -> None:
        self._model = model
        self.sets: list[Tensor] = []

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is Site.NEURONS:
            mlp = self._model.weights.blocks[layer].mlp
            x = points.source(site, layer)
            self.sets.append(neuron_activations(x, mlp, self._model.activation, ops) != 0)
        return None


@torch.inference_mode()
def record_trace(
    recorded: DecoderLM, ids: Sequence[int], config: ModelConfig, tokens: int
) -> Trace:
    """Selections of a shape for so many tokens in a row.

    recorded: the model whose active sets are taken. ids: of a text, in its vocabulary. config: of
    the shape. Layers are stretched evenly over the recorded ones; every group of every layer that
    shares a recorded layer gets a stretch of text of its own.

    Raises InputError for a text that is too short, or more tokens than the recorded model reads.
    """
    c = recorded.config
    if tokens > c.context_length:
        raise InputError(f"a trace has at most {c.context_length} tokens, {tokens} are asked for")
    layers, neurons = config.num_hidden_layers, config.intermediate_size
    groups = -(-neurons // c.intermediate_size)
    source = [layer * c.num_hidden_layers // layers for layer in range(layers)]
    sharing = max(source.count(layer) for layer in source)
    stretches = groups * sharing
    if len(ids) < stretches * tokens:
        raise InputError(
            f"a trace of {tokens} tokens for this shape takes {stretches} stretches of text, "
            f"{stretches * tokens} tokens; the text has {len(ids)}"
        )
    cache = recorded.new_cache(tokens)
    masks = torch.zeros(tokens, layers, groups * c.intermediate_size, dtype=torch.bool)
    for stretch in range(stretches):
        watched = _ActiveSets(recorded)
        piece = torch.tensor(ids[stretch * tokens : (stretch + 1) * tokens])
        recorded.logits(piece, cache, watched, TorchOps(), last_only=True)
        place, group = divmod(stretch, groups)
        for layer in range(layers):
            if layer - source.index(source[layer]) == place:
                first = group * c.intermediate_size
                masks[:, layer, first : first + c.intermediate_size] = watched.sets[source[layer]]
    return Trace(masks[:, :, :neurons], stretches)


class Replayed(PlanSelector):
    """A plan's selector that selects what a trace says.

    Its predictors are random, run as any plan's do and cost what they cost; `turn_to` sets their
    biases so far apart that the scores decide nothing. The step may be recorded.
    """

    def __init__(
        self, config: ModelConfig, trace: Trace, *, rank: int | None = None, look_ahead: float = 1.0
    ) -> None:
        """rank: of the predictors; default: `default_rank`. look_ahead: in blocks, see `Points`;
        the first layer predicts from its own input."""
        made = random_predictors(config, rank or default_rank(config), device=CPU)
        choices: dict[Key, Choice] = {
            (Site.NEURONS, layer): Choice(
                predictor, look_ahead if look_ahead <= layer + 0.5 else 0.0
            )
            for layer, predictor in enumerate(made)
        }
        super().__init__(config.num_hidden_layers, config.intermediate_size, choices)
        self._trace = trace

    def turn_to(self, token: int) -> None:
        """Let the next step be this token of the trace."""
        for layer, mask in enumerate(self._trace.masks[token]):
            self.set_bias((Site.NEURONS, layer), torch.where(mask, _FAR, -_FAR))
