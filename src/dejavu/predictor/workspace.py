"""What a run of `prepare` has finished, on disk beside its destination, so that a rerun goes on.

A folder `<out>.partial`: `state.json` names what the run is about (a fingerprint of options, model
and text) and its early results; each trained site and layer is a safetensors file of its own. All
are written aside and renamed, so whatever is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu.errors import PlanError
from dejavu.predictor.calibration import Windows
from dejavu.predictor.curve import Curve
from dejavu.predictor.network import Predictor
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.plan import BaseModel, restored, stored
from dejavu.predictor.search import Candidate
from dejavu.sparsity.policy import Key
from dejavu.weights.files import atomic_write, save_safetensors

STATE_FILE = "state.json"


def fingerprint(version: str, base: BaseModel, windows: Windows, options: PrepareOptions) -> str:
    """What a run is about, as a hash. version: of the work, raised when a change makes the
    unfinished work of an older one useless."""
    about = {
        "version": version,
        "options": options.of_work,
        "model": base.identity,
        "dtype": base.dtype,
        "text": windows.fingerprint(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


class Workspace:
    """Results of an unfinished run; leftovers of a run about something else are removed."""

    def __init__(self, out: Path, fingerprint: str) -> None:
        self.folder = out.with_name(out.name + ".partial")
        self._state: dict[str, Any] = {"fingerprint": fingerprint}
        found = self._read()
        if found is not None and found.get("fingerprint") == fingerprint:
            self._state = found
        elif found is None and self.folder.exists() and any(self.folder.iterdir()):
            raise PlanError(
                f"{self.folder} is in the way: it is no work folder of `prepare`; move it or "
                "choose another destination"
            )
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write()

    def get(self, name: str) -> Any:
        """An early result, None if it is still to come."""
        return self._state.get(name)

    def put(self, name: str, value: Any) -> None:
        """Keep a result: anything JSON can hold."""
        self._state[name] = value
        self._write()

    def load(self, key: Key) -> tuple[list[Candidate], dict[str, Any]] | None:
        """Candidates of a site and layer and their notes, None if they are still to come."""
        from safetensors import safe_open

        path = self._path(key)
        if not path.is_file():
            return None
        with safe_open(path, "pt") as file:
            notes = json.loads(file.metadata()["notes"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = [
            Candidate(
                Predictor(
                    restored(tensors, f"{n}.first", entry["width"]),
                    restored(tensors, f"{n}.second", entry["rank"]),
                    tensors[f"{n}.bias"],
                ),
                entry["distance"],
                Curve(tensors[f"{n}.curve"], entry["rows"]),
            )
            for n, entry in enumerate(notes["candidates"])
        ]
        return found, notes["extra"]

    def save(self, key: Key, candidates: Sequence[Candidate], extra: dict[str, Any]) -> None:
        """Keep the candidates of a site and layer."""
        tensors: dict[str, Tensor] = {"none": torch.zeros(0)}
        for n, c in enumerate(candidates):
            for part, matrix in (("first", c.predictor.first), ("second", c.predictor.second)):
                tensors |= stored(f"{n}.{part}", matrix)
            tensors[f"{n}.bias"], tensors[f"{n}.curve"] = c.predictor.bias, c.curve.table
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        entries = [
            {
                "distance": c.distance,
                "rows": c.curve.rows,
                "rank": c.predictor.rank,
                "width": c.predictor.first.columns,
            }
            for c in candidates
        ]
        notes = json.dumps({"candidates": entries, "extra": extra})
        save_safetensors(self._path(key), tensors, {"notes": notes})

    def remove(self) -> None:
        """The run is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, key: Key) -> Path:
        site, layer = key
        return self.folder / f"{site}-{layer:03d}.safetensors"

    def _read(self) -> dict[str, Any] | None:
        try:
            state = json.loads((self.folder / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def _write(self) -> None:
        with atomic_write(self.folder / STATE_FILE) as partial:
            partial.write_text(json.dumps(self._state, indent=1), encoding="utf-8")
