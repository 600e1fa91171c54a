"""The one place where checkpoint, config, model and dtype become a ready model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import CheckpointError, InputError
from dejavu.kernels.device import check_fit, resolve_device
from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.models.base import DecoderLM
from dejavu.models.slots import Kind, Slot, assemble, slots
from dejavu.registry import architecture, unknown
from dejavu.weights.bundle_write import LayerNeurons
from dejavu.weights.checkpoint import Checkpoint, open_checkpoint

DTYPES = ("auto", *WEIGHT_DTYPES)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Progress = Callable[[int, int], None]  # tensors done, tensors in all


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and where it came from. dtype: of its MLP matrices, as loaded."""

    model: DecoderLM
    checkpoint: Checkpoint
    dtype: str


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    elsewhere: Mapping[str, Matrix] | None = None,
) -> LoadedModel:
    """Read a checkpoint (local folder, GGUF file or Hub id) into a `DecoderLM`.

    dtype: of the weight matrices, fp32, bf16, int8 (one scale a stored row; CPU only) or fp16 (GPU
    only); auto keeps the file's own (on the CPU fp16 becomes bf16). Norms and biases are fp32.
    device: cpu, cuda or cuda:N; tensors go there one by one as they are read. Peak memory of the
    machine is about one shard, and the model where it is for the CPU.
    elsewhere: matrices by slot name that are not read from the checkpoint, since they are had.

    Raises CheckpointError naming missing, unexpected or misshapen tensors, ConfigError for a model
    that cannot be built, InputError for a bad `dtype`, `device` or source and for a model that does
    not fit into the GPU's free memory (before anything is read), BackendError for a GPU that is not
    there.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES, InputError)
    target = resolve_device(device)
    check_dtype(dtype, target)
    checkpoint = open_checkpoint(source)
    if dtype == "auto" and checkpoint.quantization == "int8":
        check_dtype("int8", target)
    module = architecture(checkpoint.config.get("model_type"))
    config: ModelConfig = module.config_from_hf(checkpoint.config)
    held = todays_names(checkpoint, module)
    wanted = slots(config)
    if config.tie_word_embeddings and module.CHECKPOINT_NAMES["lm_head"] in held.values():
        wanted["lm_head"] = wanted["embed_tokens"]
    names = {checkpoint_name(slot, module.CHECKPOINT_NAMES): slot for slot in wanted}
    check_names(checkpoint, set(held.values()), names, config)
    _check_fit(checkpoint, held, names, wanted, dtype, target)
    matrices: dict[str, Matrix] = dict(elsewhere or {})
    vectors: dict[str, Tensor] = {}
    names = {name: slot for name, slot in names.items() if slot not in matrices}
    for done, (name, tensor, scale) in enumerate(with_scales(checkpoint, held, names), 1):
        slot_name = names[name]
        slot = wanted[slot_name]
        check_tensor(checkpoint, name, tensor, scale, slot)
        if slot.kind is Kind.VECTOR:
            vectors[slot_name] = tensor.to(target, torch.float32, copy=True).contiguous()
        else:
            matrices[slot_name] = stored_matrix(tensor, scale, slot, dtype, target)
        if progress is not None:
            progress(done, len(names))
    config = settle_tie(config, matrices)
    weights = assemble(config, matrices, vectors)
    stored = weights.blocks[0].mlp.up.weight.dtype
    return LoadedModel(DecoderLM(config, weights), checkpoint, stored)


def todays_names(checkpoint: Checkpoint, module: ModuleType) -> dict[str, str]:
    """Name in the file -> name in today's spelling, one to one."""
    held: dict[str, str] = {}
    origin: dict[str, str] = {}
    for name in checkpoint.tensor_names():
        held[name] = module.sanitize(name)
        if held[name] in origin:
            raise CheckpointError(
                f"{checkpoint.path} has both {origin[held[name]]} and {name}, two spellings of one "
                "tensor; remove one"
            )
        origin[held[name]] = name
    return held


def settle_tie(config: ModelConfig, matrices: dict[str, Matrix]) -> ModelConfig:
    """A stored head that differs from the embedding wins over `tie_word_embeddings`.

    So do transformers; a .bin file stores both of a tied pair, and then they are equal.
    """
    head, embedding = matrices.get("lm_head"), matrices["embed_tokens"]
    if head is None or not config.tie_word_embeddings:
        return config
    same = torch.equal(head.data, embedding.data) and (
        head.scale is None or embedding.scale is None or torch.equal(head.scale, embedding.scale)
    )
    if not same:
        return replace(config, tie_word_embeddings=False)
    del matrices["lm_head"]
    return config


def checkpoint_name(slot: str, table: dict[str, str]) -> str:
    """`layers.3.mlp.up.weight` -> `model.decoder.layers.3.fc1.weight`, by the longest match."""
    prefix = ""
    if slot.startswith("layers."):
        _, index, slot = slot.split(".", 2)
        prefix = f"{table['layers']}.{index}."
    if slot in table:
        return prefix + table[slot]
    stem, _, leaf = slot.rpartition(".")
    return f"{prefix}{table[stem]}.{leaf}"


def check_names(
    checkpoint: Checkpoint, held: set[str], names: dict[str, str], config: ModelConfig
) -> None:
    """Every slot filled, every tensor used."""
    ignored = {name for name in held if name.endswith("rotary_emb.inv_freq")}
    ignored |= {f"{name}_scale" for name in names}
    for problem, found in (
        ("lacks", sorted(names.keys() - held)),
        ("has unexpected", sorted(held - names.keys() - ignored)),
    ):
        if found:
            shown = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if found[8:] else "")
            raise CheckpointError(
                f"{checkpoint.path} {problem} {len(found)} tensors of a "
                f"{config.model_type} model: {shown}"
            )


def check_tensor(
    checkpoint: Checkpoint, name: str, tensor: Tensor, scale: Tensor | None, slot: Slot
) -> None:
    """Shape as the config asks for, a float dtype, or int8 with one scale a stored row."""
    where = f"{checkpoint.path}: tensor {name}"
    if tuple(tensor.shape) != slot.shape:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, config.json asks for {list(slot.shape)}"
        )
    if tensor.dtype not in (_FLOATS if scale is None else (torch.int8,)):
        raise CheckpointError(
            f"{where} has dtype {tensor.dtype} {'without' if scale is None else 'with'} a scale, "
            "which cannot be read; load the original model in fp32, fp16 or bf16"
        )
    rows = slot.shape[-1 if slot.kind is Kind.BY_INPUT else 0]
    if scale is not None and scale.numel() != rows:
        raise CheckpointError(f"{where}_scale holds {scale.numel()} numbers, {rows} are needed")


def with_scales(
    checkpoint: Checkpoint, held: dict[str, str], names: dict[str, str]
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Checkpoint tensors that fill a slot, int8 ones together with their scale."""
    waiting: dict[str, Tensor] = {}
    scaled = {name[: -len("_scale")] for name in held.values() if name.endswith("_scale")}
    for source_name, tensor in checkpoint.stream(_used(held, names)):
        name = held[source_name].removesuffix("_scale")
        if name not in scaled:
            yield name, tensor, None
        elif name in waiting:
            pair = (waiting.pop(name), tensor)
            data, scale = pair[::-1] if name == held[source_name] else pair
            yield name, data, scale
        else:
            waiting[name] = tensor


def _used(held: dict[str, str], names: dict[str, str]) -> Iterable[str]:
    return [source for source, name in held.items() if name.removesuffix("_scale") in names]


def stored_matrix(
    tensor: Tensor, scale: Tensor | None, slot: Slot, dtype: str, device: torch.device
) -> Matrix:
    """A checkpoint tensor `[out, in]` as a Matrix in the kernels' orientation."""
    by_input = slot.kind is Kind.BY_INPUT
    if device.type != "cpu":
        tensor, scale = tensor.to(device), None if scale is None else scale.to(device)
    elif not by_input:
        # A mapped file's pages are small and unaligned; memory of our own can be large pages, and a
        # file that is overwritten in place no longer changes a running model.
        tensor = tensor.clone()
    if slot.kind is Kind.TABLE and dtype == "int8":
        dtype = "auto"  # positions are small and added once: quantising them saves nothing
    if scale is not None:
        data = tensor.t().contiguous() if by_input else tensor.contiguous()
        stored = Matrix(data, scale.float().flatten().clone())
        return stored if dtype in ("auto", "int8") else Matrix.from_float(stored.float(), dtype)
    if dtype == "auto":
        dtype = kept_dtype(tensor.dtype, device)
    return Matrix.from_float(tensor.t() if by_input else tensor, dtype)


def kept_dtype(dtype: torch.dtype, device: torch.device) -> str:
    """What `auto` makes of a file's float dtype."""
    if dtype == torch.float32:
        return "fp32"
    return "fp16" if dtype == torch.float16 and device.type == "cuda" else "bf16"


def check_dtype(dtype: str, device: torch.device) -> None:
    """Raise InputError where weights of a dtype cannot run on a device."""
    if dtype == "fp16" and device.type == "cpu":
        raise InputError("fp16 weights need --device cuda; use --dtype bf16 on the CPU")
    if dtype == "int8" and device.type == "cuda":
        raise InputError(
            f"int8 weights do not run on {device}; --dtype fp16 (or bf16) dequantises them while "
            "they are loaded"
        )


def _check_fit(
    checkpoint: Checkpoint,
    held: dict[str, str],
    names: dict[str, str],
    wanted: dict[str, Slot],
    dtype: str,
    device: torch.device,
) -> None:
    """Whether the model, and one tensor while it is turned, fit into a GPU's free memory."""
    sizes = slot_sizes(checkpoint, held, names, wanted, dtype, device)
    total = sum(size for size, _ in sizes.values())
    largest = max(stored for _, stored in sizes.values())
    halves = " --dtype fp16 halves it," if dtype == "fp32" else ""
    check_fit(
        total + largest,
        device,
        f"{checkpoint.path} in {dtype}",
        f"free the GPU of other work,{halves} take a larger GPU, or run on --device cpu",
    )


def slot_sizes(
    checkpoint: Checkpoint,
    held: dict[str, str],
    names: dict[str, str],
    wanted: dict[str, Slot],
    dtype: str,
    device: torch.device,
) -> dict[str, tuple[int, int]]:
    """Bytes that each slot's tensor will take on a device, and takes in the checkpoint."""
    found = {}
    for name, info in checkpoint.tensor_infos().items():
        slot_name = names.get(held[name], "")
        slot = wanted.get(slot_name)
        if slot is None:
            continue
        count = torch.Size(info.shape).numel()
        kept = dtype
        if slot.kind is Kind.VECTOR:
            kept = "fp32"
        elif dtype == "auto":
            kept = "int8" if info.dtype == torch.int8 else kept_dtype(info.dtype, device)
        found[slot_name] = count * WEIGHT_DTYPES[kept].itemsize, count * info.dtype.itemsize
    return found


def random_model(
    config: ModelConfig, *, dtype: str, device: str | torch.device = "cpu", seed: int = 0
) -> DecoderLM:
    """A model of a given shape with random weights: for speed only, its text means nothing.

    Matrices are normal with spread 0.02 (int8: uniform bytes of that spread), norms 1, biases 0.
    They are made on the device itself. Raises InputError for one that does not fit there.
    """
    target = resolve_device(device)
    if dtype == "int8":
        check_dtype(dtype, target)
    shapes = slots(config)
    size = sum(torch.Size(slot.shape).numel() for slot in shapes.values())
    check_fit(
        size * WEIGHT_DTYPES[dtype].itemsize,
        target,
        f"a {config.model_type} model of {size / 1e9:.2f} billion weights in {dtype}",
        "free the GPU of other work or choose a smaller shape",
    )
    generator = torch.Generator(target).manual_seed(seed)
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Any] = {}
    for name, slot in shapes.items():
        if slot.kind is Kind.VECTOR:
            fill = 1.0 if name.endswith("norm.weight") else 0.0
            vectors[name] = torch.full(slot.shape, fill, device=target)
            continue
        shape = slot.shape[::-1] if slot.kind is Kind.BY_INPUT else slot.shape
        if dtype == "int8" and slot.kind is not Kind.TABLE:
            data = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
            matrices[name] = Matrix(data, torch.full(shape[:1], 0.02 / 73.3))
        else:
            kept = "bf16" if dtype == "int8" else dtype
            data = torch.empty(shape, dtype=WEIGHT_DTYPES[kept], device=target)
            matrices[name] = Matrix(data.normal_(0.0, 0.02, generator=generator))
    return DecoderLM(config, assemble(config, matrices, vectors))


class CheckpointNeurons:
    """`NeuronSource` of a checkpoint: reads one layer's MLP at a time, so a model larger than
    memory can be packed.

    source, dtype: as for `load_model`; int8 rounds by the same rule, so that the bits in the file
    are those in memory. Raises what `load_model` raises of a checkpoint that cannot be used.
    """

    def __init__(self, source: str | os.PathLike[str], *, dtype: str = "auto") -> None:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES, InputError)
        cpu = torch.device("cpu")
        self.checkpoint = checkpoint = open_checkpoint(source)
        module = architecture(checkpoint.config.get("model_type"))
        config: ModelConfig = module.config_from_hf(checkpoint.config)
        self._held = todays_names(checkpoint, module)
        self._slots = {name: s for name, s in slots(config).items() if ".mlp." in name}
        self._names = {checkpoint_name(name, module.CHECKPOINT_NAMES): name for name in self._slots}
        if missing := sorted(self._names.keys() - set(self._held.values())):
            raise CheckpointError(f"{checkpoint.path} lacks tensor {missing[0]}")
        if dtype == "auto":
            up = self._source_name("layers.0.mlp.up.weight")
            quantized = checkpoint.quantization == "int8"
            dtype = "int8" if quantized else kept_dtype(checkpoint.tensor_infos()[up].dtype, cpu)
        check_dtype(dtype, cpu)
        self.name = os.fspath(source)
        self.dtype = dtype
        self.hidden_size = config.hidden_size
        self.gated = config.gated_mlp
        self.neurons = (config.intermediate_size,) * config.num_hidden_layers
        parts = ("up", "gate", "down") if config.gated_mlp else ("up", "down")
        self.biases: Sequence[str] = parts if config.mlp_bias else ()

    def identity(self) -> str:
        return self.checkpoint.identity()

    def layer(self, index: int) -> LayerNeurons:
        prefix = f"layers.{index}.mlp."
        names = {name: slot for name, slot in self._names.items() if slot.startswith(prefix)}
        parts: dict[str, Matrix] = {}
        biases: dict[str, Tensor] = {}
        for name, tensor, scale in with_scales(self.checkpoint, self._held, names):
            slot = self._slots[names[name]]
            check_tensor(self.checkpoint, name, tensor, scale, slot)
            part, leaf = names[name].removeprefix(prefix).split(".")
            if leaf == "bias":
                biases[part] = tensor.float().clone()
            else:
                parts[part] = stored_matrix(tensor, scale, slot, self.dtype, torch.device("cpu"))
        return LayerNeurons(parts, biases)

    def _source_name(self, slot: str) -> str:
        wanted = next(name for name, found in self._names.items() if found == slot)
        return next(source for source, name in self._held.items() if name == wanted)
