"""Models larger than their device, to be run over whole texts: blocks come from the checkpoint one
by one, and each serves many windows of text before the next is read (`models.streaming`)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.device import free_memory, resolve_device
from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.load import (
    DTYPES,
    LoadedModel,
    Progress,
    check_dtype,
    check_names,
    check_tensor,
    checkpoint_name,
    kept_dtype,
    load_model,
    settle_tie,
    slot_sizes,
    stored_matrix,
    todays_names,
    with_scales,
)
from dejavu.models.base import Block, DecoderLM
from dejavu.models.slots import Kind, Slot, assemble_around, block, slots
from dejavu.models.streaming import StreamedBlocks
from dejavu.registry import architecture, unknown
from dejavu.weights.checkpoint import Checkpoint, open_checkpoint

_ROOM = 0.85  # of the memory, for weights that are all to be there: activations need some too
_LEAST_STATES = 1 / 8  # of the memory, for hidden states and what an op needs


def load_to_read(
    source: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    memory: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """A model for forwards over whole texts: as `load_model` gives it where it fits into the
    device's memory, else with blocks that are streamed (`DecoderLM.streamed`), said by a warning.

    memory: bytes of the device to use; default: what is free on a GPU; a CPU holds everything.
    Raises what `load_model` raises; InputError, with what is missing, where not even one block
    fits beside the embeddings.
    """
    target = resolve_device(device)
    if memory is None:
        if target.type != "cuda":
            return load_model(source, dtype=dtype, device=target, progress=progress)
        memory = free_memory(target)
    reader = BlockReader(source, dtype=dtype, device=target)
    if reader.total <= _ROOM * memory:
        return load_model(source, dtype=dtype, device=target, progress=progress)
    warnings.warn(
        f"{reader.checkpoint.path} needs {reader.total / 1e9:.2f} GB on {reader.device}, of which "
        f"{memory / 1e9:.2f} GB are to be used: its blocks are read one by one for every pass over "
        "the text",
        stacklevel=2,
    )
    return reader.streamed(memory)


class BlockReader:
    """A checkpoint that is read block by block.

    total: bytes of the whole model on the device. Raises what `load_model` raises of a checkpoint
    that cannot be used.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        device: str | torch.device = "cpu",
    ) -> None:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES, InputError)
        self.device = resolve_device(device)
        check_dtype(dtype, self.device)
        self.checkpoint: Checkpoint = open_checkpoint(source)
        if dtype == "auto" and self.checkpoint.quantization == "int8":
            check_dtype("int8", self.device)
        module = architecture(self.checkpoint.config.get("model_type"))
        self.config: ModelConfig = module.config_from_hf(self.checkpoint.config)
        self._dtype = dtype
        # One for all blocks: memory that a stream gave back serves that stream alone.
        self._stream: Any = None
        self._held = todays_names(self.checkpoint, module)
        self._wanted = slots(self.config)
        if (
            self.config.tie_word_embeddings
            and module.CHECKPOINT_NAMES["lm_head"] in self._held.values()
        ):
            self._wanted["lm_head"] = self._wanted["embed_tokens"]
        self._names = {
            checkpoint_name(slot, module.CHECKPOINT_NAMES): slot for slot in self._wanted
        }
        check_names(self.checkpoint, set(self._held.values()), self._names, self.config)
        self._sizes = {
            slot: size
            for slot, (size, _) in slot_sizes(
                self.checkpoint, self._held, self._names, self._wanted, dtype, self.device
            ).items()
        }
        self.total = sum(self._sizes.values())

    def streamed(self, memory: int) -> LoadedModel:
        """The model in so many bytes of its device. Raises InputError where it cannot be."""
        layers = range(self.config.num_hidden_layers)
        largest = max(self._bytes(f"layers.{layer}.") for layer in layers)
        outside = self.total - sum(self._bytes(f"layers.{layer}.") for layer in layers)
        least = outside + largest + int(_LEAST_STATES * memory)
        if least > memory:
            raise InputError(
                f"{self.checkpoint.path}: one block of {largest / 1e9:.2f} GB beside embeddings of "
                f"{outside / 1e9:.2f} GB and hidden states needs {least / 1e9:.2f} GB of "
                f"{self.device}, which has {memory / 1e9:.2f} GB: {(least - memory) / 1e9:.2f} GB "
                "are missing; free it of other work, or run on --device cpu"
            )
        ahead = least + largest <= memory
        matrices, vectors = self._filled(s for s in self._wanted if not s.startswith("layers."))
        config = settle_tie(self.config, matrices)
        blocks = StreamedBlocks(
            len(layers),
            self.block,
            device=self.device,
            state_bytes=(memory - outside - (1 + ahead) * largest) // 4,
            outline=tuple(self._outline(layer) for layer in layers),
            ahead=ahead,
        )
        weights = assemble_around(config, matrices, vectors, blocks)
        stored = blocks.outline[0].mlp.up.weight.dtype
        return LoadedModel(DecoderLM(config, weights), self.checkpoint, stored)

    def block(self, layer: int) -> Block:
        """One block, on the device."""
        names = [slot for slot in self._wanted if slot.startswith(f"layers.{layer}.")]
        if self.device.type != "cuda":
            return block(self.config, *self._filled(names), layer)
        with torch.cuda.device(self.device):
            # Not the stream of the work on the block before, behind which copies would queue.
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                made = block(self.config, *self._filled(names), layer)
                self._stream.synchronize()
        return made

    def _bytes(self, prefix: str) -> int:
        return sum(size for slot, size in self._sizes.items() if slot.startswith(prefix))

    def _filled(self, wanted: Iterable[str]) -> tuple[dict[str, Matrix], dict[str, Tensor]]:
        chosen = set(wanted)
        names = {name: slot for name, slot in self._names.items() if slot in chosen}
        matrices: dict[str, Matrix] = {}
        vectors: dict[str, Tensor] = {}
        for name, tensor, scale in with_scales(self.checkpoint, self._held, names):
            slot = self._wanted[names[name]]
            check_tensor(self.checkpoint, name, tensor, scale, slot)
            if slot.kind is Kind.VECTOR:
                vectors[names[name]] = tensor.to(self.device, torch.float32, copy=True)
            else:
                matrices[names[name]] = stored_matrix(tensor, scale, slot, self._dtype, self.device)
        return matrices, vectors

    def _outline(self, layer: int) -> Block:
        """A block without its numbers: what is counted of it is right."""
        infos = {self._held[name]: info for name, info in self.checkpoint.tensor_infos().items()}
        matrices: dict[str, Matrix] = {}
        vectors: dict[str, Tensor] = {}
        for name, slot_name in self._names.items():
            if not slot_name.startswith(f"layers.{layer}."):
                continue
            slot, dtype = self._wanted[slot_name], self._dtype
            if slot.kind is Kind.VECTOR:
                vectors[slot_name] = torch.empty(slot.shape, device="meta")
                continue
            if dtype == "auto":
                stored = infos[name].dtype
                dtype = "int8" if stored == torch.int8 else kept_dtype(stored, self.device)
            matrices[slot_name] = _without_numbers(slot, dtype)
        return block(self.config, matrices, vectors, layer)


def _without_numbers(slot: Slot, dtype: str) -> Matrix:
    shape = slot.shape[::-1] if slot.kind is Kind.BY_INPUT else slot.shape
    data = torch.empty(shape, dtype=WEIGHT_DTYPES[dtype], device="meta")
    return Matrix(data, torch.empty(shape[0], device="meta") if dtype == "int8" else None)
