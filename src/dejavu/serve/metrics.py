"""What Prometheus gets to see, in a registry of the server's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dejavu.sparsity.accounting import step_bytes
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Site

if TYPE_CHECKING:
    from dejavu.serve.models import ServedModel
    from dejavu.serve.worker import Job

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_ROWS = (1, 2, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class _OfModel:
    """What has a model's label, looked up once: the engine's thread counts every token."""

    first: Histogram
    between: Histogram
    queue: Histogram
    batch: Histogram
    prompt: Counter
    completion: Counter
    dropped: Counter


class Metrics:
    """Counts and times; labels are names of models, levels and routes only."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_Gauges(served))

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(
                f"dejavu_{name}", text, ["model"], registry=self.registry, buckets=buckets
            )

        def counter(name: str, text: str, labels: Sequence[str]) -> Counter:
            return Counter(f"dejavu_{name}", text, labels, registry=self.registry)

        self._models: dict[str, _OfModel] = {}
        self._first = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        )
        self._between = histogram(
            "time_between_tokens_seconds", "Between two tokens of one answer.", _SECONDS
        )
        self._queue = histogram("queue_seconds", "Waiting for a row and memory.", _SECONDS)
        self._batch = histogram("batch_size", "Answers that a step brought on.", _ROWS)
        self._tokens = counter("tokens", "Tokens of prompts and of answers.", ["model", "kind"])
        self._dropped = counter("dropped", "Answers whose client left before the end.", ["model"])
        self._responses = counter("responses", "HTTP responses.", ["route", "status"])

    def started(self, job: Job) -> None:
        """A job got its row."""
        assert job.started is not None
        model = self._of(job.served.name)
        model.queue.observe(job.started - job.submitted)
        model.prompt.inc(len(job.prompt))

    def token(self, job: Job, now: float) -> None:
        """A token of a job, beside the time of the one before, which the job still holds."""
        model = self._of(job.served.name)
        model.completion.inc()
        if job.latest is None:
            model.first.observe(now - job.submitted)
        else:
            model.between.observe(now - job.latest)

    def step(self, served: ServedModel, rows: int) -> None:
        """A step of a model's engine that brought so many answers on."""
        if rows:
            self._of(served.name).batch.observe(rows)

    def dropped(self, model: str) -> None:
        """A client left."""
        self._of(model).dropped.inc()

    def _of(self, name: str) -> _OfModel:
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = _OfModel(
                first=self._first.labels(name),
                between=self._between.labels(name),
                queue=self._queue.labels(name),
                batch=self._batch.labels(name),
                prompt=self._tokens.labels(name, "prompt"),
                completion=self._tokens.labels(name, "completion"),
                dropped=self._dropped.labels(name),
            )
        return found

    def response(self, route: str, status: int) -> None:
        """An HTTP response begins."""
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """In Prometheus's format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    """Values read off the engines when asked. Densities and bytes are means over the decode steps
    since the engine was last idle."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        """All gauges."""

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"dejavu_{name}", text, labels=["model", *labels])

        running = gauge("requests_running", "Answers that hold a row.")
        waiting = gauge("requests_waiting", "Answers that wait for a row or for memory.")
        blocks = gauge("cache_blocks", "Blocks of the key/value cache.", "state")
        density = gauge("density", "Share that a token used.", "level", "site")
        drift = gauge(
            "density_drift", "Density of neurons less that of the plan's calibration.", "level"
        )
        whole = gauge(
            "whole_layers", "Share of the MLPs computed whole, as cheaper than choosing.", "level"
        )
        read = gauge("step_bytes", "Weight bytes that a decode step read.", "level")
        for one in self._served:
            engine = one.engine
            running.add_metric([one.name], engine.running)
            waiting.add_metric([one.name], engine.waiting)
            blocks.add_metric([one.name, "free"], engine.free_blocks)
            blocks.add_metric([one.name, "used"], engine.cache_blocks - engine.free_blocks)
            for level, arm in engine.arms.items():
                selector, steps = arm.selector, arm.steps
                if steps == 0 or not isinstance(selector, MeteredSelector):
                    continue
                neurons, heads = densities(one, selector)
                density.add_metric([one.name, level, "neurons"], neurons)
                density.add_metric([one.name, level, "heads"], heads)
                whole.add_metric([one.name, level], selector.meter.whole_share())
                read.add_metric([one.name, level], bytes_read(one, selector, steps))
                if (calibrated := _calibrated(one, level)) is not None:
                    drift.add_metric([one.name, level], neurons - calibrated)
        yield from (running, waiting, blocks, density, drift, whole, read)
        yield from _device_memory({one.loaded.model.device for one in self._served})


def _device_memory(devices: Iterable[torch.device]) -> Iterable[Metric]:
    """Of GPUs: what this process holds, of that what tensors take, and what nobody holds."""
    memory = GaugeMetricFamily(
        "dejavu_device_memory_bytes", "Memory of a GPU.", labels=["device", "state"]
    )
    for device in devices:
        if device.type == "cuda":
            memory.add_metric([str(device), "held"], torch.cuda.memory_reserved(device))
            memory.add_metric([str(device), "used"], torch.cuda.memory_allocated(device))
            with suppress(RuntimeError):  # the GPU may have failed
                memory.add_metric([str(device), "free"], torch.cuda.mem_get_info(device)[0])
    if memory.samples:
        yield memory


def densities(served: ServedModel, selector: MeteredSelector) -> tuple[float, float]:
    """Of neurons and of heads: what a row used, mean over layers, rows and steps."""
    config = served.loaded.model.config
    heads = [
        used / config.num_key_value_heads if used else 1.0
        for used in selector.meter.used(Site.HEADS)
    ]
    return selector.meter.density(config.intermediate_size), sum(heads) / len(heads)


def bytes_read(served: ServedModel, selector: MeteredSelector, steps: int) -> float:
    """Weight bytes of a mean decode step, predictors included."""
    model = served.loaded.model
    return step_bytes(
        model.weights,
        selector.meter.reads(steps),
        groups=model.config.num_key_value_heads,
        predictor_bytes=selector.predictor_bytes,
    )


def _calibrated(served: ServedModel, level: str) -> float | None:
    if served.plan is None or level not in served.plan.levels:
        return None
    value = served.plan.levels[level].report.get("neuron_density")
    return value if isinstance(value, float) else None
