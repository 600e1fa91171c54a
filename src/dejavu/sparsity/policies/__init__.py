"""Selectors that need no plan: upper bounds, comparisons, and a training-free start.

Each file is one policy; `parse_policy("topk:keep=0.1", ...)` makes one from what a user typed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dejavu.errors import InputError
from dejavu.registry import unknown
from dejavu.sparsity.model_view import Cache, ModelView
from dejavu.sparsity.policies.oracle import oracle, threshold, topk
from dejavu.sparsity.policies.signs import signs
from dejavu.sparsity.policies.static import static
from dejavu.sparsity.policy import Selector

Windows = Callable[[], Sequence[Tensor]]  # calibration text, read only by a policy that needs it

POLICIES: dict[str, Callable[..., Selector]] = {
    "oracle": oracle,
    "threshold": threshold,
    "topk": topk,
    "static": static,
    "signs": signs,
}


def parse_policy(spec: str, model: ModelView[Cache], windows: Windows) -> Selector:
    """A selector from `name` or `name:option=value,...`.

    windows: gives int64 `[n]` token windows. Raises InputError naming what is unknown or unusable.
    """
    name, _, rest = spec.partition(":")
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES, InputError)
    make = POLICIES[name]
    known = [
        p.name
        for p in inspect.signature(make).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    options: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        option, _, value = part.partition("=")
        if option not in known:
            raise unknown(f"option of policy {name}", option, known, InputError)
        try:
            options[option] = float(value)
        except ValueError as error:
            raise InputError(f"policy {name}: {option} must be a number, not {value!r}") from error
    needs: dict[str, Any] = {"windows": windows} if name == "static" else {}
    return make(model, **needs, **options)
