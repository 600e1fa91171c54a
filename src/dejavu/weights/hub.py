"""Models on the Hugging Face Hub: use the cached copy, or download just the files that are needed.

Cache folder, endpoint, token and offline mode are the library's own (``HF_HOME``, ``HF_ENDPOINT``,
``HF_TOKEN``, ``HF_HUB_OFFLINE``).
"""

import glob
import os
from fnmatch import fnmatch
from pathlib import Path

from dejavu.errors import CheckpointError
from dejavu.weights.layout import find_weights, shards_of_index

__all__ = ["SIDE_FILES", "TOKENIZER_FILES", "hub_endpoint", "is_hub_id", "refusal", "snapshot"]

# Everything of a model that is not weights: configs, tokenizer, chat template, licence.
SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def hub_endpoint() -> str | None:
    """Address of the Hub that ``HF_ENDPOINT`` names now; None for the library's own.

    The library itself reads the variable only once, when it is imported.
    """
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def is_hub_id(name: str) -> bool:
    """Whether ``name`` could be a repository: ``org/name`` or ``name``, no more."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def snapshot(repo_id: str, revision: str | None = None) -> Path:
    """Folder of the cached model ``repo_id``, downloaded first if it is not complete.

    A complete cached copy is used as it is: no network, nothing written, so read-only caches and
    machines without a network work. To follow a branch that moved, ask for its commit.

    Raises:
        CheckpointError: no such model, no access, no network, or no weights in a known format.
    """
    cached = _cached(repo_id, revision)
    if cached is not None and _is_complete(cached):
        return cached
    try:
        return _download(repo_id, revision)
    except CheckpointError:
        raise
    # The library's network errors have had different types over time (requests, httpx, its own).
    except Exception as error:
        if cached is not None and _has_weights(cached):
            return cached
        wanted = repo_id if revision is None else f"{repo_id} (revision {revision})"
        raise CheckpointError(
            f"{wanted}: there is no such local folder or file, and no model of that name could be "
            f"had from the Hugging Face Hub: {refusal(error)}. Check the spelling; a private or "
            "gated model needs HF_TOKEN, a download needs a network and HF_HUB_OFFLINE unset"
        ) from error


def refusal(error: Exception) -> str:
    """Why the Hub did not give something, in one line and without the library's advice."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "you have no access to that gated repository"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private"
    if isinstance(error, LocalEntryNotFoundError):
        return "it cannot be reached, and nothing is cached"
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _cached(repo_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _is_complete(folder: Path) -> bool:
    return _has_weights(folder) and any((folder / name).is_file() for name in TOKENIZER_FILES)


def _has_weights(folder: Path) -> bool:
    try:
        find_weights(folder)
    except CheckpointError:
        return False
    return True


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    endpoint = hub_endpoint()
    siblings = HfApi(endpoint=endpoint).model_info(repo_id, revision=revision).siblings or []
    # Files in subfolders are other formats of the same weights (onnx/, original/).
    names = [file.rfilename for file in siblings if "/" not in file.rfilename]
    weights: set[str] = set()
    for index, single, pattern in (
        ("model.safetensors.index.json", "model.safetensors", "*.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin"),
    ):
        if index in names:
            file = hf_hub_download(repo_id, index, revision=revision, endpoint=endpoint)
            weights = set(shards_of_index(Path(file)).values())
        if single in names and single not in weights:  # the choice find_weights makes
            weights = {single}
        weights = weights or {name for name in names if fnmatch(name, pattern)}
        if weights:
            break
    else:
        found = ", ".join(names[:8])
        raise CheckpointError(
            f"{repo_id} on the Hub has neither safetensors nor PyTorch weights (files: {found}). "
            "Of a repository of .gguf files, download one and pass its path"
        )
    side = {name for name in names if any(fnmatch(name, pattern) for pattern in SIDE_FILES)}
    folder = snapshot_download(
        repo_id,
        revision=revision,
        endpoint=endpoint,
        allow_patterns=[glob.escape(name) for name in sorted(weights | side)],
    )
    return Path(folder)
