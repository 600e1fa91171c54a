"""The engine's thread outlives whatever goes wrong in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from dejavu.engine.output import Chunk
from dejavu.engine.params import SamplingParams
from dejavu.errors import DejavuError
from dejavu.serve.errors import ApiError
from dejavu.serve.mailbox import Mailbox
from dejavu.serve.models import DENSE, ServedModel
from dejavu.serve.worker import Event, Job, Worker
from dejavu.sparsity.policy import Dense
from engine.stub import ScriptedLM, loaded, scripted

from .scene import run


class Letters:
    """A codec of one letter a token."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def serve(script: Any, **options: Any) -> tuple[ServedModel, ScriptedLM]:
    engine, model = scripted(script, arms={DENSE: Dense()}, **options)
    served = ServedModel("stub", loaded(model), cast(Any, Letters()), engine, DENSE, None)
    return served, model


def jobs(served: ServedModel, prompts: Sequence[int], tokens: int = 4) -> list[Job]:
    mail: Mailbox[tuple[int, Event]] = Mailbox()
    params = SamplingParams(max_tokens=tokens)
    return [
        Job(served, [prompt], params, DENSE, "", False, i, mail) for i, prompt in enumerate(prompts)
    ]


async def outcome(wanted: list[Job]) -> dict[int, str | DejavuError]:
    """Text or error of each job."""
    texts = dict.fromkeys(range(len(wanted)), "")
    ended: dict[int, str | DejavuError] = {}
    while len(ended) < len(wanted):
        for index, event in await asyncio.wait_for(wanted[0].mail.take(), 30):
            if isinstance(event, Chunk):
                texts[index] += event.text
                if event.completion is not None:
                    ended[index] = texts[index]
            else:
                ended[index] = event
    return ended


def test_logits_that_are_not_finite_end_one_answer_alone() -> None:
    served, _ = serve(lambda ids: [1, None] if ids[0] == 9 else [1, 2, 3, 4])

    async def scene(worker: Worker) -> Any:
        wanted = jobs(served, [5, 9, 6])
        worker.submit(wanted)
        return await outcome(wanted)

    found = run(served, scene)
    assert (found[0], found[2]) == ("bcde", "bcde")
    assert "not finite" in str(found[1])


def test_a_model_that_fails_ends_its_answers_and_serves_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served, model = serve(lambda ids: [1, 2, 3, 4])

    async def scene(worker: Worker) -> Any:
        def fail() -> None:
            if model.rows:
                raise MemoryError("out of memory")

        model.before = fail
        first = jobs(served, [5, 6])
        worker.submit(first)
        failed = await outcome(first)
        model.before = lambda: None
        second = jobs(served, [7])
        worker.submit(second)
        return failed, await outcome(second), worker.open_jobs

    with caplog.at_level("ERROR", "dejavu.serve"):
        failed, then, left = run(served, scene)
    assert all(isinstance(error, DejavuError) for error in failed.values())
    assert "out of memory" not in str(failed[0]), "what went wrong stands in the log"
    assert [record.message for record in caplog.records] == ["a step failed"], "once for all rows"
    assert "MemoryError: out of memory" in caplog.text
    assert (then, left) == ({0: "bcde"}, 0)
    assert served.engine.free_blocks == served.engine.cache_blocks


def test_a_gpu_that_is_lost_takes_no_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    served, model = serve(lambda ids: [1, 2, 3, 4])
    monkeypatch.setattr("dejavu.serve.worker.lost", lambda device: True)

    async def scene(worker: Worker) -> Any:
        def fail() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        before = worker.alive
        model.before = fail
        wanted = jobs(served, [5])
        worker.submit(wanted)
        found = await outcome(wanted)
        with pytest.raises(ApiError, match="has to be started again") as refused:
            worker.submit(jobs(served, [6]))
        return before, found[0], refused.value.status, worker.alive, worker.open_jobs

    before, found, status, alive, left = run(served, scene)
    assert isinstance(found, DejavuError)
    assert (before, alive, status, left) == (True, False, 503, 0)


def test_cancelled_jobs_free_their_rows_before_the_next_step() -> None:
    served, model = serve(lambda ids: [1] * 60, max_batch=1)

    async def scene(worker: Worker) -> Any:
        wanted = jobs(served, [5, 6, 7], tokens=50)
        worker.submit(wanted)
        await wanted[0].mail.take()
        worker.cancel(wanted)
        worker.cancel(wanted)
        while worker.open_jobs:
            await asyncio.sleep(0.001)
        after = len(model.rows)
        last = jobs(served, [8], tokens=2)
        worker.submit(last)
        await outcome(last)
        return after

    assert run(served, scene) < 49, "it did not run to its end"
    assert served.engine.free_blocks == served.engine.cache_blocks


def test_tokens_of_a_fast_stream_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are told at once, the rest together: by the time, the end, or a new prompt."""
    monkeypatch.setattr("dejavu.serve.worker._HOLD", 60.0)
    served, model = serve(lambda ids: [1] * 60)
    model.before = lambda: time.sleep(0.002)

    async def pieces(job: Job) -> list[list[Chunk]]:
        found: list[list[Chunk]] = []
        while not found or found[-1][-1].completion is None:
            found.append([cast(Chunk, event) for _, event in await job.mail.take()])
        return found

    async def scene(worker: Worker) -> Any:
        (alone,) = jobs(served, [5], tokens=40)
        worker.submit([alone])
        first = await pieces(alone)
        (stream,), (other,) = jobs(served, [6], tokens=60), jobs(served, [7], tokens=2)
        worker.submit([stream])
        begun = await stream.mail.take()
        worker.submit([other])
        await pieces(other)
        return first, begun, await pieces(stream)

    first, begun, rest = run(served, scene)
    assert [len(piece) for piece in first] == [2, 38], "a step brings the first two"
    assert len(begun) + sum(map(len, rest)) == 60
    assert len(rest) >= 2, "what was held went out before the other's prompt"


def test_what_is_held_goes_out_before_the_prompt_of_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dejavu.serve.worker._HOLD", 60.0)
    (first, steps), (second, _) = serve(lambda ids: [1] * 60), serve(lambda ids: [1] * 60)
    steps.before = lambda: time.sleep(0.002)

    async def scene(worker: Worker) -> int:
        (stream,), (other,) = jobs(first, [5], tokens=60), jobs(second, [6], tokens=2)
        worker.submit([stream])
        told = len(await stream.mail.take())
        worker.submit([other])
        await outcome([other])
        return told + len(await asyncio.wait_for(stream.mail.take(), 30))

    assert 2 < run([first, second], scene) < 60


def test_what_is_held_does_not_wait_for_a_slow_step_of_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (fast, _), (slow, steps) = serve(lambda ids: [1] * 60), serve(lambda ids: [1] * 60)
    now = 0.0
    monkeypatch.setattr("dejavu.serve.worker.monotonic", lambda: now)
    waiting: list[int] = []

    async def scene(worker: Worker) -> None:
        def take_long() -> None:
            nonlocal now
            now += 1.0
            waiting.append(sum(job.served is fast for job in worker._held))

        steps.before = take_long
        (stream,), (other,) = jobs(fast, [5], tokens=60), jobs(slow, [6], tokens=20)
        worker.submit([stream, other])
        await outcome([other])

    run([fast, slow], scene)
    assert len(waiting) == 20
    assert sum(waiting[2:]) == 0, "from when it is known how long its steps take"


def test_the_first_and_last_tokens_of_one_stream_do_not_wake_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dejavu.serve.worker._HOLD", 60.0)
    served, _ = serve(lambda ids: [1] * 60)

    async def scene(worker: Worker) -> Any:
        long, short = jobs(served, [5, 6], tokens=60)
        short.mail = Mailbox()
        short.params = SamplingParams(max_tokens=30)
        worker.submit([long, short])
        await long.mail.take()
        while not (await short.mail.take())[-1][1].completion:
            pass
        return await long.mail.take()

    told = run(served, scene)
    assert len(told) == 58, "all that followed the first two came in one piece, at its end"
