"""Tiny models with their transformers twins, a small tokenizer, and texts of given ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from dejavu.eval.text import EvalText, Setting
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Ops, Projection
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.models.base import DecoderLM
from dejavu.sparsity.policy import Points, Selector, Site

VOCAB, NEURONS, CONTEXT = 83, 70, 160
Reference = transformers.PreTrainedModel
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}


def config(model_type: str, **fields: Any) -> transformers.PretrainedConfig:
    shape = SHAPE | fields
    if model_type == "opt":
        return transformers.OPTConfig(**shape, ffn_dim=NEURONS, word_embed_proj_dim=24, dropout=0.0)
    return transformers.LlamaConfig(
        **shape, intermediate_size=NEURONS, num_key_value_heads=2, hidden_act="relu"
    )


def build(
    model_type: str, folder: Path, dtype: str = "fp32", **fields: Any
) -> tuple[DecoderLM, Reference]:
    """A random model with biases and spread in everything, ours and the reference's."""
    torch.manual_seed(11)
    reference = transformers.AutoModelForCausalLM.from_config(config(model_type, **fields)).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            spread = 0.1 if "norm" in name else 0.25
            parameter.add_(torch.randn_like(parameter) * spread)
    reference.save_pretrained(folder)
    return load_model(folder, dtype=dtype).model, reference


def text_of(ids: Tensor, window: int, stride: int, scored: str = "all") -> EvalText:
    """A text whose tokens are given; every token stands for one character."""
    setting = Setting(
        "random", None, "", "whole", "", window, stride, (), scored, None, "none", VOCAB
    )
    return EvalText(setting, "x" * len(ids), ids, np.arange(1, len(ids) + 1))


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def small_tokenizer(text: str) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE that puts <s> before a text, as OPT's and Llama's do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )


class Guess(Selector):
    """Random predictors of heads and neurons: works through ops alone, so it can be recorded."""

    predictor_bytes = 1000

    def __init__(self, model: DecoderLM, *, capturable: bool = True) -> None:
        self.capturable = capturable
        generator = torch.Generator().manual_seed(3)
        c = model.config
        entries = {Site.NEURONS: c.intermediate_size, Site.HEADS: c.num_key_value_heads}
        self.parts = {
            (site, layer): (
                Matrix(torch.randn(6, c.hidden_size, generator=generator)),
                Matrix(torch.randn(n, 6, generator=generator)),
                torch.full((n,), -0.2 if site == Site.NEURONS else 1.5),
            )
            for site, n in entries.items()
            for layer in range(c.num_hidden_layers)
        }

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        first, second, bias = self.parts[site, layer]
        (hidden,) = ops.linear(points.source(site, layer), [Projection(first)])
        return ops.select(hidden, second, bias)
