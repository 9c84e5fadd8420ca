"""How the tests talk to a server: a real one on 127.0.0.1, and its events decoded."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn

from serve.app import create_app
from serve.worker import EngineWorker, WorkerState

MODEL_NAME = "tiny"
Json = dict[str, Any]


class Server:
    """A running server, its worker in reach so that a test can look at the engine while it is idle."""

    def __init__(self, worker: EngineWorker, port: int) -> None:
        self.worker = worker
        self.port = port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def wait_ready(self) -> None:
        wait_for(lambda: self.worker.state is not WorkerState.LOADING, 60)
        assert self.worker.error is None, self.worker.error

    def wait_idle(self) -> None:
        """Waits until nothing runs, then checks that every page is free."""
        engine = self.worker.engine
        wait_for(lambda: engine.unfinished == 0, 10)
        engine.scheduler.check()
        for pool in (engine.scheduler.full, engine.scheduler.window):
            assert (pool.in_use, pool.reserved, pool.free) == (0, 0, pool.total)

    def post(self, path: str, **body: Any) -> Json:
        """The answer to a good request."""
        response = self.http.post(path, json={"model": MODEL_NAME} | body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def complete(self, **body: Any) -> Json:
        return self.post("/v1/completions", **body)

    def chat(self, **body: Any) -> Json:
        return self.post("/v1/chat/completions", **body)

    def stream(self, path: str, **body: Any) -> list[Json]:
        """All events but the last, which has to be [DONE]."""
        with self.http.stream("POST", path, json={"model": MODEL_NAME, "stream": True} | body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            *events, done, rest = response.read().split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        return [decode_event(event) for event in events]


def decode_event(event: bytes) -> Json:
    assert event.startswith(b"data: ")
    assert b"\n" not in event
    return json.loads(event.removeprefix(b"data: "))  # type: ignore[no-any-return]


@contextlib.contextmanager
def running(worker: EngineWorker) -> Iterator[Server]:
    """Starts a worker and a server for it; both have ended afterwards."""
    app = create_app(worker, served_model_name=MODEL_NAME)
    http = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off"))
    listening = http.config.bind_socket()
    thread = threading.Thread(target=http.run, args=([listening],), name="http")
    worker.start()
    thread.start()
    server = Server(worker, listening.getsockname()[1])
    try:
        wait_for(lambda: http.started, 10)
        yield server
    finally:
        server.http.close()
        http.should_exit = True
        thread.join(20)
        assert worker.stop(20)
        assert not thread.is_alive()


def wait_for(condition: Any, seconds: float) -> None:
    """Raises AssertionError if `condition()` does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.002)


def joined(events: list[Json], index: int = 0, *, field: str = "text") -> str:
    """The text of one streamed choice."""
    pieces = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    if field == "text":
        return "".join(piece["text"] for piece in pieces)
    return "".join(piece["delta"].get("content", "") for piece in pieces)


def endings(events: list[Json]) -> list[tuple[int, str]]:
    """(index, finish reason) in the order they came."""
    choices = [choice for event in events for choice in event["choices"]]
    return [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
