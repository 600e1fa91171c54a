"""A model in memory as a source of neurons to pack."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from dejavu.models.base import DecoderLM
from dejavu.weights.bundle_write import LayerNeurons

__all__ = ["ModelNeurons"]


class ModelNeurons:
    """`NeuronSource` of a loaded (or random) model.

    name: for messages. identity: of the checkpoint it came from; default, a hash of the MLPs as
    they are in memory, for models with random weights, which have no checkpoint.
    """

    def __init__(self, model: DecoderLM, *, name: str, identity: str | None = None) -> None:
        first = model.weights.blocks[0].mlp
        self.name = name
        self.dtype = first.up.weight.dtype
        self.hidden_size = model.config.hidden_size
        self.gated = first.gate is not None
        self.neurons = tuple(block.mlp.down.weight.rows for block in model.weights.blocks)
        self.biases: Sequence[str] = tuple(self.layer_of(model, 0).biases)
        self._model = model
        self._identity = identity

    def identity(self) -> str:
        if self._identity is None:
            digest = hashlib.sha256()
            for index in range(len(self.neurons)):
                for part, matrix in self.layer(index).parts.items():
                    digest.update(f"{index} {part} {matrix.dtype}".encode())
                    digest.update(matrix.data.view(-1).view(torch.uint8).numpy().data)
            self._identity = digest.hexdigest()
        return self._identity

    def layer(self, index: int) -> LayerNeurons:
        return self.layer_of(self._model, index)

    @staticmethod
    def layer_of(model: DecoderLM, index: int) -> LayerNeurons:
        """One layer's MLP of a model."""
        mlp = model.weights.blocks[index].mlp
        affine = {"up": mlp.up, "down": mlp.down} | ({"gate": mlp.gate} if mlp.gate else {})
        return LayerNeurons(
            {part: each.weight for part, each in affine.items()},
            {part: each.bias for part, each in affine.items() if each.bias is not None},
        )
