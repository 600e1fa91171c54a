"""The product of `dejavu prepare`: a folder that says, for one model, what each layer may skip.

`plan.json` holds the model's identity, the choices of every named level, and the report;
`predictors.safetensors` the predictors that the levels share. Nothing in it is ever executed.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.embedded import plan_path
from dejavu.errors import DejavuError, PlanError
from dejavu.kernels.device import CPU
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.nibbles import Nibbles
from dejavu.load import LoadedModel
from dejavu.predictor.network import Predictor
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.registry import unknown
from dejavu.sparsity.inputs import InputSelector, InputSite, Thresholds
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Key, Site
from dejavu.weights.files import atomic_folder, sha256_file, write_safetensors

FORMAT_VERSION = 2  # 1 had int8 predictors only
_READABLE = (1, FORMAT_VERSION)
PLAN_FILE = "plan.json"
PREDICTORS_FILE = "predictors.safetensors"
DEFAULT_LEVEL = "balanced"  # of plan files that name none
Kind = Literal["dense", "full", "predictor"]


@dataclass(frozen=True)
class BaseModel:
    """The model a plan was made for. identity: hash of the source checkpoint's tensors; dtype: of
    the weights it was made on."""

    identity: str
    name: str
    dtype: str
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_key_value_heads: int

    @staticmethod
    def of(loaded: LoadedModel, name: str) -> BaseModel:
        """The entry for a loaded model; hashes its source once."""
        c = loaded.model.config
        return BaseModel(
            loaded.checkpoint.identity(),
            name,
            loaded.dtype,
            c.model_type,
            c.num_hidden_layers,
            c.hidden_size,
            c.intermediate_size,
            c.num_key_value_heads,
        )

    def entries(self, site: Site) -> int:
        """What a selection of a site chooses among."""
        return self.intermediate_size if site == Site.NEURONS else self.num_key_value_heads


@dataclass(frozen=True)
class LayerPolicy:
    """What one site of one layer does: compute everything (`dense`), list everything and skip what
    the activation zeroes (`full`), or list what a predictor scores above `threshold`."""

    kind: Kind = "dense"
    threshold: float = 0.0


@dataclass(frozen=True)
class Level:
    """A named trade: at most `max_loss` of relative perplexity on the calibration model's held-out
    text. neurons, heads: one policy a layer. report: what was measured for it. inputs: thresholds
    of input sparsity, one set a layer (neurons and heads are dense then), or ()."""

    max_loss: float
    neurons: tuple[LayerPolicy, ...]
    heads: tuple[LayerPolicy, ...]
    report: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Thresholds, ...] = ()

    def policies(self, site: Site) -> tuple[LayerPolicy, ...]:
        """One a layer."""
        return self.neurons if site == Site.NEURONS else self.heads


@dataclass(frozen=True, eq=False)
class Source:
    """A trained predictor and the look-ahead distance it was trained for."""

    predictor: Predictor
    distance: float = 0.0


@dataclass(frozen=True, eq=False)
class Plan:
    """calibration: what text, how much, which options. report: figures of every layer.
    default_level: what runs where nobody asks for a level."""

    base: BaseModel
    levels: dict[str, Level]
    predictors: dict[Key, Source]
    calibration: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    default_level: str = DEFAULT_LEVEL

    def level(self, name: str | None = None) -> Level:
        """A level by name; None: the plan's default. Raises PlanError listing those that exist."""
        name = self.default_level if name is None else name
        if name not in self.levels:
            raise unknown("level", name, self.levels, PlanError)
        return self.levels[name]

    def selector(self, loaded: LoadedModel, level: str | None = None) -> MeteredSelector:
        """The selector of a level, by default the plan's own, for a loaded model.

        Raises PlanError for another model than the plan's. The same source in another dtype is
        fine, with a warning that names both.
        """
        chosen = self.level(level)
        identity = loaded.checkpoint.identity()
        if identity != self.base.identity:
            raise PlanError(
                f"this plan was made for {self.base.name} (identity {self.base.identity[:12]}), "
                f"the model is {loaded.checkpoint.path} (identity {identity[:12]}); make one for "
                "it with `dejavu prepare`"
            )
        if loaded.dtype != self.base.dtype:
            warnings.warn(
                f"the plan was calibrated on {self.base.dtype} weights and runs on {loaded.dtype} "
                "ones of the same model: its stated loss was measured on the former",
                stacklevel=2,
            )
        if chosen.inputs:
            if loaded.model.device.type != "cpu":
                raise PlanError(
                    f"level {level or self.default_level} of this plan skips input channels, which "
                    "runs on the CPU only; use --device cpu or the level exact"
                )
            return InputSelector(loaded.model, chosen.inputs)
        return self.choices(chosen, loaded.model.config, loaded.model.device)

    def choices(
        self, level: Level, config: ModelConfig, device: torch.device = CPU
    ) -> PlanSelector:
        """The selector of any level, named or not, for a model of this shape on a device."""
        choices: dict[Key, Choice] = {}
        for site in Site:
            for layer, policy in enumerate(level.policies(site)):
                if policy.kind == "full":
                    choices[site, layer] = Choice(None)
                elif policy.kind == "predictor":
                    source = self.predictors[site, layer]
                    choices[site, layer] = Choice(
                        source.predictor, source.distance, policy.threshold
                    )
        return PlanSelector(config.num_hidden_layers, config.intermediate_size, choices, device)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the folder, whole or not at all."""
        with atomic_folder(Path(folder)) as out:
            write_safetensors(out / PREDICTORS_FILE, _tensors(self.predictors))
            content = {
                "format_version": FORMAT_VERSION,
                "base_model": asdict(self.base),
                "default_level": self.default_level,
                "levels": {name: asdict(level) for name, level in self.levels.items()},
                "predictors": {
                    key_name(key): {
                        "rank": s.predictor.rank,
                        "bits": s.predictor.bits,
                        "distance": s.distance,
                    }
                    for key, s in sorted(self.predictors.items())
                },
                "sha256": {PREDICTORS_FILE: sha256_file(out / PREDICTORS_FILE)},
                "calibration": self.calibration,
                "report": self.report,
            }
            text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            (out / PLAN_FILE).write_text(text, encoding="utf-8")


def load_plan(source: str | os.PathLike[str]) -> Plan:
    """Read a plan from a folder, a Hub id, or by the embedded one's name.

    Raises PlanError naming the file and field that is missing, damaged or of another version.
    """
    folder, content = _content(source)
    path = folder / PLAN_FILE
    try:
        base = BaseModel(**content["base_model"])
        levels = {name: _level(entry) for name, entry in content["levels"].items()}
        distances = {key_of(n): float(e["distance"]) for n, e in content["predictors"].items()}
        expected = content["sha256"][PREDICTORS_FILE]
        calibration, report = content["calibration"], content["report"]
        default = str(content.get("default_level", DEFAULT_LEVEL))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{path}: a field is missing or wrong ({error!r})") from error
    predictors = _read_predictors(folder / PREDICTORS_FILE, expected, distances, base)
    _check_levels(path, base, levels, predictors)
    if "default_level" in content and default not in levels:
        raise PlanError(f"{path}: default_level is {default!r}, which is no level of it")
    return Plan(base, levels, predictors, calibration, report, default)


def default_level(source: str | os.PathLike[str]) -> str:
    """Of a plan, without its predictors. Raises PlanError as `load_plan` does."""
    _, content = _content(source)
    return str(content.get("default_level", DEFAULT_LEVEL))


def _content(source: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The folder of a plan and what its `PLAN_FILE` holds."""
    folder = Path(plan_path(os.fspath(source)))
    if not folder.is_dir():
        from dejavu.predictor.hub import pull_plan

        folder = pull_plan(os.fspath(source))
    path = folder / PLAN_FILE
    if not path.is_file():
        raise PlanError(
            f"plan {os.fspath(source)}: there is no {PLAN_FILE} in that folder; plans are made by "
            "`dejavu prepare MODEL --out FOLDER`"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version not in _READABLE:
        raise PlanError(
            f"{path}: format_version is {version!r}, this dejavu reads up to {FORMAT_VERSION}; "
            "make the plan again with `dejavu prepare`"
        )
    found: dict[str, Any] = content
    return folder, found


def key_name(key: Key) -> str:
    """Of a site and layer in files: `neurons.3`."""
    site, layer = key
    return f"{site}.{layer}"


def key_of(name: str) -> Key:
    """What `key_name` named. Raises ValueError for another name."""
    site, _, layer = name.partition(".")
    return Site(site), int(layer)


def stored(name: str, matrix: Matrix | Nibbles) -> dict[str, Tensor]:
    """A predictor's stage as named tensors; 4-bit ones are uint8."""
    if isinstance(matrix, Nibbles):
        return {name: matrix.data, f"{name}_step": matrix.step}
    if matrix.scale is None:
        return {name: matrix.data}
    return {name: matrix.data, f"{name}_scale": matrix.scale}


def restored(tensors: Mapping[str, Tensor], name: str, columns: int) -> Matrix | Nibbles:
    """What `stored` gave, with so many columns. KeyError names a tensor that is missing."""
    data = tensors[name].contiguous()
    if data.dtype == torch.uint8:
        step = tensors[f"{name}_step"].float().contiguous()
        if data.shape != (len(step), -(-columns // 2)):
            raise PlanError(f"the 4-bit tensor {name} has the wrong shape {tuple(data.shape)}")
        return Nibbles(data, step, columns)
    if data.dtype == torch.int8:
        return Matrix(data, tensors[f"{name}_scale"].float().contiguous())
    return Matrix(data)


def _tensors(predictors: Mapping[Key, Source]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, source in predictors.items():
        p, name = source.predictor, key_name(key)
        for part, matrix in (("first", p.first), ("second", p.second)):
            tensors |= stored(f"{name}.{part}", matrix)
        tensors[f"{name}.bias"] = p.bias
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _level(entry: dict[str, Any]) -> Level:
    neurons, heads = (tuple(LayerPolicy(**p) for p in entry[site]) for site in ("neurons", "heads"))
    for policy in (*neurons, *heads):
        if policy.kind not in ("dense", "full", "predictor"):
            raise ValueError(f"kind {policy.kind!r}")
    inputs = tuple(
        {InputSite(site): float(value) for site, value in layer.items()}
        for layer in entry.get("inputs", ())
    )
    for value in (value for layer in inputs for value in layer.values()):
        if not 0 <= value < math.inf:
            raise ValueError(f"threshold {value!r} of an input site")
    return Level(float(entry["max_loss"]), neurons, heads, entry["report"], inputs)


def _read_predictors(
    path: Path, expected: str, distances: dict[Key, float], base: BaseModel
) -> dict[Key, Source]:
    from safetensors.torch import load

    try:
        # Not mapped: who overwrites the file later must not change, or kill, what runs on it.
        content = path.read_bytes()
        found = sha256(content).hexdigest()
        if found != expected:
            raise PlanError(
                f"{path} is damaged or from another plan: its SHA-256 is {found}, "
                f"{PLAN_FILE} says {expected}"
            )
        tensors = load(content)
    except DejavuError:
        raise
    except Exception as error:  # safetensors raises its own type, files theirs
        raise PlanError(f"{path} cannot be read: {error}") from error
    predictors: dict[Key, Source] = {}
    for key, distance in distances.items():
        name = key_name(key)
        try:
            first = restored(tensors, f"{name}.first", base.hidden_size)
            second = restored(tensors, f"{name}.second", first.rows)
            predictor = Predictor(first, second, tensors[f"{name}.bias"].float().contiguous())
        except KeyError as error:
            raise PlanError(f"{path} lacks the tensor {error}") from error
        shape = (first.columns, second.columns, second.rows, len(predictor.bias))
        entries = base.entries(key[0])
        if shape != (base.hidden_size, first.rows, entries, entries):
            raise PlanError(f"{path}: the predictor {name} has the wrong shape for its model")
        predictors[key] = Source(predictor, distance)
    return predictors


def _check_levels(
    path: Path, base: BaseModel, levels: dict[str, Level], predictors: dict[Key, Source]
) -> None:
    for name, level in levels.items():
        if level.inputs and len(level.inputs) != base.num_hidden_layers:
            raise PlanError(
                f"{path}: level {name} has input thresholds of {len(level.inputs)} layers, the "
                f"model {base.num_hidden_layers} layers"
            )
        for site in Site:
            policies = level.policies(site)
            if len(policies) != base.num_hidden_layers:
                raise PlanError(
                    f"{path}: level {name} has {len(policies)} {site} policies for "
                    f"{base.num_hidden_layers} layers"
                )
            for layer, policy in enumerate(policies):
                if policy.kind == "predictor" and (site, layer) not in predictors:
                    raise PlanError(
                        f"{path}: level {name} lacks the predictor {key_name((site, layer))}"
                    )
