"""The worker without HTTP: events as they leave its thread."""

import asyncio
import threading
from typing import Any

import pytest

from mimo_jax.engine.request import FinishReason
from mimo_jax.errors import CheckpointError, RequestError
from mimo_jax.sampling_params import SamplingParams
from serve.app import create_app
from serve.errors import EngineFailed, ServerStopping
from serve.jobs import Choice, Delta, Job, Prompt
from serve.worker import Ended, EngineWorker, Event, Generation, JobAborted, Queued, WorkerState
from tests.serve.client import MODEL_NAME, Server, running, wait_for


class Record:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Ended):
            self.ended.set()

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    def end(self) -> Ended:
        """The one terminal event, which is the last."""
        assert self.ended.wait(20)
        ends = [event for event in self.events if isinstance(event, Ended)]
        assert ends == [self.events[-1]]
        return ends[0]


def job(name: str, *prompts: list[int], **params: Any) -> Job:
    return Job(name, tuple(Prompt(ids, SamplingParams(**params)) for ids in prompts))


def test_a_job_is_queued_then_runs_then_ends_once(server: Server) -> None:
    record = Record()
    server.worker.submit(job("once", [1, 2], [3], n=2, max_tokens=7, ignore_eos=True), record)
    assert record.end().error is None
    server.worker.abort("once")  # too late, and ignored
    server.wait_idle()
    record.end()
    assert record.events[0] == Queued()
    choices = [Choice(index) for index in range(4)]
    for delta in record.deltas:
        choices[delta.index].add(delta)
    assert [len(choice.token_ids) for choice in choices] == [7] * 4
    assert {choice.finish_reason for choice in choices} == {FinishReason.LENGTH}


def test_one_bad_prompt_refuses_the_whole_job_and_queues_nothing(server: Server) -> None:
    record = Record()
    server.worker.submit(job("bad", [1, 2], [999], n=2), record)
    assert isinstance(record.end().error, RequestError)
    assert record.events == [record.end()]


def test_abort_ends_all_sequences_of_a_job_with_one_event(server: Server) -> None:
    record = Record()
    server.worker.submit(job("gone", [1, 2], [3], n=3, max_tokens=120, ignore_eos=True), record)
    wait_for(lambda: record.deltas, 10)
    server.worker.abort("gone")
    server.worker.abort("gone")
    assert isinstance(record.end().error, JobAborted)
    assert all(delta.finish_reason is None for delta in record.deltas)


def test_two_jobs_of_one_name_do_not_mix(server: Server) -> None:
    first, second = Record(), Record()
    server.worker.submit(job("twin", [1], max_tokens=50, ignore_eos=True), first)
    server.worker.submit(job("twin", [1]), second)
    assert isinstance(second.end().error, RequestError)
    assert first.end().error is None
    assert len(first.deltas) == 50


def test_a_failing_step_ends_every_job_and_the_worker_lives_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    records = [Record() for _ in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr(server.worker.engine.steps, "run", fails)
        for place, record in enumerate(records):
            server.worker.submit(job(f"fails-{place}", [1, 2], n=2), record)
        assert all(isinstance(record.end().error, EngineFailed) for record in records)
    record = Record()
    server.worker.submit(job("after", [1, 2], max_tokens=5, ignore_eos=True), record)
    assert record.end().error is None
    assert server.worker.state is WorkerState.READY


def test_a_generation_that_was_closed_early_is_aborted(server: Server) -> None:
    async def leave_after_two() -> int:
        generation = Generation(server.worker, job("left", [1, 2], max_tokens=120, ignore_eos=True))
        await generation.begin()
        seen = 0
        async for _ in generation.deltas():
            seen += 1
            if seen == 2:
                break
        generation.close()
        return seen

    assert asyncio.run(leave_after_two()) == 2  # the loop ends before the worker has heard of it


def test_until_the_model_is_loaded_everything_but_health_is_503_and_then_not(server: Server) -> None:
    loaded = threading.Event()

    def load() -> Any:
        assert loaded.wait(20)
        return server.worker.engine

    with running(EngineWorker(load)) as loading:
        health = loading.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            response = loading.http.request(method, path, json={"model": MODEL_NAME, "prompt": "abc"})
            assert response.status_code == 503
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        loaded.set()
        wait_for(lambda: loading.http.get("/health").status_code == 200, 10)
        loading.complete(prompt="abc")


def test_a_model_that_cannot_load_is_reported_and_never_ready() -> None:
    def load() -> Any:
        raise CheckpointError("model.safetensors: is missing")

    failed = threading.Event()
    worker = EngineWorker(load)
    create_app(worker, served_model_name=MODEL_NAME)
    worker.start(on_failure=failed.set)
    assert failed.wait(10)
    assert worker.state is WorkerState.FAILED
    assert str(worker.error) == "model.safetensors: is missing"
    assert worker.stop(10)


def test_stopping_ends_jobs_that_run(server: Server) -> None:
    worker = EngineWorker(lambda: server.worker.engine)
    worker.start()
    record = Record()
    worker.submit(job("stopped", [1, 2], max_tokens=120, ignore_eos=True), record)
    wait_for(lambda: record.deltas, 10)
    assert worker.stop(10)
    assert isinstance(record.end().error, ServerStopping)
    assert worker.state is WorkerState.STOPPED


class _BrokenEngine:
    """Stands in for an engine whose host side has a fault outside a step."""

    @property
    def unfinished(self) -> int:
        raise ZeroDivisionError("a fault in the loop")


def test_a_loop_that_fails_is_said_and_leaves_nobody_waiting() -> None:
    told = threading.Event()
    worker = EngineWorker(lambda: _BrokenEngine())  # type: ignore[arg-type, return-value]
    worker.start(on_failure=told.set)
    assert told.wait(20)
    wait_for(lambda: worker.stop(1), 5)
    assert worker.state is WorkerState.FAILED
    assert isinstance(worker.error, ZeroDivisionError)
    late = Record()
    worker.submit(job("late", [1]), late)
    assert isinstance(late.end().error, ServerStopping)
