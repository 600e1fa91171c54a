"""Which files of a model folder hold its weights; looks at names and indexes, opens no weights."""

import json
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dejavu.errors import CheckpointError

__all__ = ["Layout", "find_weights", "read_json", "shards_of_index"]


class Layout(NamedTuple):
    """The weight files of a folder, in file order, and what their index claims.

    weight_map: tensor name -> file name, empty when there is no index.
    index_file: the index, for messages.
    notice: what a user should know about the choice of these files.
    """

    shards: tuple[Path, ...]
    weight_map: dict[str, str] = {}  # noqa: RUF012  # never changed, like the rest of a tuple
    index_file: Path | None = None
    notice: str | None = None


class _Format(NamedTuple):
    single: str
    index_file: str
    pattern: str  # other single files that are accepted when there is exactly one


_SAFETENSORS = _Format("model.safetensors", "model.safetensors.index.json", "*.safetensors")
# Not "*.bin": training leaves files such as optimizer.bin or training_args.bin in the folder.
_PICKLE = _Format("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin")


def find_weights(folder: Path) -> Layout:
    """Choose the weight files: safetensors where complete, else pickled ``.bin`` where complete.

    An index is followed as written, whatever its files are called; a single file needs none.
    A single file wins over an index that does not mention it (as in transformers): such an index
    is what re-saving a smaller model into an old folder leaves behind.

    Raises:
        CheckpointError: no weights, an index that names absent files or files outside the folder.
    """
    problems = []
    for format_ in (_SAFETENSORS, _PICKLE):
        try:
            layout = _find(folder, format_)
        except CheckpointError as error:
            problems.append(error)
            continue
        if layout is None:
            continue
        if problems:
            notice = f"{problems[0]}. Loading {layout.shards[0].name} instead."
            return layout._replace(notice=notice)
        return layout
    if problems:
        raise problems[0]
    raise CheckpointError(
        f"no weights in {folder}: expected model.safetensors, pytorch_model.bin or an index of "
        "shards (model.safetensors.index.json); download the weight files into this folder"
    )


def shards_of_index(index: Path) -> dict[str, str]:
    """Read an index: tensor name -> file name relative to the index's folder.

    Raises:
        CheckpointError: not an index, or a file name that leaves the folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: the key 'weight_map' is missing or empty")
    for tensor, name in weight_map.items():
        # Forbidden are ways out of the folder, not links: a Hub cache consists of links.
        path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("..")
        if path.is_absolute() or ".." in path.parts or "\\" in str(name) or not path.name:
            raise CheckpointError(
                f"{index}: tensor {tensor!r} is said to be in {name!r}, which is not a file inside "
                "the model's folder; do not trust this checkpoint"
            )
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is absent, unreadable or does not hold an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; download it with the other files of the model"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _find(folder: Path, format_: _Format) -> Layout | None:
    single = folder / format_.single
    index = _only(folder, format_.index_file, f"*{format_.index_file.removeprefix('model')}")
    if index is None:
        file = _only(folder, format_.single, format_.pattern)
        if file is None and (files := sorted(path.name for path in folder.glob(format_.pattern))):
            raise CheckpointError(
                f"{folder} holds {len(files)} weight files ({', '.join(files[:3])}) and no "
                f"{format_.index_file} that says which belong together; add the index"
            )
        return Layout((file,)) if file else None

    weight_map = shards_of_index(index)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if single.is_file() and single.name not in names:
        state = f"names {absent[0]}, which is absent" if absent else "does not mention that file"
        notice = (
            f"{index} {state}; loading {single.name} and ignoring the index, which looks stale. "
            "Delete the one that is outdated."
        )
        return Layout((single,), notice=notice)
    if absent:
        example = next(tensor for tensor, name in weight_map.items() if name == absent[0])
        raise CheckpointError(
            f"{index} names {len(absent)} of {len(names)} weight files that are absent: "
            f"{', '.join(absent[:3])} (with tensor {example!r}); download the model again"
        )
    return Layout(tuple(folder / name for name in names), weight_map, index)


def _only(folder: Path, name: str, pattern: str) -> Path | None:
    """The file called ``name``, else the single one that matches ``pattern``, else None."""
    if (folder / name).is_file():
        return folder / name
    matches = [path for path in folder.glob(pattern) if path.is_file()]
    return matches[0] if len(matches) == 1 else None
