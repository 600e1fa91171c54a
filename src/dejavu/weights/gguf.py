"""GGUF files of the llama family, offered under Hugging Face's names and conventions.

Reading, dequantising and the names of tensors are the ``gguf`` package's; here they are put
together. The package is an extra: import this module only to open such a file.
"""

import struct
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    get_tensor_name_map,
)
from gguf.quants import dequantize

from dejavu.errors import CheckpointError
from dejavu.weights.gguf_config import Metadata, hf_config
from dejavu.weights.identity import Fingerprint, fingerprint
from dejavu.weights.shards import TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["GgufFile", "gguf_tokenizer"]

_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Divisors of the rotary frequencies, which a Hugging Face model computes from its config.
_ROPE_FACTORS = "rope_freqs.weight"
_NATIVE_DTYPES = {
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Vocabularies whose merges were learned with every digit on its own (as in llama.cpp's table of
# pre-tokenizers); transformers does not know these names and splits as for GPT-2 alone.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}


class GgufFile:
    """A ``.gguf`` file as a shard: float tensors in their dtype, quantised ones as float32.

    Tensors with no counterpart in the Hugging Face model keep their GGUF name.

    Attributes:
        config: a Hugging Face ``config.json`` made from the metadata.

    Raises:
        CheckpointError: damaged, truncated, split over several files, or without an embedding.
        ConfigError: an architecture or a feature that is not supported, or metadata that lacks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        metadata = Metadata(path, lambda key: _contents(reader, key))
        self._architecture = metadata.architecture
        if (parts := _contents(reader, "split.count") or 1) > 1:
            raise CheckpointError(
                f"{path} is one of {parts} parts; join them with llama-gguf-split --merge first"
            )
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {
            name: tuple(reversed(tensor.shape.tolist())) for name, tensor in self._stored.items()
        }
        if "token_embd.weight" not in shapes:
            raise CheckpointError(f"{path} has no tensor 'token_embd.weight'; is it a whole model?")
        factors = self._stored.get(_ROPE_FACTORS)
        self.config = hf_config(metadata, shapes, None if factors is None else factors.data)
        hf_names = _hf_names(self._architecture, self.config["num_hidden_layers"])
        self._gguf_names = {
            hf_names.get(name, name): name for name in self._stored if name != _ROPE_FACTORS
        }
        self.tensors = {
            name: TensorInfo(
                shapes[gguf], _NATIVE_DTYPES.get(self._stored[gguf].tensor_type, torch.float32)
            )
            for name, gguf in self._gguf_names.items()
        }

    def stream(self, names: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors dequantised one at a time, rows in Hugging Face's order."""
        for name, gguf in self._gguf_names.items():
            if name in names:
                yield name, self._unpermute(gguf, self._read(gguf))

    def fingerprints(self) -> Iterator[Fingerprint]:
        """Hash every tensor as stored: its GGUF name and type, and its quantised blocks."""
        for name, stored in self._stored.items():
            data = np.ascontiguousarray(stored.data).reshape(-1).view(np.uint8).data
            yield fingerprint(name, stored.tensor_type.name, stored.shape.tolist(), data)

    def _read(self, gguf: str) -> torch.Tensor:
        stored = self._stored[gguf]
        if stored.tensor_type == GGMLQuantizationType.BF16:  # which numpy lacks
            return torch.from_numpy(stored.data.copy()).view(torch.bfloat16)
        if stored.tensor_type == GGMLQuantizationType.F16:
            return torch.from_numpy(stored.data.copy())
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {gguf!r} is stored as {stored.tensor_type.name}, which the "
                "gguf package cannot dequantise; use another quantisation of this model"
            ) from error
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _unpermute(self, gguf: str, values: torch.Tensor) -> torch.Tensor:
        """Undo llama.cpp's reordering of q and k rows, weights [H*D, hidden] or biases [H*D].

        For llama (not qwen) its converter interleaves the two halves of each head, because its
        rotary embedding turns neighbouring channels while Hugging Face's turns channels i and
        i + D/2.
        """
        if self._architecture != "llama" or not (".attn_q." in gguf or ".attn_k." in gguf):
            return values
        is_query = ".attn_q." in gguf
        heads = self.config["num_attention_heads" if is_query else "num_key_value_heads"]
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])  # [H, D/2, 2, ...]
        return pairs.transpose(1, 2).reshape(values.shape)


def gguf_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """Build the tokenizer a ``.gguf`` file describes: vocabulary, special tokens, chat template.

    Raises:
        CheckpointError: the file has no vocabulary or one of an unsupported kind.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"{path}: no tokenizer can be made from this file ({error}); put the model's "
            "tokenizer.json beside it"
        ) from error
    if _contents(_open(path), "tokenizer.ggml.pre") in _SINGLE_DIGITS:
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


class _Reader(GGUFReader):
    """The package's reader, without long arrays: nothing here needs the vocabulary.

    It turns every element of an array into a numpy view, 3 s for a vocabulary of 49152 where a
    walk over it takes 0.1 s. Should the method overridden here go away, opening is slow again and
    nothing else changes.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type == GGUFValueType.ARRAY and self.byte_order == "I":
            kind, count = struct.unpack_from("=IQ", self.data.data, orig_offs)
            if count > 1024:
                return self._array_size(orig_offs + 12, GGUFValueType(kind), count), [], [], []
        return super()._get_field_parts(orig_offs, raw_type)

    def _array_size(self, start: int, kind: GGUFValueType, count: int) -> int:
        """Bytes of an array's head (12) and its elements, which begin at ``start``."""
        if kind != GGUFValueType.STRING:
            return 12 + count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        data, end = self.data.data, start
        for _ in range(count):
            end += 8 + struct.unpack_from("=Q", data, end)[0]
        return 12 + end - start


def _open(path: Path) -> _Reader:
    try:
        return _Reader(path)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{path} is truncated or not a GGUF file ({error}); download it again"
        ) from error


def _contents(reader: _Reader, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _hf_names(architecture: str, num_layers: int) -> dict[str, str]:
    """GGUF tensor name -> Hugging Face name, from the table of the gguf package."""
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, num_layers)
    modules = [
        *_MODULES,
        *(f"model.layers.{i}.{module}" for i in range(num_layers) for module in _LAYER_MODULES),
    ]
    return {
        f"{gguf}.{suffix}": f"{module}.{suffix}"
        for module in modules
        if (gguf := table.get_name(module)) is not None
        for suffix in ("weight", "bias")
    }
