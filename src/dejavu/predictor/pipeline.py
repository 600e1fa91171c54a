"""The steps of `prepare`: survey, compare look-ahead, record, train, search, report.

Nothing large is stored: inputs are recorded for as many layers as fit into memory, and the dense
forward runs again for the next ones. Finished layers wait in a work folder beside the destination
(`workspace.py`), so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import dejavu
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.predictor.calibration import Windows
from dejavu.predictor.cost import StepTimes, measured_times
from dejavu.predictor.layer import Task, learn
from dejavu.predictor.levels import HeldOut, Progress, find_levels
from dejavu.predictor.lookahead import best_distance
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.plan import BaseModel, LayerPolicy, Level, Plan, Source, key_name
from dejavu.predictor.recording import Recorded, record, room, source_key
from dejavu.predictor.report import Reporter
from dejavu.predictor.search import Candidate, Found, Place
from dejavu.predictor.survey import Survey, heads_pay, make_survey
from dejavu.predictor.training import TrainOptions
from dejavu.predictor.wide import widened
from dejavu.predictor.workspace import Workspace, fingerprint
from dejavu.predictor.worth import Neurons
from dejavu.sparsity.policy import Key, Site

FP16_BYTES = 2
_WORK_VERSION = "predictors-3"
_MANY_ACTIVE = 0.5  # share of neurons above which a warning says what to expect
_TRIAL_TOKENS = 8192


class Pipeline:
    """One run; `run` does it all and may be interrupted anywhere."""

    def __init__(
        self,
        loaded: LoadedModel,
        windows: Windows,
        target: Path,
        options: PrepareOptions,
        name: str,
        progress: Progress,
    ) -> None:
        self._stored = loaded.model.outline()
        self._wide = widened(loaded.model)
        self._config = loaded.model.config
        self._windows, self._target = windows, target
        self._options, self._progress = options, progress
        self._ops: Ops = TorchOps()
        self._base = BaseModel.of(loaded, name)
        self._work = Workspace(target, fingerprint(_WORK_VERSION, self._base, windows, options))

    def run(self) -> Plan:
        """The plan, saved."""
        held = self._record("recording held-out text", self._windows.held_out, self._all_keys())
        survey = self._survey(held)
        self._train(survey, held)
        del held
        plan = self._plan(survey)
        plan.save(self._target)
        self._work.remove()
        return plan

    def _all_keys(self) -> list[Key]:
        """Inputs that a survey and a comparison of look-ahead need."""
        sites = [Site.NEURONS]
        if self._options.heads or len(self._options.lookahead) > 1:
            sites.append(Site.HEADS)
        return [(site, layer) for layer in range(self._config.num_hidden_layers) for site in sites]

    def _record(self, stage: str, windows: Tensor, keys: Collection[Key]) -> Recorded:
        heads = {layer for site, layer in keys if site == Site.HEADS and self._options.heads}
        return record(self._wide, windows, keys, heads, self._ops, self._at(stage))

    def _at(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(stage, done, total)

    def _survey(self, held: Recorded) -> Survey:
        found = self._work.get("survey")
        if found is None:
            survey = make_survey(
                self._wide,
                self._stored,
                held,
                self._windows.held_out,
                max_loss=self._options.max_loss,
                heads=self._options.heads,
                ops=self._ops,
                tick=self._at("measuring sensitivity"),
            )
            self._work.put("survey", survey.to_json())
        else:
            survey = Survey.from_json(found)
        self._warn_if_dense(survey)
        return survey

    def _warn_if_dense(self, survey: Survey) -> None:
        active = [e.active for (site, _), e in survey.sites.items() if site == Site.NEURONS]
        share = sum(active) / len(active) / self._config.intermediate_size
        if share > _MANY_ACTIVE:
            warnings.warn(
                f"{share:.0%} of this model's neurons are active for a token (activation "
                f"{self._config.activation}): exact sparsity is about zero, predictors select by "
                "contribution, and the plan may well leave every layer dense",
                stacklevel=5,
            )

    def _tasks(self, survey: Survey) -> list[Task]:
        """What is to be learned, layer by layer; heads only where they could pay."""
        tasks = []
        for (site, layer), entry in sorted(survey.sites.items(), key=lambda item: item[0][::-1]):
            key, neurons = (site, layer), None
            if site == Site.NEURONS:
                neurons = Neurons.of(self._wide.weights.blocks[layer].mlp, self._wide.activation)
            elif not heads_pay(entry, self._predictor_bytes(self._ranks(key)[0]), survey.price):
                continue
            alike = self._options.kind == "paper"
            tasks.append(Task(key, entry, survey.price, neurons, alike))
        return tasks

    def _predictor_bytes(self, rank: int) -> int:
        """Of a predictor of heads, all included."""
        c, o = self._config, self._options
        weights = rank * (c.hidden_size + c.num_key_value_heads) * o.bits // 8
        return weights + 4 * rank + (8 if o.bits == 8 else 4) * c.num_key_value_heads

    def _ranks(self, key: Key, distance: float = 0.0) -> tuple[int, ...]:
        if key[0] == Site.NEURONS:
            return self._options.neuron_ranks(self._config, distance)
        return self._options.head_ranks(self._config)

    def _train(self, survey: Survey, held: Recorded) -> None:
        tasks = self._tasks(survey)
        todo = [task for task in tasks if self._work.load(task.key) is None]
        distances = self._distances(todo, held)
        done, training = len(tasks) - len(todo), self._training()
        for group in self._groups(todo, distances):
            needed = {key for task in group for key in _inputs(task, distances)}
            data = self._record("recording", self._windows.train, needed)
            for task in group:
                distance = distances[task.key]
                ranks = self._ranks(task.key, distance)
                one = self._options.predictor_share is None  # else a budget chooses among ranks
                found = learn(task, data, held, ranks, distance, training, self._ops, one=one)
                self._work.save(task.key, found, {"rows_trained": self._trained_rows})
                done += 1
                self._progress("training", done, len(tasks))

    @property
    def _trained_rows(self) -> int:
        return self._windows.train.shape[0] * self._windows.length

    def _training(self) -> TrainOptions:
        o = self._options
        return TrainOptions(o.epochs, o.batch, o.rate, o.seed, o.bits)

    def _groups(self, tasks: list[Task], distances: Mapping[Key, float]) -> Iterator[list[Task]]:
        """Neighbouring tasks whose recorded inputs fit into memory together, at least one."""
        size = self._trained_rows * self._config.hidden_size * FP16_BYTES
        start = 0
        while start < len(tasks):
            fits = max(1, int(room(self._stored.device, self._options.memory_gib) / size))
            group, keys = tasks[start : start + 1], _inputs(tasks[start], distances)
            for task in tasks[start + 1 :]:
                keys |= _inputs(task, distances)
                if len(keys) > fits:
                    break
                group.append(task)
            yield group
            start += len(group)

    def _distances(self, tasks: list[Task], held: Recorded) -> dict[Key, float]:
        """The look-ahead distance of each task: by a trial on little text, the cheapest."""
        if len(self._options.lookahead) == 1:
            return {task.key: 0.0 for task in tasks}
        trial = self._windows.train[: max(1, _TRIAL_TOKENS // self._windows.length)]
        data = None
        chosen = {}
        for done, task in enumerate(tasks, 1):
            found = self._work.get(_lookahead_name(task.key))
            if found is None:
                if data is None:
                    data = self._record("recording for look-ahead", trial, self._all_keys())
                found = best_distance(
                    task,
                    data,
                    held,
                    partial(self._ranks, task.key),
                    self._options.lookahead,
                    self._training(),
                    self._ops,
                )
                self._work.put(_lookahead_name(task.key), found)
            chosen[task.key] = float(found["distance"])
            self._progress("comparing look-ahead", done, len(tasks))
        return chosen

    def _plan(self, survey: Survey) -> Plan:
        places, notes = self._places(survey)
        text = HeldOut(self._wide, self._windows.held_out, self._ops, self._progress)
        measured = self._timed() if self._options.measure_cost else "not asked for"
        times = measured if isinstance(measured, StepTimes) else None
        levels, chosen = find_levels(self._stored, places, survey.price, text, self._options, times)
        reporter = Reporter(self._stored, places, chosen, text, times)
        summary = reporter.summary(levels[self._options.default_level][1].threshold, notes)
        summary["price_nats_per_byte"] = survey.price
        summary["cost"] = measured if times is None else asdict(times)
        return Plan(
            self._base,
            {name: self._level(loss, found, reporter) for name, (loss, found) in levels.items()},
            _used_predictors([found for _, found in levels.values()], chosen),
            calibration=self._calibration(),
            report=summary,
            default_level=self._options.default_level,
        )

    def _timed(self) -> StepTimes | str:
        return measured_times(self._stored, self._options.bits)

    def _level(self, loss: float, found: Found, reporter: Reporter) -> Level:
        def policies(site: Site) -> tuple[LayerPolicy, ...]:
            layers = range(self._config.num_hidden_layers)
            return tuple(found.policies.get((site, n), LayerPolicy()) for n in layers)

        return Level(loss, policies(Site.NEURONS), policies(Site.HEADS), reporter.level(found))

    def _places(self, survey: Survey) -> tuple[list[Place], dict[str, Any]]:
        c = self._config
        entries = {Site.NEURONS: c.intermediate_size, Site.HEADS: c.num_key_value_heads}
        places, notes = [], {}
        for (site, layer), entry in survey.sites.items():
            found, extra = self._work.load((site, layer)) or ([], {})
            places.append(
                Place(
                    (site, layer),
                    entries[site],
                    entry.active,
                    entry.row_bytes,
                    entry.down_bytes,
                    entry.sensitivity,
                    exact=site == Site.NEURONS and self._stored.activation.is_sparse,
                    candidates=tuple(found),
                )
            )
            lookahead = self._work.get(_lookahead_name((site, layer)))
            if lookahead is not None:
                extra["lookahead"] = lookahead["tried"]
            notes[key_name((site, layer))] = extra
        return places, notes

    def _calibration(self) -> dict[str, Any]:
        w = self._windows
        return {
            "dejavu": dejavu.__version__,
            "options": asdict(self._options),
            "window": w.length,
            "tokens_trained": self._trained_rows,
            "tokens_held_out": w.held_out.shape[0] * w.length,
            "sha256_of_tokens": w.fingerprint(),
        }


def _inputs(task: Task, distances: Mapping[Key, float]) -> set[Key]:
    """Whose inputs a task is trained on: what it predicts from, and the layer's own."""
    return {task.key, source_key(*task.key, distances[task.key])}


def _lookahead_name(key: Key) -> str:
    return f"lookahead.{key_name(key)}"


def _used_predictors(levels: Iterable[Found], chosen: Mapping[Key, Candidate]) -> dict[Key, Source]:
    used = {
        key
        for found in levels
        for key, policy in found.policies.items()
        if policy.kind == "predictor"
    }
    return {key: Source(chosen[key].predictor, chosen[key].distance) for key in sorted(used)}
