"""Child processes of the benchmark, one at a time: an engine's measurements, and the command's start-up."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload import Result, Workload, argument, read_result, versions

ROOT = Path(__file__).resolve().parents[1]
# As the console script, which may not be installed where the repository is only on the path.
COMMAND = ("-c", "import sys; from mimo_jax.cli import main; sys.exit(main())")
QUESTION = ("generate", "demo", "--chat", "--max-model-len", "512", "--prompt", "What is the capital of France?")


class ChildError(Exception):
    """A child failed or took too long; says how. `results` are what it had measured before."""

    def __init__(self, message: str, results: Sequence[Result] = ()) -> None:
        super().__init__(message)
        self.results = tuple(results)


@dataclass(frozen=True)
class Engine:
    """A name, the script that measures it, the weights it is given, and whether a peer's interpreter runs it."""

    name: str
    module: str
    weights: str
    peer: bool


ENGINES = (
    Engine("mimo_jax", "benchmarks.run_mimo_jax", "auto", peer=False),
    Engine("transformers", "benchmarks.run_transformers", "bfloat16", peer=True),
    Engine("llama.cpp", "benchmarks.run_llama_cpp", "Q8_0", peer=True),
    Engine("transformers_float32", "benchmarks.run_transformers", "float32", peer=True),
)


def measure(engine: Engine, python: str, workload: Workload, timeout_s: float) -> list[Result]:
    """Runs an engine's script with the interpreter `python` to its end. Raises ChildError."""
    command = [python, "-m", engine.module, argument(workload)]
    lines: list[str] = []
    with _child(command, {"MIMO_JAX_CACHE": f"{workload.scratch}/compiled"}, timeout_s, lines) as process:
        assert process.stdout is not None
        lines += [line.decode(errors="replace") for line in process.stdout]
    return [result for line in lines if (result := read_result(line))]


def measure_startup(state: str, cache: Path, timeout_s: float) -> list[Result]:
    """Seconds from the start of a `mimo-jax generate` process to its first text, with the compiled programs in `cache`.

    `state` ("cold", "warm") names the measurement. Python's and the system's file caches are as they are. Raises
    ChildError.
    """
    start = time.perf_counter()
    with _child([sys.executable, *COMMAND, *QUESTION], {"MIMO_JAX_CACHE": str(cache)}, timeout_s, []) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
    if not first:
        raise ChildError("the command printed nothing")
    return [Result(f"startup_{state}", "s", (elapsed,), (1,), "float32", versions("jax", "jaxlib"))]


@contextmanager
def _child(
    command: Sequence[str], variables: Mapping[str, str], timeout_s: float, lines: list[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A running child whose output the caller reads; on the way out, waits for its end.

    Raises ChildError with the end of stderr when it fails or is killed after `timeout_s`; it keeps the results among
    the `lines` that the caller has read.
    """
    # On the CPU even where there is an accelerator: the peers' builds run there.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", **variables}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        except OSError as error:
            raise ChildError(str(error)) from error
        killer = threading.Timer(timeout_s, process.kill)
        killer.start()
        begin = time.monotonic()
        try:
            yield process
            code = process.wait()
        finally:
            killer.cancel()
            process.kill()  # nothing of it outlives an exception of the caller
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if code:
            late = f" (killed after {timeout_s:.0f} s)" if time.monotonic() - begin >= timeout_s else ""
            errors.seek(0)
            tail = errors.read().decode(errors="replace").strip()[-3000:]
            results = [result for line in lines if (result := read_result(line))]
            raise ChildError(f"exit code {code}{late}: {tail}", results)
