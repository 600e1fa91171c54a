"""Tiny random checkpoints made to show faults, and the reference that reads the same files.

Library initialisation hides most mistakes (biases 0, norm weights 1, nearly flat scores), so every
parameter is random here: matrices with spread 0.3, biases with 0.5, norm weights around 1.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 101
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 3,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROTARY = SHARED | {"num_key_value_heads": 2, "intermediate_size": 53}
DEFAULTS: dict[str, dict[str, Any]] = {
    "opt": SHARED | {"ffn_dim": 53},
    "llama": ROTARY,
    "mistral": ROTARY | {"sliding_window": None},
    "qwen2": ROTARY,
    "qwen3": ROTARY | {"head_dim": 16},
}


class FATReLU(nn.Module):
    """ReLU with a threshold (ProSparse), which transformers do not have."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return x * (x > self.threshold)


@dataclass(frozen=True)
class Case:
    """One configuration of an architecture and how to tell that its feature matters.

    fields: of the reference's config. edits: changes to the saved `config.json` alone (None
    removes), for what the reference spells or validates differently. off: fields that switch the
    feature off. neutral: substrings of parameter names whose switching off is the proof (biases
    to 0, weights to 1).
    """

    name: str
    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    edits: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] | None = None
    neutral: tuple[str, ...] = ()
    fatrelu: float | None = None
    prompt: int = 30


@dataclass(frozen=True)
class Tiny:
    case: Case
    path: Path
    reference: transformers.PreTrainedModel

    def without_feature(self) -> transformers.PreTrainedModel:
        """The reference with the same weights and the case's feature switched off."""
        case = self.case
        model = _reference(case.model_type, case.fields | (case.off or {}))
        own = {name: value.clone() for name, value in self.reference.state_dict().items()}
        model.load_state_dict(own, strict=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in case.neutral):
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return model


def build(case: Case, folder: Path, seed: int = 0) -> Tiny:
    """Save a random checkpoint of the case and keep the model it came from as the reference."""
    reference = _reference(case.model_type, case.fields)
    randomise(reference, seed)
    if case.fatrelu is not None:
        for layer in reference.model.layers:
            layer.mlp.act_fn = FATReLU(case.fatrelu)
    reference.save_pretrained(folder)
    edit_config(folder, case.edits)
    return Tiny(case, folder, reference)


def edit_config(folder: Path, edits: dict[str, Any]) -> None:
    """Change fields of a saved `config.json`; None removes one, ... sets it to null."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | edits
    kept = {
        k: None if v is ... else v for k, v in config.items() if k not in edits or v is not None
    }
    file.write_text(json.dumps(kept))


def _reference(model_type: str, fields: dict[str, Any]) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(
        model_type, **copy.deepcopy(DEFAULTS[model_type] | fields)
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.4 * noise)
            else:
                parameter.copy_(0.3 * noise)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def reference_logits(model: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    """fp32 `[len(ids), V]`, no cache."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].clone()


def reference_greedy(model: transformers.PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The reference's own greedy continuation with its KV cache."""
    row = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            do_sample=False,
            max_new_tokens=count,
            use_cache=True,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Greatest difference of logits relative to their spread."""
    return float((ours - theirs).abs().max() / theirs.std())
