"""A worker in its own thread beside what a test does on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dejavu.serve.metrics import Metrics
from dejavu.serve.models import ServedModel
from dejavu.serve.worker import Worker


def run(served: ServedModel | Sequence[ServedModel], scene: Callable[[Worker], Any]) -> Any:
    """What a scene returns, a coroutine beside a worker; the models were loaded in this thread."""
    models = [served] if isinstance(served, ServedModel) else list(served)

    async def inside() -> Any:
        worker = Worker(models, Metrics(models), max_queue=100)
        worker.start(asyncio.get_running_loop())
        try:
            return await scene(worker)
        finally:
            worker.stop()

    return asyncio.run(inside())
