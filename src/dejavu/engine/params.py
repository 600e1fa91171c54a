"""What a caller may ask of sampling, checked once; no torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from dejavu.errors import InputError

# At or below this the answer is greedy: logits of the order 1e3 carry an fp32 rounding error of the
# same size, so a smaller temperature would only make a lottery of that error.
GREEDY_TEMPERATURE = 1e-4
# Beyond these a logit of the order 1e3 soon has no room left in fp32: 5e-324 made it infinite.
REPETITION_PENALTIES = 0.01, 100.0
_MOST_TOP = 20  # alternatives of a token, as in OpenAI's API


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop. The default is greedy; None means a field's default.

    The steps are taken in this order (that of transformers): logit_bias, repetition_penalty,
    presence_penalty and frequency_penalty, temperature, top_k, top_p, min_p.

    max_tokens: new tokens at most; None: up to the context.
    temperature: divides the logits; up to 1e-4 the likeliest token is taken, always.
    top_k: only among the k likeliest (equals of the k-th included); 0 or -1: all.
    top_p: only among the likeliest that together reach this probability; 1: all.
    min_p: only tokens with at least this share of the likeliest one's probability; 0: all.
    repetition_penalty: for every token of the prompt or the answer, a positive logit is divided by
        it, a negative one multiplied; 0.01 to 100, 1: off.
    presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens, once
        and once for each occurrence; the prompt does not count.
    logit_bias: token id -> number added to its logit, -100 to 100 (ids may be strings, as in JSON).
    seed: the same seed gives the same answer, whatever else runs beside it; None: a fresh one.
    stop: string or strings before which the answer ends; it never contains one. Empty ones are
        no condition.
    stop_token_ids: ids that end the answer, beside the model's own end tokens.
    ignore_eos: the model's own end tokens do not end the answer.
    logprobs: how likely the model held each token of the answer, with so many of the likeliest
        ones (0: none); None: not asked for. prompt_logprobs: the same of the prompt's tokens.

    Raises InputError naming the field.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is None:
                self._set(entry.name, entry.default)
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, at_least=1))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, at_least=-(2**63), below=2**64))
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        self._set("top_k", max(0, _integer("top_k", self.top_k, at_least=-1)))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        penalty = _number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        self._set("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if (top := getattr(self, name)) is not None:
                self._set(name, _integer(name, top, at_least=0, below=_MOST_TOP + 1))
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, always."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple of strings, none of them empty."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def _set(self, name: str, value: Any) -> None:
        # Only from __post_init__: a frozen dataclass has no other way to store a checked value.
        object.__setattr__(self, name, value)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, not {value!r}")
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InputError(f"{name} must be a number {bounds}, not {value!r}")
    return number


def _integer(name: str, value: object, *, at_least: int, below: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, not {value!r}")
    number = int(value)
    if number < at_least or (below is not None and number >= below):
        bounds = f"at least {at_least}" + ("" if below is None else f" and below {below}")
        raise InputError(f"{name} must be {bounds}, not {number}")
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise InputError(f"{name} must be a string or a list of strings, not {value!r}")
    return tuple(dict.fromkeys(s for s in strings if s))


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise InputError(f"{name} must be a list of token ids, not {value!r}")
    return tuple(_integer(f"{name}[{i}]", entry, at_least=0) for i, entry in enumerate(value))


def _bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias must map token ids to numbers, not {value!r}")
    bias = {}
    for key, amount in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        token = _integer(f"logit_bias key {key!r}", token, at_least=0)
        bias[token] = _number(f"logit_bias[{token}]", amount, -100.0, 100.0)
    return bias or None
