"""A Hugging Face ``config.json`` made from the metadata of a GGUF file of the llama family.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dejavu.errors import ConfigError

__all__ = ["ARCHITECTURES", "Metadata", "hf_config", "llama3_scaling"]

# general.architecture, which is also the model_type, -> class in transformers
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class Metadata(NamedTuple):
    """Typed access to the metadata; complaints name the file and the key.

    lookup: gives the value of a key, or None where it is absent.
    """

    path: Path
    lookup: Callable[[str], Any]

    @property
    def architecture(self) -> str:
        """The prefix of all keys about the model's shape."""
        value = self.lookup("general.architecture")
        if value not in ARCHITECTURES:
            raise ConfigError(
                f"{self.path}: general.architecture is {value!r}; supported are "
                f"{', '.join(ARCHITECTURES)}"
            )
        return str(value)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer below the architecture's prefix."""
        value = self._value(key, default)
        if not isinstance(value, int):
            raise ConfigError(
                f"{self.path}: {self.architecture}.{key} must be one integer, not {value!r:.60}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number below the architecture's prefix."""
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise ConfigError(
                f"{self.path}: {self.architecture}.{key} must be a number, not {value!r:.60}"
            )
        return float(value)

    def _value(self, key: str, default: float | None) -> Any:
        value = self.lookup(f"{self.architecture}.{key}")
        if value is None and default is None:
            raise ConfigError(f"{self.path}: the metadata lack {self.architecture}.{key}")
        return default if value is None else value


def hf_config(
    metadata: Metadata, tensors: dict[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """Describe the model as Hugging Face does.

    Args:
        metadata: of the file.
        tensors: GGUF name -> shape, of all tensors in the file.
        rope_factors: content of ``rope_freqs.weight`` [head_dim / 2], where the file has it.

    Raises:
        ConfigError: an unsupported architecture or feature, or a key that is missing.
    """
    arch, path = metadata.architecture, metadata.path
    heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden_size // heads)
    theta = metadata.number("rope.freq_base", 10000.0)
    if metadata.integer("expert_count", 0):
        raise ConfigError(f"{path}: {arch}.expert_count: experts are not supported")
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"{path}: {arch}.rope.dimension_count differs from the head size {head_dim}; rotating "
            "a part of each head is not supported"
        )
    if rope_factors is None:
        rope_scaling = _rope_scaling(metadata)
    elif (rope_scaling := llama3_scaling(rope_factors, theta, head_dim)) is None:
        raise ConfigError(f"{path}: rope_freqs.weight does not follow the rule of Llama 3")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": tensors["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.lookup("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.lookup("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.lookup("tokenizer.ggml.padding_token_id"),
    }
    return config | _window(metadata)


def llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Find the Llama 3 ``rope_scaling`` that gives these frequency divisors, None if none does.

    GGUF stores the divisors [head_dim / 2] that Llama 3.1 and later apply to the rotary
    frequencies; Hugging Face wants the rule behind them: unchanged for wavelengths below 8192 / 4,
    the full factor above 8192, and in between linear in 8192 / wavelength.
    """
    original, low, high = 8192, 1.0, 4.0
    factor = float(factors.max())
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    position = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    expected = 1 / ((1 - position) / factor + position)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    key = f"{metadata.architecture}.rope.scaling.type"
    kind = metadata.lookup(key) or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{metadata.path}: {key} {kind!r} is not supported")
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if original := metadata.integer("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _window(metadata: Metadata) -> dict[str, Any]:
    """A sliding window means Mistral, which GGUF stores as the llama architecture."""
    window = metadata.integer("attention.sliding_window", 0)
    if not window:
        return {}
    if metadata.architecture != "llama":
        raise ConfigError(
            f"{metadata.path}: {metadata.architecture}.attention.sliding_window is not supported"
        )
    return {
        "sliding_window": window,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    }
