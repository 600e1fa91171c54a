"""Look things up by name, with an error that lists what exists."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from difflib import get_close_matches
from types import ModuleType

from dejavu.errors import ConfigError, DejavuError


def unknown(
    kind: str, name: object, known: Iterable[str], error: type[DejavuError] = ConfigError
) -> DejavuError:
    """The error for a name that is not among `known`, with the closest ones first."""
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return error(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")


def architectures() -> list[str]:
    """`model_type`s with a file of their own in `dejavu.models`."""
    package = importlib.import_module("dejavu.models")
    shared = {
        "base",
        "config_fields",
        "deferred_kv",
        "kv_cache",
        "neurons",
        "rope",
        "slots",
        "streaming",
    }
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in shared)


def architecture(model_type: object) -> ModuleType:
    """The module of an architecture; only names found in the folder are ever imported.

    Raises ConfigError for any other `model_type`.
    """
    known = architectures()
    if model_type not in known:
        raise unknown("model_type", model_type, known)
    return importlib.import_module(f"dejavu.models.{model_type}")
