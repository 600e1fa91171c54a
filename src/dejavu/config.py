"""What a decoder looks like, parsed once from a Hugging Face config; no torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear, dynamic, llama3 or yarn.

    parameters: the remaining keys of Hugging Face's `rope_parameters` / `rope_scaling`, checked and
        with `original_max_position_embeddings` filled in where the kind needs it.
    """

    theta: float
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)

    def reach(self, max_position_embeddings: int) -> int:
        """Positions that the scaling is meant for.

        By Hugging Face's convention `max_position_embeddings` is the length before scaling for
        linear and dynamic, and after it for llama3; both are met for yarn, whose parameters name
        the original length (the larger one holds).
        """
        factor = self.parameters.get("factor") or 1.0
        if self.kind in ("linear", "dynamic"):
            return max(max_position_embeddings, int(factor * max_position_embeddings))
        if self.kind == "yarn":
            original = self.parameters["original_max_position_embeddings"]
            return max(max_position_embeddings, int(factor * original))
        return max_position_embeddings


@dataclass(frozen=True)
class ModelConfig:
    """Shape and variants of one decoder; an architecture's file makes it from `config.json`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    activation: str
    activation_threshold: float = 0.0
    gated_mlp: bool = False
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: float = 1e-5
    norm_affine: bool = True
    pre_norm: bool = True
    final_norm: bool = True
    rope: RopeConfig | None = None  # None: learned positions
    position_offset: int = 0
    attention_bias: bool = False  # of q, k, v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: bool = False
    embed_dim: int | None = None  # token embeddings narrower than hidden_size (project_in/out)
    windows: tuple[int | None, ...] | None = None  # sliding window of each layer; None: full
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def context_length(self) -> int:
        """Tokens a sequence may hold, and rows of its position table."""
        if self.rope is None:
            return self.max_position_embeddings
        return self.rope.reach(self.max_position_embeddings)

    @property
    def group_size(self) -> int:
        """Query heads of one key/value head; a group is the unit of head selection."""
        return self.num_attention_heads // self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None for full attention."""
        return None if self.windows is None else self.windows[layer]
