"""The server as a process: signals, exit codes, and the port while the model loads."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.serve.client import MODEL_NAME, wait_for

_SERVE = """
import sys
from pathlib import Path
from mimo_jax.engine.setup import EngineOptions
from serve.app import run_server

options = EngineOptions(Path(sys.argv[1]), dtype="float32", max_model_len=128, max_num_seqs=4,
                        max_num_batched_tokens=16, block_size=8)
run_server(options, host="127.0.0.1", port=int(sys.argv[2]), served_model_name=sys.argv[3])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", _SERVE, str(folder), str(port), MODEL_NAME]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def health(port: int) -> int | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code
    except httpx.TransportError:
        return None


def test_the_port_is_open_while_the_model_loads_and_sigterm_ends_the_process(
    model_folder: Path,
) -> None:
    port = free_port()
    with serving(model_folder, port) as process:
        wait_for(lambda: health(port) == 503, 60)
        wait_for(lambda: health(port) == 200, 60)
        body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_an_interrupt_while_the_model_loads_ends_the_process(model_folder: Path) -> None:
    port = free_port()
    with serving(model_folder, port) as process:
        wait_for(lambda: health(port) == 503, 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_model_that_cannot_load_ends_the_process_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with serving(tmp_path, free_port()) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: ")
    assert "config.json" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_a_port_that_is_taken_ends_the_process(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serving(tmp_path, port) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in use" in errors
    assert str(port) in errors
    assert "Traceback" not in errors
