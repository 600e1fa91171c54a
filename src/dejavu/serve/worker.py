"""The thread that runs the engines, and the event loop's way to it.

All engines share the one thread, a step each in turn, so that they do not fight for the cores. The
event loop hands over jobs and takes events; it never touches an engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from dejavu.engine.generation import Generation
from dejavu.engine.output import Chunk
from dejavu.engine.params import SamplingParams
from dejavu.engine.scheduler import Request
from dejavu.errors import DejavuError
from dejavu.kernels.device import lost
from dejavu.serve.errors import ApiError
from dejavu.serve.mailbox import Mailbox
from dejavu.serve.metrics import Metrics
from dejavu.serve.models import ServedModel

log = logging.getLogger("dejavu.serve")
Event = Chunk | DejavuError

# Seconds for which a token may wait for the next ones: a picture on a screen, or two where several
# streams run. To wake the event loop up costs it 0.2 ms and 0.1 for each stream, and takes a core
# from the step that runs.
_HOLD, _HOLD_MANY = 16e-3, 33e-3
_MANY = 4  # streams above which that is so


@dataclass(eq=False)
class Job:
    """One answer on its way. mail: of (index, event), read on the event loop; the last event is
    a chunk with a completion, or an error.

    submitted, started, latest: `monotonic` times, of the engine's first work on it and of its
    latest token.
    """

    served: ServedModel
    prompt: list[int]
    params: SamplingParams
    arm: str
    client: str
    watched: bool
    index: int
    mail: Mailbox[tuple[int, Event]]
    submitted: float = field(default_factory=monotonic)
    started: float | None = None
    latest: float | None = None
    ended: bool = False


class Worker:
    """Runs jobs. `submit` and `cancel` are called on the event loop."""

    def __init__(self, served: Sequence[ServedModel], metrics: Metrics, *, max_queue: int) -> None:
        self._served = list(served)
        self._metrics = metrics
        self._max_queue = max_queue
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._open: dict[ServedModel, int] = dict.fromkeys(served, 0)  # jobs not at their end
        self._running: dict[ServedModel, dict[Request, tuple[Job, Generation]]] = {
            one: {} for one in served
        }
        self._seconds = 1.0  # that a job holds its row, a running mean
        self._held: dict[Job, list[Event]] = {}  # not delivered yet
        self._delivered = 0.0  # when that was last done for all
        self._took = dict.fromkeys(served, 0.0)  # seconds of each model's latest step
        self._closing = False
        self._stopped = False
        self._lost = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events go to that loop."""
        self._loop = loop
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether new jobs are refused."""
        return self._closing

    @property
    def alive(self) -> bool:
        """Whether answers can be made: the thread runs, and the GPU, if there is one, answers."""
        return self._thread.is_alive() and not self._lost

    @property
    def open_jobs(self) -> int:
        """Jobs that have not ended."""
        return sum(self._open.values())

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over the jobs of one request. Raises ApiError: 503 when closing or when the GPU is
        lost, 429 when full."""
        served = jobs[0].served
        limit = served.engine.max_batch + self._max_queue
        with self._wake:
            if self._closing:
                raise ApiError("the server is stopping", 503)
            if self._lost:
                raise ApiError("the GPU has failed; the server has to be started again", 503)
            if len(jobs) > limit:
                raise ApiError(f"{len(jobs)} answers at once; at most {limit} fit in the queue")
            if self._open[served] + len(jobs) > limit:
                turns = -(-self._open[served] // served.engine.max_batch)
                wait = min(60, max(1, round(turns * self._seconds)))
                raise ApiError(
                    f"{self._open[served]} answers are running or waiting; try again in {wait} s",
                    429,
                    code="queue_full",
                    headers={"Retry-After": str(wait)},
                )
            self._open[served] += len(jobs)
            self._inbox += [partial(self._begin, job) for job in jobs]
            self._wake.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drop jobs, wherever they are, before the next step; harmless for those at their end."""
        with self._wake:
            self._inbox += [partial(self._drop, job) for job in jobs if not job.ended]
            self._wake.notify()

    def close(self) -> None:
        """Refuse new jobs; those that are open go on."""
        with self._wake:
            self._closing = True

    def fail_all(self, error: DejavuError) -> None:
        """End all open jobs with an error."""
        with self._wake:
            self._closing = True
            self._inbox.append(partial(self._fail_everything, error))
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        with self._wake:
            self._closing = self._stopped = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            if not self._busy():
                self._deliver()
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopped or self._busy())
                if self._stopped:
                    return
                inbox, self._inbox = self._inbox, []
            for action in inbox:
                action()
            for served in self._served:
                if served.engine.running or served.engine.waiting:
                    try:
                        self._step(served)
                    except Exception as error:  # whatever it is, the thread has to go on
                        self._fail(served, self._report(served, error))

    def _busy(self) -> bool:
        return any(s.engine.running or s.engine.waiting for s in self._served)

    def _begin(self, job: Job) -> None:
        if job.ended:
            return
        try:
            request = job.served.engine.add(
                job.prompt, job.params, arm=job.arm, client=job.client, watched=job.watched
            )
        except Exception as error:  # the checks passed before; the thread goes on in any case
            self._end(job)
            told = error if isinstance(error, DejavuError) else DejavuError(str(error))
            self._hold(job, told)
            self._deliver([job])
            return
        generation = Generation(job.served.engine, request, job.params, job.served.codec)
        self._running[job.served][request] = job, generation

    def _drop(self, job: Job) -> None:
        if job.ended:
            return
        for request, (other, _) in list(self._running[job.served].items()):
            if other is job:
                del self._running[job.served][request]
                job.served.engine.abort(request)
        self._end(job)
        self._metrics.dropped(job.served.name)

    def _step(self, served: ServedModel) -> None:
        engine, running = served.engine, self._running[served]
        if engine.reading or self._late_for_others(served):
            self._deliver()  # a piece of a prompt takes as long as many tokens
        began = monotonic()
        touched = engine.step()
        now = monotonic()
        self._took[served] = now - began
        reasons = {r.error for r in touched if r.error is not None and r.error.__cause__}
        told = {error: self._report(served, error.__cause__) for error in reasons}
        at_once: list[Job] = []
        for request in touched:
            if request not in running:
                continue
            job, generation = running[request]
            if job.started is None:
                job.started = job.submitted + request.waited
                self._metrics.started(job)
            for event in _events(generation):
                self._hold(job, told.get(event, event) if isinstance(event, DejavuError) else event)
                self._metrics.token(job, now)
                if job.latest is None:
                    at_once.append(job)
                job.latest = now
            if generation.completion is not None or request.error is not None:
                del running[request]
                engine.abort(request)  # a stop string: the engine cannot know
                self._end(job)
                self._seconds += 0.1 * (now - job.started - self._seconds)
                at_once.append(job)
        self._metrics.step(served, len(touched))
        if now - self._delivered > (_HOLD if len(touched) <= _MANY else _HOLD_MANY):
            self._deliver()
        elif at_once:
            self._deliver(at_once)

    def _late_for_others(self, served: ServedModel) -> bool:
        """Whether tokens of other models would wait too long for a step of this one."""
        return monotonic() - self._delivered + self._took[served] > _HOLD and any(
            job.served is not served for job in self._held
        )

    def _report(self, served: ServedModel, error: BaseException | None) -> DejavuError:
        """Log what went wrong in a step; what clients get to hear of it."""
        log.error("a step failed", exc_info=error, extra={"model": served.name})
        if not self._lost and lost(served.loaded.model.device):
            self._lost = True
            log.critical("the GPU has failed; start the server again")
        return DejavuError("the model failed while it wrote this; the server's log says why")

    def _fail(self, served: ServedModel, error: DejavuError) -> None:
        running = self._running[served]
        for request, (job, _) in running.items():
            self._hold(job, error)
            served.engine.abort(request)
            self._end(job)
        running.clear()
        self._deliver()

    def _fail_everything(self, error: DejavuError) -> None:
        for served in self._served:
            self._fail(served, error)

    def _end(self, job: Job) -> None:
        job.ended = True
        with self._wake:
            self._open[job.served] -= 1

    def _hold(self, job: Job, event: Event) -> None:
        self._held.setdefault(job, []).append(event)

    def _deliver(self, jobs: Sequence[Job] | None = None) -> None:
        """Put what is held, of some jobs or of all, into mailboxes on the event loop: one call for
        all of it."""
        if jobs is None:
            self._delivered = monotonic()
            told, self._held = self._held, {}
        else:
            told = {job: self._held.pop(job) for job in dict.fromkeys(jobs) if job in self._held}
        if not told:
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_put, told)
        except RuntimeError:  # the loop is closed: nobody is left to read
            log.debug("events after the end of the event loop")


def _put(told: Mapping[Job, Sequence[Event]]) -> None:
    for job, events in told.items():
        for event in events:
            job.mail.put((job.index, event))


def _events(generation: Generation) -> list[Event]:
    events: list[Event] = []
    while generation.ready and generation.completion is None:
        try:
            events.append(generation.next_chunk())
        except DejavuError as error:
            return [*events, error]
    return events
