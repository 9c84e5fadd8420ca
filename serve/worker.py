"""The thread that owns the engine, and a job as the event loop sees it.

Commands go in through one queue and events come out through each job's own function, so the engine is touched
by this thread alone. The thread waits in `get` when it has nothing to run: no polling, no delay.
"""

import asyncio
import contextlib
import enum
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from mimo_jax.engine.engine import Engine
from mimo_jax.engine.request import Request
from serve.errors import EngineFailed, ServerStopping
from serve.jobs import Delta, Job, abort_all, make_delta, queue_job

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Queued:
    """The engine has accepted the job. Deltas follow."""


@dataclass(frozen=True)
class Ended:
    """Exactly one ends a job. `error` is None when all its sequences have finished."""

    error: Exception | None = None


Event = Queued | Delta | Ended
Sink = Callable[[Event], None]


class JobAborted(Exception):
    """Nobody waits for the job any more."""


@dataclass(frozen=True)
class _Submit:
    job: Job
    sink: Sink


@dataclass(frozen=True)
class _Abort:
    job_id: str


@dataclass(frozen=True)
class _Stop:
    pass


@dataclass
class _Running:
    """A job whose sequences are in the engine."""

    job: Job
    sink: Sink
    requests: list[Request]
    unfinished: int


class WorkerState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineWorker:
    """Loads the engine and runs jobs on it until it is stopped. All methods are safe from any thread."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._commands: queue.SimpleQueue[_Submit | _Abort | _Stop] = queue.SimpleQueue()
        self._jobs: dict[str, _Running] = {}
        self._places: dict[str, tuple[str, int]] = {}  # request id -> (job id, index of the sequence)
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self.state = WorkerState.LOADING
        self.error: BaseException | None = None  # why it failed

    @property
    def engine(self) -> Engine:
        """The engine, once ready; only its constants (tokenizer, limits) may be read from other threads."""
        assert self._engine is not None
        return self._engine

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begins to load; `on_failure` is called on the worker's thread if that or the loop behind it fails."""
        # A daemon, because a compilation cannot be interrupted: the process must be able to end meanwhile.
        self._thread = threading.Thread(target=self._run, args=(on_failure,), name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends all jobs and the thread; whether it ended within the time."""
        self._commands.put(_Stop())
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def submit(self, job: Job, sink: Sink) -> None:
        """Runs a job. `sink` is called on the worker's thread and must not block."""
        self._commands.put(_Submit(job, sink))
        if self.state in (WorkerState.FAILED, WorkerState.STOPPED):
            self._refuse_waiting()

    def abort(self, job_id: str) -> None:
        """Ends a job with JobAborted; one that has ended is ignored."""
        self._commands.put(_Abort(job_id))

    def _run(self, on_failure: Callable[[], None]) -> None:
        try:
            self._engine = self._load()
        except BaseException as error:
            self.error, self.state = error, WorkerState.FAILED
            on_failure()
            return
        self.state = WorkerState.READY
        try:
            while self._obey(self._engine):
                if self._engine.unfinished:
                    self._step(self._engine)
            self.state = WorkerState.STOPPED
        except BaseException as error:  # a thread that dies silently would leave every client waiting
            log.exception("the engine thread failed; the server ends")
            self.error, self.state = error, WorkerState.FAILED
            self._end_all(self._engine, EngineFailed())
            on_failure()
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Ends the jobs that came too late to be taken."""
        with contextlib.suppress(queue.Empty):
            while True:
                match self._commands.get_nowait():
                    case _Submit(_, sink):
                        sink(Ended(ServerStopping()))

    def _obey(self, engine: Engine) -> bool:
        """Takes all commands there are, waiting for one if the engine is idle. False when told to stop."""
        wait = not engine.unfinished
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            match command:
                case _Submit(job, sink):
                    self._begin(engine, job, sink)
                case _Abort(job_id):
                    self._end(engine, job_id, JobAborted())
                case _Stop():
                    self._end_all(engine, ServerStopping())
                    return False

    def _begin(self, engine: Engine, job: Job, sink: Sink) -> None:
        try:
            requests = queue_job(engine, job)
        except Exception as error:  # whatever is wrong with one job ends that job alone
            sink(Ended(error))
            return
        self._jobs[job.job_id] = _Running(job, sink, requests, len(requests))
        self._places |= {request.request_id: (job.job_id, index) for index, request in enumerate(requests)}
        sink(Queued())

    def _step(self, engine: Engine) -> None:
        try:
            updates = engine.step()
        except Exception:
            log.exception("a step failed; its %d requests are lost, the engine starts over", len(self._places))
            self._end_all(engine, EngineFailed())
            return
        for update in updates:
            job_id, index = self._places[update.request.request_id]
            running = self._jobs[job_id]
            running.sink(make_delta(update, index))
            running.unfinished -= update.finished
            if not running.unfinished:
                self._end(engine, job_id, None)

    def _end_all(self, engine: Engine, error: Exception) -> None:
        for job_id in list(self._jobs):
            self._end(engine, job_id, error)

    def _end(self, engine: Engine, job_id: str, error: Exception | None) -> None:
        """The one way a job that was queued ends."""
        running = self._jobs.pop(job_id, None)
        if running is None:
            return
        abort_all(engine, running.requests)  # finished ones are ignored
        for request in running.requests:
            del self._places[request.request_id]
        running.sink(Ended(error))


class Generation:
    """One job seen from the event loop: `begin`, iterate, `close`."""

    def __init__(self, worker: EngineWorker, job: Job) -> None:
        self._worker = worker
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False

    async def begin(self) -> None:
        """Submits the job. Raises what the engine has against it; then nothing was queued."""
        self._worker.submit(self._job, self._deliver)
        await self._next()

    async def deltas(self) -> AsyncIterator[Delta]:
        """All deltas, each sequence's in order. Raises what ended the job early."""
        while isinstance(event := await self._next(), Delta):
            yield event

    def close(self) -> None:
        """Aborts the job unless it has ended. Needed on every way out."""
        if not self._ended:
            self._worker.abort(self._job.job_id)

    async def _next(self) -> Event:
        event = await self._events.get()
        if isinstance(event, Ended):
            self._ended = True
            if event.error is not None:
                raise event.error
        return event

    def _deliver(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            log.debug("an event came after the end of the event loop")
