"""Tiny models of transformers, written as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .folders import Tensors, byte_level_tokenizer

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 16, 64, 2
STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_model(arch: str, **options: Any) -> torch.nn.Module:
    import transformers

    kinds = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = getattr(transformers, f"{kinds[arch]}Config")(
        **{
            "vocab_size": 300,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "tie_word_embeddings": False,
            **options,
        }
    )
    model = getattr(transformers, f"{kinds[arch]}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def gguf_name(name: str) -> str:
    module, suffix = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{suffix}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{STEMS[rest]}.{suffix}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of llama.cpp: of each head, row i and row i + D/2 stand side by side."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            for half in (0, 1):
                out[head * size + 2 * i + half] = rows[head * size + half * (size // 2) + i]
    return out


def write_gguf(
    path: Path,
    arch: str,
    state: Tensors,
    types: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    vocabulary: str | None = "default",
) -> Path:
    """Write a model as llama.cpp's converter does; ``types`` by a part of the GGUF name."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        **(metadata or {}),
    }.items():
        key = key if key.startswith(("split.", "general.", "tokenizer.")) else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    if vocabulary is not None:
        add_vocabulary(writer, vocabulary)
    for name, tensor in state.items():
        stored = gguf_name(name) if "." in name and not name.startswith("rope") else name
        rows = tensor.float().numpy()
        if arch == "llama" and "attn_q." in stored:
            rows = interleave(rows, HEADS)
        if arch == "llama" and "attn_k." in stored:
            rows = interleave(rows, KV_HEADS)
        kind = next((t for part, t in (types or {}).items() if part in stored), Type.F32)
        if kind == Type.F32:
            writer.add_tensor(stored, rows)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: Any, pre_tokenizer: str) -> None:
    tokenizer = byte_level_tokenizer()
    backend = tokenizer.backend_tokenizer
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
