"""A model that says what it is told to: enough to test everything around a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.engine.engine import Engine
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.base import Batch
from dejavu.models.kv_cache import KVCache
from dejavu.sparsity.policy import Selector

Script = Callable[[tuple[int, ...]], Sequence[int | None]]  # prompt -> answer; None: NaN logits


def config(vocab_size: int = 50, context: int = 64, **fields: Any) -> ModelConfig:
    return ModelConfig(
        model_type="stub",
        vocab_size=vocab_size,
        hidden_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        intermediate_size=1,
        max_position_embeddings=context,
        activation="relu",
        **fields,
    )


class ScriptedLM:
    """Has a `DecoderLM`'s interface; a sequence is known by its first cache block.

    script: the answer to each prompt; after its end 0 is said for ever.
    before: called at the start of every forward, to interfere. rows: of the decode steps so far.
    """

    def __init__(self, config: ModelConfig, script: Script) -> None:
        self.config = config
        self.device, self.cache_dtype = torch.device("cpu"), torch.float32
        self.streamed = False
        self.before: Callable[[], None] = lambda: None
        self.rows: list[int] = []
        self.prefills: list[int] = []
        self._script = script
        self._answers: dict[int, tuple[int, Sequence[int | None]]] = {}

    def prepare(self, length: int) -> None:
        assert length <= self.config.context_length

    def forward(self, batch: Batch, cache: KVCache, selector: Selector, ops: Ops) -> Tensor:
        self.before()
        assert cache.num_blocks > int(batch.block_table.max())
        firsts = batch.block_table[:, 0].tolist()
        if batch.scored == 1:
            prompt = tuple(batch.ids.tolist())
            assert batch.positions.tolist() == list(range(len(prompt)))
            self._answers[firsts[0]] = len(prompt), self._script(prompt)
            self.prefills.append(len(prompt))
        else:
            self.rows.append(len(firsts))
        logits = torch.zeros(len(firsts), self.config.vocab_size)
        for row, first in enumerate(firsts):
            prompt_length, answer = self._answers[first]
            assert int(batch.positions[row if batch.scored is None else -1]) + 1 == int(
                batch.lengths[row]
            )
            step = int(batch.lengths[row]) - prompt_length
            said = answer[step] if step < len(answer) else 0
            if step and (before := answer[step - 1]) is not None and step <= len(answer):
                assert int(batch.ids[row]) == before, "the engine fed back what it was given"
            if said is None:
                logits[row] = torch.nan
            else:
                logits[row, said] = 10.0
        return logits


def loaded(model: object) -> LoadedModel:
    checkpoint = SimpleNamespace(generation_config={})
    return LoadedModel(cast(Any, model), cast(Any, checkpoint), "fp32")


def scripted(
    script: Script, *, vocab_size: int = 50, context: int = 64, **options: Any
) -> tuple[Engine, ScriptedLM]:
    """An engine over a scripted model with no end tokens."""
    model = ScriptedLM(config(vocab_size, context), script)
    return Engine(loaded(model), ops=TorchOps(), **options), model


def word_tokenizer(size: int, **special: str) -> transformers.PreTrainedTokenizerFast:
    """Words t000, t001, ...; a `bos_token` goes first by the post-processor."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({f"t{i:03}": i for i in range(size)}, "t000"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, int(bos[1:]))]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
