"""`dejavu batch --ray`: lines answered by actors that Ray Data feeds.

Each actor holds the models. One that dies is started again and gets its lines again
(https://docs.ray.io/en/latest/data/transforming-data.html). Answers come back a block of lines at a
time and are kept as they come, in the same file as without Ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from dejavu.errors import DejavuError
from dejavu.serve.batch import Record, answer_line, batch_hub, open_lines
from dejavu.serve.batch_files import Line
from dejavu.serve.cluster import cluster, replica_threads
from dejavu.serve.settings import Settings

# Behind `cluster`, which sets what Ray reads when it is imported.
import ray  # isort: skip
from ray.data import DataContext  # isort: skip
from ray.exceptions import RayError  # isort: skip


def answer_on_cluster(settings: Settings, left: Iterable[Line], record: Record) -> None:
    """By `replicas` to `max_replicas` actors. The lines are held in memory.

    Raises DejavuError where the actors cannot work.
    """
    lines = {line.number: line for line in left}
    block = open_lines(settings)  # an actor starts a whole block at once
    with cluster(settings):
        threads = replica_threads(settings)
        settings = settings.model_copy(update={"threads": threads})
        DataContext.get_current().enable_progress_bars = False
        asked = ray.data.from_items(
            [
                {"number": n, "content": line.content or b"", "whole": line.content is not None}
                for n, line in lines.items()
            ],
            override_num_blocks=-(-len(lines) // block),
        )
        answers = asked.map_batches(
            Answerer,
            fn_constructor_args=(settings,),
            batch_size=None,
            **settings.needs(threads),
            concurrency=(settings.replicas, settings.max_replicas or settings.replicas),
        )
        try:
            for row in answers.iter_rows():
                record(lines[row["number"]], json.loads(row["answer"]))
        except RayError as error:
            raise DejavuError(f"the actors of the batch failed: {error}") from error


class Answerer:
    """An actor of the batch: called with blocks of lines, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._hub = batch_hub(settings)
        self._loop = asyncio.new_event_loop()
        self._hub.worker.start(self._loop)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """Columns number, content, whole to columns number, answer (JSON)."""
        return self._loop.run_until_complete(self._answer(block))

    async def _answer(self, block: dict[str, Any]) -> dict[str, Any]:
        found = await asyncio.gather(
            *(
                answer_line(self._hub, Line(int(number), content if whole else None, ""))
                for number, content, whole in zip(
                    block["number"], block["content"], block["whole"], strict=True
                )
            )
        )
        return {"number": block["number"], "answer": [json.dumps(one) for one in found]}
