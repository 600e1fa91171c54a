"""Typed reading of a Hugging Face config: every complaint names the field and what it may be."""

from __future__ import annotations

from typing import Any

from dejavu.errors import ConfigError
from dejavu.registry import unknown

# Hugging Face's activation names -> ours
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "fatrelu": "fatrelu",
}
_REQUIRED = object()


class Fields:
    """A config dict whose accessors check type and presence."""

    def __init__(self, hf: dict[str, Any]) -> None:
        self.hf = hf

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

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """An int or float."""
        value = self._get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be a number, not {value!r}")
        return float(value)

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
        """`activation` and `activation_threshold` of ModelConfig; fatrelu's is `hidden_act_param`."""
        value = self._get(name, default)
        if value not in ACTIVATIONS:
            raise unknown(f"{name} in config.json", value, ACTIVATIONS)
        threshold = self.number("hidden_act_param", 0.0) if value == "fatrelu" else 0.0
        return {"activation": ACTIVATIONS[value], "activation_threshold": threshold}

    def special_tokens(self) -> dict[str, Any]:
        """`bos_token_id`, `eos_token_ids` (an id or a list in the file) and `pad_token_id`."""
        eos = self.hf.get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        for name in ("bos_token_id", "pad_token_id"):
            if not isinstance(self.hf.get(name), int | None):
                raise ConfigError(f"config.json: {name} must be one id, not {self.hf[name]!r}")
        if not all(isinstance(i, int) for i in ids):
            raise ConfigError(f"config.json: eos_token_id must be an id or ids, not {eos!r}")
        return {
            "bos_token_id": self.hf.get("bos_token_id"),
            "eos_token_ids": tuple(ids),
            "pad_token_id": self.hf.get("pad_token_id"),
        }
