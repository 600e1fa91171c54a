"""From a model and a text to a plan: survey, record, train, search, report.

Nothing large is stored: inputs are recorded for as many layers as fit into memory, and the dense
forward runs again for the next ones. Finished layers wait in a work folder beside the destination
(`workspace.py`), so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dejavu
from dejavu.errors import InputError
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.base import DecoderLM
from dejavu.predictor.calibration import Tokenizer, Windows, make_windows
from dejavu.predictor.cost import measured_times
from dejavu.predictor.layer import Task, learn
from dejavu.predictor.levels import HeldOut, find_levels
from dejavu.predictor.lookahead import best_distance
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.plan import (
    DEFAULT_LEVEL,
    PLAN_FILE,
    BaseModel,
    LayerPolicy,
    Level,
    Plan,
    Source,
)
from dejavu.predictor.recording import Key, Recorded, record
from dejavu.predictor.report import Reporter
from dejavu.predictor.search import Candidate, Found, Place
from dejavu.predictor.survey import Survey, heads_pay, make_survey
from dejavu.predictor.training import TrainOptions
from dejavu.predictor.wide import widened
from dejavu.predictor.workspace import Workspace
from dejavu.predictor.worth import Neurons
from dejavu.sparsity.policy import Site

Progress = Callable[[str, int, int], None]  # stage, done, in all
_FP16 = 2  # bytes
_GIB = 1 << 30
_CODE = 1  # raised when a change makes unfinished work of an older version useless
_SPARSE_ENOUGH = 0.5  # active neurons above which a warning says that exact sparsity is about zero


def prepare(
    loaded: LoadedModel,
    texts: Iterable[str | Path],
    out: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    options: PrepareOptions | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Make a plan for a model and save it to the folder `out`.

    texts: documents (`str`) or text files (`Path`), see `calibration.documents`. name: of the
    model, for messages; default, the checkpoint's path. What is interrupted leaves
    `<out>.partial`, from which the same call continues.

    Raises InputError for text too short or an `out` that is in use, PlanError naming a layer that
    cannot be learned.
    """
    options = options or PrepareOptions()
    target = _destination(out)
    with _threads(options.threads), torch.inference_mode():
        windows = _windows(loaded, texts, tokenizer, options)
        run = _Run(loaded, windows, target, options, name or str(loaded.checkpoint.path), progress)
        return run.plan()


class _Run:
    def __init__(
        self,
        loaded: LoadedModel,
        windows: Windows,
        target: Path,
        options: PrepareOptions,
        name: str,
        progress: Progress | None,
    ) -> None:
        self._stored = loaded.model
        self._model = widened(loaded.model)
        self._windows, self._target, self._options = windows, target, options
        self._progress = progress or (lambda stage, done, total: None)
        self._ops: Ops = TorchOps()
        self._base = BaseModel.of(loaded, name)
        self._work = Workspace(target, self._fingerprint())
        self._layers = loaded.model.config.num_hidden_layers

    def plan(self) -> Plan:
        held = self._record("recording held-out text", self._windows.held_out, self._all_keys())
        survey = self._survey(held)
        self._train(survey, held)
        places, notes = self._places(survey)
        del held
        text = HeldOut(self._model, self._windows.held_out, self._ops, self._progress)
        times = measured_times(self._stored) if self._options.measure_cost else None
        levels, chosen = find_levels(self._stored, places, survey.price, text, self._options, times)
        reporter = Reporter(self._stored, places, chosen, text, times)
        default = levels[DEFAULT_LEVEL][1].threshold
        plan = Plan(
            self._base,
            {name: self._level(loss, found, reporter) for name, (loss, found) in levels.items()},
            _used_predictors([found for _, found in levels.values()], chosen),
            calibration=self._calibration(),
            report=reporter.summary(default, notes) | {"price_nats_per_byte": survey.price},
        )
        plan.save(self._target)
        self._work.remove()
        return plan

    def _level(self, loss: float, found: Found, reporter: Reporter) -> Level:
        def policies(site: Site) -> tuple[LayerPolicy, ...]:
            layers = range(self._layers)
            return tuple(found.policies.get((site, n), LayerPolicy()) for n in layers)

        return Level(loss, policies(Site.NEURONS), policies(Site.HEADS), reporter.level(found))

    def _fingerprint(self) -> str:
        about = {
            "code": _CODE,
            "options": asdict(self._options),
            "model": self._base.identity,
            "dtype": self._base.dtype,
            "text": self._windows.fingerprint(),
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def _all_keys(self) -> list[Key]:
        sites = [Site.NEURONS]
        if self._options.heads or len(self._options.lookahead) > 1:
            sites.append(Site.HEADS)
        return [(site, layer) for layer in range(self._layers) for site in sites]

    def _record(self, stage: str, windows: Tensor, keys: list[Key]) -> Recorded:
        heads = [layer for site, layer in keys if site == Site.HEADS and self._options.heads]
        return record(
            self._model,
            windows,
            keys,
            heads,
            self._ops,
            lambda done, total: self._progress(stage, done, total),
        )

    def _survey(self, held: Recorded) -> Survey:
        found = self._work.get("survey")
        if found is None:
            survey = make_survey(
                self._model,
                self._stored,
                held,
                self._windows.held_out,
                max_loss=self._options.max_loss,
                heads=self._options.heads,
                ops=self._ops,
                tick=lambda done, total: self._progress("measuring sensitivity", done, total),
            )
            self._work.put("survey", survey.to_json())
            found = survey.to_json()
        survey = Survey.from_json(found)
        _warn_if_dense(self._stored, survey)
        return survey

    def _tasks(self, survey: Survey) -> list[Task]:
        """What is to be learned, layer by layer; heads only where they could pay."""
        c = self._stored.config
        tasks = []
        for layer, block in enumerate(self._model.weights.blocks):
            for site in (Site.NEURONS, Site.HEADS):
                entry = survey.sites.get((site, layer))
                if entry is None:
                    continue
                if site == Site.HEADS:
                    ranks = self._options.head_ranks(c)
                    sizes = [
                        _predictor_bytes(r, c.hidden_size, c.num_key_value_heads) for r in ranks
                    ]
                    if not heads_pay(entry, sizes, survey.price):
                        continue
                neurons = None
                if site == Site.NEURONS:
                    neurons = Neurons.of(block.mlp, self._model.activation)
                alike = self._options.kind == "paper"
                tasks.append(Task((site, layer), entry, survey.price, neurons, alike))
        return tasks

    def _train(self, survey: Survey, held: Recorded) -> None:
        tasks = self._tasks(survey)
        todo = [task for task in tasks if self._work.load(task.key) is None]
        done = len(tasks) - len(todo)
        distances = self._distances(todo, held)
        for group in _groups(todo, self._bytes_for_inputs, self._options.memory_gib * _GIB):
            keys = sorted({k for task in group for k in _needed(task, distances[task.key])})
            data = self._record("recording", self._windows.train, keys)
            for task in group:
                distance = distances[task.key]
                found = learn(
                    task, data, held, self._ranks(task), distance, self._training(), self._ops
                )
                rows = self._windows.train.shape[0] * self._windows.length
                self._work.save(task.key, found, {"rows_trained": rows})
                done += 1
                self._progress("training", done, len(tasks))

    def _distances(self, tasks: list[Task], held: Recorded) -> dict[Key, float]:
        """The look-ahead distance of each task: by a trial on little text, the cheapest."""
        if len(self._options.lookahead) == 1 or not tasks:
            return {task.key: 0.0 for task in tasks}
        trial = self._windows.train[: len(self._windows.held_out)]
        data = None
        chosen = {}
        for done, task in enumerate(tasks, 1):
            name = f"lookahead.{task.key[0]}.{task.key[1]}"
            found = self._work.get(name)
            if found is None:
                if data is None:
                    data = self._record("recording for look-ahead", trial, self._all_keys())
                ranks = self._ranks(task)
                found = best_distance(
                    task,
                    data,
                    held,
                    ranks[len(ranks) // 2],
                    self._options.lookahead,
                    self._training(),
                    self._ops,
                )
                self._work.put(name, found)
            chosen[task.key] = float(found["distance"])
            self._progress("comparing look-ahead", done, len(tasks))
        return chosen

    def _ranks(self, task: Task) -> tuple[int, ...]:
        c = self._stored.config
        neurons = task.key[0] == Site.NEURONS
        return self._options.neuron_ranks(c) if neurons else self._options.head_ranks(c)

    def _training(self) -> TrainOptions:
        o = self._options
        return TrainOptions(o.epochs, o.batch, o.rate, o.seed)

    def _bytes_for_inputs(self, task: Task) -> int:
        rows = self._windows.train.shape[0] * self._windows.length
        return rows * self._stored.config.hidden_size * _FP16 * (1 + (task.key[0] == Site.HEADS))

    def _places(self, survey: Survey) -> tuple[list[Place], dict[str, Any]]:
        c = self._stored.config
        entries = {Site.NEURONS: c.intermediate_size, Site.HEADS: c.num_key_value_heads}
        places, notes = [], {}
        for (site, layer), entry in survey.sites.items():
            found: list[Candidate]
            found, extra = self._work.load((site, layer)) or ([], {})
            place = Place(
                (site, layer),
                entries[site],
                entry.active,
                entry.row_bytes,
                entry.down_bytes,
                entry.sensitivity,
                exact=site == Site.NEURONS and self._stored.activation.is_sparse,
                candidates=tuple(found),
            )
            places.append(place)
            lookahead = self._work.get(f"lookahead.{site}.{layer}")
            notes[f"{site}.{layer}"] = extra | (
                {"lookahead": lookahead["tried"]} if lookahead else {}
            )
        return places, notes

    def _calibration(self) -> dict[str, Any]:
        w = self._windows
        return {
            "dejavu": dejavu.__version__,
            "options": asdict(self._options),
            "window": w.length,
            "tokens_trained": w.train.shape[0] * w.length,
            "tokens_held_out": w.held_out.shape[0] * w.length,
            "sha256_of_tokens": w.fingerprint(),
        }


def _windows(
    loaded: LoadedModel,
    texts: Iterable[str | Path],
    tokenizer: Tokenizer,
    options: PrepareOptions,
) -> Windows:
    c = loaded.model.config
    length = min(options.window, c.context_length)
    # Held-out inputs of both sites stay in memory for the whole run.
    room = int(options.memory_gib * _GIB / 2 / (2 * c.num_hidden_layers * c.hidden_size * _FP16))
    held_out = max(2, min(options.held_out, room) // length)
    return make_windows(
        texts,
        tokenizer,
        length=length,
        train=max(2, options.tokens // length),
        held_out=held_out,
        separator=c.eos_token_ids[0] if c.eos_token_ids else None,
    )


def _used_predictors(levels: Iterable[Found], chosen: Mapping[Key, Candidate]) -> dict[Key, Source]:
    used = {
        key
        for found in levels
        for key, policy in found.policies.items()
        if policy.kind == "predictor"
    }
    return {key: Source(chosen[key].predictor, chosen[key].distance) for key in sorted(used)}


def _needed(task: Task, distance: float) -> list[Key]:
    """Recorded inputs that a task reads: its source, and its own for the targets."""
    site, layer = task.key
    place = 2 * layer + (site == Site.NEURONS) - round(2 * distance)
    return [task.key, (Site.NEURONS if place % 2 else Site.HEADS, place // 2)]


def _groups(tasks: list[Task], size: Callable[[Task], int], room: float) -> Iterator[list[Task]]:
    """Neighbouring tasks whose inputs fit into memory together; at least one a group."""
    group: list[Task] = []
    used = 0
    for task in tasks:
        if group and used + size(task) > room:
            yield group
            group, used = [], 0
        group.append(task)
        used += size(task)
    if group:
        yield group


def _predictor_bytes(rank: int, width: int, entries: int) -> int:
    """Of an int8 predictor with its scales and biases."""
    return rank * (width + 4) + entries * (rank + 4 + 4)


def _warn_if_dense(model: DecoderLM, survey: Survey) -> None:
    import warnings

    shares = [
        entry.active / model.config.intermediate_size
        for (site, _), entry in survey.sites.items()
        if site == Site.NEURONS
    ]
    mean = sum(shares) / len(shares)
    if mean > _SPARSE_ENOUGH:
        warnings.warn(
            f"{mean:.0%} of this model's neurons are active for a token (activation "
            f"{model.activation.name}), so exact sparsity is about zero; predictors select by "
            "contribution, and the plan may well leave layers dense",
            stacklevel=5,
        )


def _destination(out: str | os.PathLike[str]) -> Path:
    path = Path(out).expanduser()
    if path.is_dir() and any(path.iterdir()) and not (path / PLAN_FILE).is_file():
        raise InputError(f"{path} is a folder of something else; choose another destination")
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a plan is a folder")
    return path


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """torch's threads, put back afterwards."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
