"""`--ray`: replicas of the app as a Ray Serve deployment, and the front before them.

Ray Serve starts replicas, as many as the open requests call for, asks each for its health and
replaces those that die (https://docs.ray.io/en/latest/serve/autoscaling-guide.html). Without an
address a cluster of this machine alone is started, on the loopback interface, and ended with the
server. Nothing is reported to anybody.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from dejavu.errors import DejavuError, InputError
from dejavu.serve.errors import ApiError
from dejavu.serve.front import Answering, Front
from dejavu.serve.guard import Guard
from dejavu.serve.metrics import Metrics
from dejavu.serve.replica import Replica, Told
from dejavu.serve.run import allow_many_connections, listen, serve_on
from dejavu.serve.settings import Settings

log = logging.getLogger("dejavu.serve")
APPLICATION = "dejavu"
_STORE = 100_000_000  # bytes of shared memory: messages are small and go another way
_HEALTH_SECONDS = 1.0


def run(settings: Settings, log_level: str) -> None:
    """As `dejavu.serve.run.run`, with replicas. Raises DejavuError where none comes up."""
    listener = listen(settings)
    try:
        allow_many_connections()
        with cluster(settings):
            try:
                metrics = Metrics([])
                front = Front(deploy(settings, log_level), metrics)
                serve_on(listener, Guard(front, settings, metrics), front, settings)
            finally:
                serve.delete(APPLICATION)
    finally:
        listener.close()


@contextmanager
def cluster(settings: Settings) -> Iterator[None]:
    """A connection to the cluster at `ray_address`, or one of our own that ends with the block.

    Raises InputError where this machine has fewer GPUs than there are to be replicas on one.
    """
    most = settings.max_replicas or settings.replicas
    if settings.ray_address is not None:
        ray.init(settings.ray_address, namespace=APPLICATION)
    else:
        ray.init(
            address="local",
            namespace=APPLICATION,
            # More replicas than cores are slow, but they are what was asked for.
            num_cpus=max(os.cpu_count() or 1, most * (settings.threads or 1)),
            object_store_memory=_STORE,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
        )
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if settings.ray_address is None and settings.on_gpu and gpus < most:
            raise InputError(
                f"--device cuda: {most} replicas need a GPU each, and this machine has {gpus}; "
                "lower --replicas and --max-replicas, or leave out --device"
            )
        yield
    finally:
        ray.shutdown()


def deploy(settings: Settings, log_level: str) -> ServeReplicas:
    """Start the replicas and wait until they are up."""
    most = settings.max_replicas or settings.replicas
    threads = replica_threads(settings)
    # The front asks for the key; who need not know it does not.
    settings = settings.model_copy(update={"threads": threads, "api_key": None})
    room = settings.max_batch + settings.max_queue
    deployment = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options=settings.needs(threads),
        max_ongoing_requests=room,
        max_queued_requests=room * most,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.grace,
        autoscaling_config={
            "min_replicas": settings.replicas,
            "initial_replicas": settings.replicas,
            "max_replicas": most,
            "target_ongoing_requests": settings.target_ongoing or settings.max_batch,
            "upscale_delay_s": 5.0,
            "downscale_delay_s": 60.0,
            "look_back_period_s": 5.0,
            "metrics_interval_s": 1.0,
        },
    )
    serve.start(proxy_location="Disabled")
    try:
        bound = deployment.bind(settings, log_level)
        handle = serve.run(bound, name=APPLICATION, route_prefix=None)
    except (RuntimeError, RayError) as error:
        raise DejavuError(f"no replica came up: {error}") from error
    return ServeReplicas(handle)


def replica_threads(settings: Settings) -> int:
    """Of each replica, which reserves as many cores; default: all cores, shared out."""
    most = settings.max_replicas or settings.replicas
    return settings.threads or max(1, int(ray.cluster_resources()["CPU"]) // most)


class ServeReplicas:
    """`front.Replicas` by way of a deployment's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._answer = handle.options(method_name="answer", stream=True)

    def ask(self, scope: dict[str, Any], body: bytes) -> Answering:
        answering: Answering = self._answer.remote(scope, body)
        return answering

    async def told(self, seconds: float) -> list[Told]:
        found = await self._handle.broadcast("told").results_async(
            timeout_s=seconds, return_exceptions=True
        )
        return [one for one in found if isinstance(one, Told)]

    def error_of(self, error: Exception) -> ApiError:
        if isinstance(error, BackPressureError):
            return ApiError(
                "all replicas are busy and the queue is full; try again",
                429,
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        if isinstance(error, RayActorError | RayServeException):
            return ApiError(
                "the replica that worked on this answer was lost; ask again",
                503,
                code="replica_lost",
                headers={"Retry-After": "1"},
            )
        log.error("a replica failed", exc_info=error)
        known = isinstance(error, RayTaskError)
        return ApiError(
            "something went wrong in " + ("a replica" if known else "Ray") + "; see the log", 500
        )
