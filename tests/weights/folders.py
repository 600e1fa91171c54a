"""Small checkpoint folders in every layout, made without the code under test."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Tensors = dict[str, torch.Tensor]
PREFIX = "model.decoder"
CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 12,
    "ffn_dim": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 37,
}


def opt_tensors(seed: int = 0) -> Tensors:
    """One OPT layer and its surroundings in several dtypes, with an empty and a scalar tensor."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layer = f"{PREFIX}.layers.0"
    return {
        f"{PREFIX}.embed_tokens.weight": rand(37, 12, dtype=torch.bfloat16),
        f"{PREFIX}.embed_positions.weight": rand(18, 12, dtype=torch.float16),
        f"{layer}.self_attn.q_proj.weight": rand(12, 12),
        f"{layer}.self_attn.q_proj.bias": rand(12),
        f"{layer}.self_attn.out_proj.weight": rand(12, 12, dtype=torch.bfloat16),
        f"{layer}.fc1.weight": rand(20, 12),
        f"{layer}.fc2.weight": rand(12, 20, dtype=torch.float16),
        f"{layer}.final_layer_norm.weight": rand(12),
        "scalar": rand().double(),
        "empty": rand(0, 3),
        "integers": torch.arange(5),
    }


def write_config(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def split(tensors: Tensors, *names: str) -> dict[str, Tensors]:
    """Deal tensors out to the files ``names`` like cards."""
    items = list(tensors.items())
    return {name: dict(items[i :: len(names)]) for i, name in enumerate(names)}


def write_index(folder: Path, shards: Mapping[str, Mapping[str, object]], stem: str) -> Path:
    """Write ``<stem>.index.json`` for shards {file name: {tensor name: ...}}."""
    weight_map = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    index = folder / f"{stem}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def safetensors_folder(folder: Path, shards: dict[str, Tensors], index: bool = True) -> Path:
    write_config(folder)
    for name, tensors in shards.items():
        save_file(tensors, folder / name, {"format": "pt"})
    if index:
        write_index(folder, shards, "model.safetensors")
    return folder


def pickle_folder(folder: Path, shards: dict[str, Tensors], index: bool = True) -> Path:
    write_config(folder)
    for name, tensors in shards.items():
        torch.save(tensors, folder / name)
    if index:
        write_index(folder, shards, "pytorch_model.bin")
    return folder


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges, special tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the cat sat on the mat and the hat, then that rat ran at the other cat  again\n"
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names(folder: Path) -> list[str]:
    """What a folder holds, hidden entries too."""
    return sorted(path.name for path in folder.iterdir())
