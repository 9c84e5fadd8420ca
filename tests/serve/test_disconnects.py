"""A client that leaves, in any phase, costs a few more steps and nothing else."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mimo_jax.engine.engine import Engine, Update
from tests.serve.client import MODEL_NAME, Json, Server, wait_for

_STEP_S = 0.02
_STEPS_LATER = 15  # an abort takes one; the rest is what a busy machine lets pass until the server hears of it
LONG: Json = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}


@dataclass
class SlowSteps:
    """Makes every step take at least a while, and counts them."""

    engine: Engine
    count: int = 0

    def step(self) -> list[Update]:
        self.count += 1
        time.sleep(_STEP_S)
        return type(self.engine).step(self.engine)

    @property
    def requests(self) -> list[Any]:
        return [*self.engine.scheduler.running, *self.engine.scheduler.waiting]


@pytest.fixture
def slow(server: Server, monkeypatch: pytest.MonkeyPatch) -> SlowSteps:
    steps = SlowSteps(server.worker.engine)
    monkeypatch.setattr(server.worker.engine, "step", steps.step)
    return steps


@contextlib.contextmanager
def connected(server: Server, **body: Any) -> Iterator[socket.socket]:
    """A raw connection that has sent a request for a completion."""
    content = json.dumps({"model": MODEL_NAME} | LONG | body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def prefilling(slow: SlowSteps) -> bool:
    return any(0 < request.computed < len(request.prompt) for request in slow.requests)


def decoding(slow: SlowSteps) -> bool:
    return any(len(request.output) >= 3 for request in slow.requests)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("phase", "prompt"), [(prefilling, "p" * 100), (decoding, "p")], ids=["prefill", "decode"])
def test_a_client_that_leaves_ends_its_request(
    server: Server,
    slow: SlowSteps,
    phase: Callable[[SlowSteps], bool],
    prompt: str,
    n: int,
    stream: bool,
) -> None:
    body = {"max_tokens": 27} if len(prompt) == 100 else {}
    with connected(server, prompt=prompt, n=n, stream=stream, **body):
        wait_for(lambda: phase(slow), 10)
    left_at = slow.count
    wait_for(lambda: not slow.engine.unfinished, 10)
    assert slow.count - left_at <= _STEPS_LATER


def test_a_client_that_only_closes_its_sending_side_has_left_too(server: Server, slow: SlowSteps) -> None:
    with connected(server, prompt="p", stream=True) as connection:
        wait_for(lambda: decoding(slow), 10)
        connection.shutdown(socket.SHUT_WR)
        left_at = slow.count
        wait_for(lambda: not slow.engine.unfinished, 10)
        assert slow.count - left_at <= _STEPS_LATER


def test_a_client_that_leaves_the_queue_never_runs_and_disturbs_nobody(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = LONG | {"prompt": "bystander", "max_tokens": 60}
    undisturbed = server.complete(**body)["choices"]
    slow = SlowSteps(server.worker.engine)
    monkeypatch.setattr(server.worker.engine, "step", slow.step)
    with contextlib.ExitStack() as crowd:
        others = crowd.enter_context(contextlib.ExitStack())
        for _ in range(4):
            others.enter_context(connected(server, prompt="p", stream=True))
        wait_for(lambda: len(slow.engine.scheduler.running) == 4, 10)
        with connected(server, prompt="queued"):
            wait_for(lambda: slow.engine.scheduler.waiting, 10)
            (queued,) = slow.engine.scheduler.waiting
        wait_for(lambda: queued.finished, 10)
        assert queued.output == []
        assert queued.computed == 0
        bystander = crowd.enter_context(connected(server, **body))
        wait_for(lambda: slow.engine.scheduler.waiting, 10)
        others.close()  # four leave at once while it waits
        assert read_answer(bystander)["choices"] == undisturbed


def read_answer(connection: socket.socket) -> Json:
    data = b""
    while not data.endswith(b"}}"):
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    return json.loads(data.partition(b"\r\n\r\n")[2])  # type: ignore[no-any-return]


def test_a_request_that_ends_well_is_not_aborted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(server.worker, "abort", aborted.append)
    server.complete(prompt="abc", n=2)
    server.stream("/v1/completions", prompt="abc", n=2)
    server.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": [300]})
    assert aborted == []
