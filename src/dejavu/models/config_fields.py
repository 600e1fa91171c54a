"""Typed reading of a Hugging Face config: every complaint names the field and what it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dejavu.config import RopeConfig
from dejavu.errors import ConfigError
from dejavu.registry import unknown

# Hugging Face's activation names -> ours
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "fatrelu": "fatrelu",
}
# Keys of each kind of rotary scaling, those it cannot do without first
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings",),
    ),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
# Of those, where 0 stands for "not given", and attention_factor
_MAY_BE_ZERO = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"}
# Fields of neighbouring architectures and tools that would change what is computed. A config that
# sets one to anything but null (or the value here) is refused, never half understood.
_NEUTRAL = {
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "is_causal": True,
    "logits_scaling": 1,
    "num_local_experts": None,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1,
    "use_bidirectional_attention": False,
}
_REQUIRED = object()


class Fields:
    """A config dict whose accessors check type and presence; null counts as absent.

    Raises ConfigError for a config that asks for something no architecture here computes.
    """

    def __init__(self, hf: dict[str, Any]) -> None:
        self.hf = hf
        for name, neutral in _NEUTRAL.items():
            self.only(name, neutral)
        if (quantization := hf.get("quantization_config")) is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise ConfigError(
                f"config.json: quantization_config: weights quantised by {method or 'another tool'}"
                " cannot be read; load the original model (its int8 form is one `dejavu quantize`)"
            )

    def only(self, name: str, value: object, why: str = "") -> None:
        """Refuse a field that is set to anything but null or `value`."""
        if self.hf.get(name) not in (None, value):
            raise ConfigError(
                f"config.json: {name} {self.hf[name]!r} is not supported{why and f' {why}'}"
            )

    def _get(self, name: str, default: Any) -> Any:
        value = self.hf.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"config.json: field {name!r} is missing")
        return default

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        """A positive integer."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def optional_integer(self, name: str, absent: int | None) -> int | None:
        """A positive integer, None for null, `absent` where the file does not mention it."""
        return None if self.hf.get(name, absent) is None else self.integer(name, absent)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """An int or float."""
        value = self._get(name, default)
        return _number(name, value)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def exact_division(self, dividend: str, divisor: str) -> int:
        """dividend / divisor where it must leave no remainder."""
        a, b = self.integer(dividend), self.integer(divisor)
        if a % b:
            raise ConfigError(f"config.json: {dividend} {a} is not a multiple of {divisor} {b}")
        return a // b

    def activation(self, name: str, default: Any = _REQUIRED) -> dict[str, Any]:
        """`activation` and `activation_threshold` (of fatrelu: `hidden_act_param`)."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise unknown(f"{name} in config.json", value, ACTIVATIONS)
        threshold = self.number("hidden_act_param", 0.0) if value == "fatrelu" else 0.0
        return {"activation": ACTIVATIONS[value], "activation_threshold": threshold}

    def special_tokens(
        self, bos: int | None = None, eos: int | None = None, pad: int | None = None
    ) -> dict[str, Any]:
        """`bos_token_id`, `eos_token_ids` (an id or a list in the file) and `pad_token_id`.

        bos, eos, pad: what holds where the file does not mention them (null there means none).
        """
        found = self.hf.get("eos_token_id", eos)
        ids = [] if found is None else found if isinstance(found, list) else [found]
        if not all(_is_id(i) for i in ids):
            raise ConfigError(f"config.json: eos_token_id must be an id or ids, not {found!r}")
        single = {"bos_token_id": bos, "pad_token_id": pad}
        for name, default in single.items():
            single[name] = self.hf.get(name, default)
            if single[name] is not None and not _is_id(single[name]):
                raise ConfigError(f"config.json: {name} must be one id, not {single[name]!r}")
        return {**single, "eos_token_ids": tuple(ids)}


def rope_from_hf(f: Fields) -> RopeConfig:
    """Rotary settings of a config in either spelling.

    Transformers 5 writes one dict `rope_parameters`; before, it was `rope_scaling` beside a
    top-level `rope_theta` and `partial_rotary_factor`. The kind is spelt `rope_type` or `type`.
    What is in the dict goes before what is beside it; `rope_scaling` before `rope_parameters`.

    Raises ConfigError for an unknown kind (naming the known ones), and for a key that is missing,
    of a wrong type or not used by the kind.
    """
    name = "rope_scaling" if f.hf.get("rope_scaling") else "rope_parameters"
    given = f.hf.get(name) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: {name} must be an object or null, not {given!r}")
    # null counts as absent, but for truncate the reference reads it as false: refused below
    parameters = {k: v for k, v in given.items() if v is not None or k == "truncate"}
    spelt = [parameters.pop(key, None) for key in ("rope_type", "type")]
    kind = spelt[0] or spelt[1] or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise unknown(f"rope_type in config.json ({name})", kind, ROPE_KEYS)
    theta = _number("rope_theta", parameters.pop("rope_theta", f.number("rope_theta", 10_000.0)))
    if theta <= 1:
        raise ConfigError(f"config.json: rope_theta must be above 1, not {theta!r}")
    if "partial_rotary_factor" in f.hf:
        parameters.setdefault("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if kind in ("llama3", "yarn"):
        original = "original_max_position_embeddings"
        length = f.integer("max_position_embeddings")
        parameters[original] = f.integer(original, parameters.get(original, length))
        if kind == "yarn":
            parameters.setdefault("factor", length / parameters[original])
    _check_rope_keys(name, kind, parameters)
    return RopeConfig(theta, kind, parameters)


def _check_rope_keys(name: str, kind: str, parameters: dict[str, Any]) -> None:
    """Types and completeness; drops what says nothing to this kind."""
    parameters.pop("finetuned", None)  # a note of YaRN's authors
    if kind in ("default", "linear"):  # the same whatever the original length
        parameters.pop("original_max_position_embeddings", None)
    required, optional = ROPE_KEYS[kind]
    known = {*required, *optional, "partial_rotary_factor"}
    for key in required:
        if key not in parameters:
            raise ConfigError(f"config.json: {name}.{key} is missing (rope_type {kind!r})")
    for key, value in parameters.items():
        if key not in known:
            raise unknown(f"key in config.json ({name}, rope_type {kind!r})", key, known)
        if key == "truncate":
            if not isinstance(value, bool):
                raise ConfigError(f"config.json: {name}.{key} must be true or false, not {value!r}")
        elif _number(f"{name}.{key}", value) < 0 or (not value and key not in _MAY_BE_ZERO):
            raise ConfigError(f"config.json: {name}.{key} must be positive, not {value!r}")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise ConfigError(f"config.json: {name}.high_freq_factor must be above low_freq_factor")


def layer_windows(types: Sequence[str], window: int | None) -> tuple[int | None, ...] | None:
    """Sliding window of each layer from `layer_types`; None where no layer has one.

    Raises ConfigError for a layer type that is neither full_attention nor sliding_attention.
    """
    known = ("full_attention", "sliding_attention")
    for kind in types:
        if kind not in known:
            raise unknown("entry of layer_types in config.json", kind, known)
    if window is None or "sliding_attention" not in types:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"config.json: {name} must be a finite number, not {value!r}")
    return float(value)
