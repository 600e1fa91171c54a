"""Int8 checkpoints: every weight matrix as integers with one scale for each row the engine stores.

A folder in Hugging Face's format and names, in which ``X`` (int8) is accompanied by ``X_scale``
(float32) and stands for ``X * X_scale``. The engine keeps the matrices whose *inputs* are selected
transposed, so for those a stored row is a column of Hugging Face's matrix.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dejavu.errors import CheckpointError, InputError
from dejavu.kernels.matrix import Matrix
from dejavu.weights.checkpoint import (
    QUANTIZATION_KEY,
    QUANTIZATION_VERSION,
    Checkpoint,
    open_checkpoint,
)
from dejavu.weights.files import atomic_folder, sha256_file, write_safetensors
from dejavu.weights.hub import SIDE_FILES
from dejavu.weights.layout import read_json
from dejavu.weights.shards import TensorInfo
from dejavu.weights.tokenizer import load_tokenizer

__all__ = ["dequantize", "quantize_checkpoint", "quantize_rows", "row_dimension"]

# A stored row is an output (dimension 0 of the matrix) or an input channel (dimension 1).
_ROW_DIMENSIONS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "fc1"), 0),
    **dict.fromkeys(("lm_head", "embed_tokens", "project_in", "project_out"), 0),
    **dict.fromkeys(("o_proj", "out_proj", "down_proj", "fc2"), 1),
}
_MAX_SHARD_BYTES = 2_000_000_000


def row_dimension(name: str, shape: tuple[int, ...]) -> int | None:
    """Dimension that counts the stored rows of a tensor, None where it is kept unquantised.

    Kept are vectors (norms, biases), tables of positions and matrices of unknown meaning.
    """
    module, _, leaf = name.rpartition(".")
    if len(shape) != 2 or leaf != "weight":
        return None
    return _ROW_DIMENSIONS.get(module.rpartition(".")[2])


def quantize_rows(weight: torch.Tensor, dimension: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [out, in] to int8 rows, by the rule of `Matrix.from_float`.

    Args:
        weight: any float dtype.
        dimension: the dimension that counts rows, 0 or 1.

    Returns:
        int8 [out, in] and float32 scales [out, 1] or [1, in].
    """
    stored = Matrix.from_float(weight if dimension == 0 else weight.t(), "int8")
    assert stored.scale is not None
    if dimension == 0:
        return stored.data, stored.scale[:, None]
    return stored.data.t().contiguous(), stored.scale[None]


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Restore a float32 matrix [out, in] from int8 and its scales [out, 1] or [1, in]."""
    return q.float() * scale


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write an int8 copy of a model into the folder ``out``, with its tokenizer and configs.

    Reads the source twice, first for its identity, which the copy carries so that plans made for
    the original fit it. Holds one output shard (at most 2 GB) in memory. The folder appears when
    it is complete; an earlier int8 model at ``out`` stays until then.

    Args:
        source: anything :func:`open_checkpoint` takes.
        out: a new or empty folder, or an int8 checkpoint to replace.
        progress: called with (tensors done, tensors in all) after each tensor.

    Raises:
        InputError: the source is quantised already, or ``out`` holds something else.
        CheckpointError: the source is damaged or has weights that are not finite.
        DejavuError: ``out`` cannot be written.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.quantization is not None:
        raise InputError(
            f"{os.fspath(source)} is quantised already, to int8: use it as it is, or give the "
            "original model"
        )
    _check_destination(out)
    entry = {
        "format": "int8-row",
        "version": QUANTIZATION_VERSION,
        "source_identity": checkpoint.identity(),
    }
    with atomic_folder(out) as partial:
        _write_weights(checkpoint, partial, {QUANTIZATION_KEY: json.dumps(entry)}, progress)
        _write_side_files(checkpoint, partial)
        hashes = {file.name: sha256_file(file) for file in sorted(partial.glob("*.safetensors"))}
        config = {**checkpoint.config, QUANTIZATION_KEY: {**entry, "sha256": hashes}}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_destination(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    config = out / "config.json"
    if not config.is_file() or QUANTIZATION_KEY not in read_json(config):
        raise InputError(f"--out {out} exists and is not an int8 model; choose a new folder")


def _write_weights(
    checkpoint: Checkpoint,
    folder: Path,
    metadata: dict[str, str],
    progress: Callable[[int, int], None] | None,
) -> None:
    groups = _shard_plan(checkpoint.tensor_infos())
    weight_map: dict[str, str] = {}
    done, total = 0, sum(len(group) for group in groups)
    for number, group in enumerate(groups, start=1):
        name = "model.safetensors"
        if len(groups) > 1:
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for source_name, tensor in checkpoint.stream(group):
            tensors.update(_quantized(checkpoint.path, source_name, tensor))
            done += 1
            if progress is not None:
                progress(done, total)
        write_safetensors(folder / name, tensors, metadata)
        weight_map |= dict.fromkeys(tensors, name)
    if len(groups) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _quantized(path: Path, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    dimension = row_dimension(name, tuple(tensor.shape))
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise CheckpointError(
            f"{path}: tensor {name!r} holds NaN or infinity; the file is damaged, download it again"
        )
    if dimension is None:
        # A copy, because the source may be a view of a file that is about to be closed, or share
        # storage with another tensor, which safetensors refuses.
        yield name, tensor.clone(memory_format=torch.contiguous_format)
        return
    q, scale = quantize_rows(tensor, dimension)
    yield name, q
    yield f"{name}_scale", scale


def _shard_plan(tensors: dict[str, TensorInfo]) -> list[list[str]]:
    """Split source tensors, in file order, into groups that are at most 2 GB as int8."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in tensors.items():
        row = row_dimension(name, shape)
        count = torch.Size(shape).numel()
        size_here = count * dtype.itemsize if row is None else count + 4 * shape[row]
        if groups[-1] and size + size_here > _MAX_SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += size_here
    return groups


def _write_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy tokenizer, generation config, chat template and licence; unpack a GGUF's tokenizer."""
    if not checkpoint.tokenizer_path.is_dir():
        load_tokenizer(checkpoint).save_pretrained(folder)
        return
    for pattern in SIDE_FILES:
        for file in checkpoint.tokenizer_path.glob(pattern):
            if file.is_file() and file.name != "config.json" and ".index." not in file.name:
                shutil.copyfile(file, folder / file.name)
