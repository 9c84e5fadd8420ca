"""Offline batches in OpenAI's file format, through the same translation as the HTTP routes.

Input lines: {"custom_id", "method": "POST", "url": "/v1/completions" or "/v1/chat/completions", "body"}. Any
model name passes: a batch runs one model. Output lines, in the order of the input:

    {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}

`error` is null where the answer is 200, and says otherwise what is wrong. `response` is null where the line
is no request at all.
"""

import logging
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from mimo_jax.engine.engine import Engine
from mimo_jax.engine.request import Request
from mimo_jax.llm import LLM
from serve.batch_files import BatchLine, check_paths, open_output, read_lines
from serve.endpoints import ENDPOINTS
from serve.errors import ApiError, EngineFailed, as_api_error, to_json
from serve.jobs import Choice, Job, abort_all, make_delta, queue_job
from serve.replies import Call, Context

log = logging.getLogger(__name__)

_HELD_LINES = 4096  # answers that wait for an earlier one, and lines that run, are in memory


@dataclass(frozen=True)
class BatchSummary:
    """`kept` of the `lines` were in the output already; `failed` have an error, kept ones included."""

    lines: int
    kept: int
    failed: int
    completion_tokens: int


def run_batch(llm: LLM, input_path: Path, output_path: Path) -> BatchSummary:
    """Answers every line of a file. Raises BatchError before anything is written if the files do not fit.

    A line that is wrong becomes a line with an error. Each answer is written when all before it are, so the
    output is valid after any interruption, and the same call goes on where it was. Requests without a seed
    get one from the engine's seed and their place, and answers are dated by the input file: an interrupted
    run gives the output of an uninterrupted one.

    A failing device costs the lines that ran; if it fails again before any token comes, the run ends with its
    exception.
    """
    check_paths(input_path, output_path)
    created = int(input_path.stat().st_mtime)
    with input_path.open("rb") as source:
        output = open_output(output_path, read_lines(source))
        with (
            output.file,
            tqdm(desc="batch", unit=" tokens", disable=sys.stderr is None or not sys.stderr.isatty()) as bar,
        ):
            run = _Run(llm.engine, output.file, bar, created)
            try:
                run.all(output.remaining)
            finally:
                run.abort()
    failed = output.kept_failed + run.failed
    return BatchSummary(output.kept + run.written, output.kept, failed, run.completion_tokens)


@dataclass
class _Held:
    """A line between reading and writing: first it runs, then it is `answer`."""

    line: BatchLine
    call: Call | None = None
    requests: list[Request] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    answer: bytes | None = None


@dataclass
class _Run:
    engine: Engine
    file: IO[bytes]
    bar: Any
    created: int
    written: int = 0
    failed: int = 0
    completion_tokens: int = 0
    _held: deque[_Held] = field(default_factory=deque)
    _places: dict[str, tuple[_Held, int]] = field(default_factory=dict)
    _warm: tuple[int, int, int] = (0, 0, 0)
    _step_failed: bool = False

    def all(self, lines: Iterator[BatchLine]) -> None:
        """Runs lines to their end, many at once, and writes them in order."""
        more = True
        while more or self._held:
            more = more and self._fill(lines)
            if self.engine.unfinished:
                self._step()
            self._write()

    def abort(self) -> None:
        """Leaves nothing queued."""
        for held in self._held:
            abort_all(self.engine, held.requests)

    def _fill(self, lines: Iterator[BatchLine]) -> bool:
        """Queues lines until the engine has enough to choose from. False when there are no more."""
        more = True
        while more and len(self._held) < _HELD_LINES and self.engine.unfinished < 2 * self.engine.limits.max_seqs:
            line = next(lines, None)
            more = line is not None
            if line is not None:
                self._take(line)
        self._warm_up()
        return more

    def _take(self, line: BatchLine) -> None:
        held = _Held(line)
        self._held.append(held)
        try:
            if line.error is not None:
                raise line.error
            call = ENDPOINTS[line.url](line.body, Context(self.engine.tokenizer, None, line.unique, self.created))
            if call.stream:
                raise ApiError(400, "a batch does not stream", param="stream")
            call = replace(call, job=_seeded(call.job, self.engine.seed))
            held.requests = queue_job(self.engine, call.job)
        except Exception as error:  # whatever is wrong with one line ends that line alone
            self._finish(held, as_api_error(error))
            return
        held.call, held.choices = call, [Choice(index) for index in range(len(held.requests))]
        self._places |= {request.request_id: (held, index) for index, request in enumerate(held.requests)}

    def _warm_up(self) -> None:
        """Compiles for what the lines read so far need: more only when a larger one comes."""
        running = [request for held in self._held for request in held.requests if not request.finished]
        if not running:
            return
        prompt = max(len(request.prompt) for request in running)
        total = max(len(request.prompt) + request.max_tokens for request in running)
        seqs = min(len(running), self.engine.limits.max_seqs)
        largest = (max(self._warm[0], seqs), max(self._warm[1], prompt), max(self._warm[2], total))
        if largest != self._warm:
            self._warm = largest
            self.engine.warm_up(*largest, scoring=True, progress=not self.bar.disable)

    def _step(self) -> None:
        try:
            updates = self.engine.step()
        except Exception:
            if self._step_failed:
                raise
            self._step_failed = True
            log.exception("a step failed; the lines that ran are lost, the engine starts over")
            for held in list(self._held):
                if held.answer is None:
                    self._finish(held, as_api_error(EngineFailed()))
            return
        for update in updates:
            self._step_failed = False
            held, index = self._places[update.request.request_id]
            held.choices[index].add(make_delta(update, index))
            self.completion_tokens += len(update.token_ids)
            self.bar.update(len(update.token_ids))
            if all(choice.finish_reason is not None for choice in held.choices):
                self._finish(held, None)

    def _finish(self, held: _Held, error: ApiError | None) -> None:
        """Turns a line into its answer; of the rest nothing stays in memory."""
        held.answer = _answer(held, error)
        self.failed += error is not None
        for request in held.requests:
            del self._places[request.request_id]
        held.call, held.requests, held.choices = None, [], []

    def _write(self) -> None:
        """Writes the answers that no earlier line keeps waiting."""
        before = self.written
        while self._held and (answer := self._held[0].answer) is not None:
            self.file.write(answer)
            self._held.popleft()
            self.written += 1
        if self.written > before:
            self.file.flush()
            self.bar.set_postfix(lines=self.written, refresh=False)


def _answer(held: _Held, error: ApiError | None) -> bytes:
    """The output line. It begins as `BatchLine.prefix` says."""
    response = None
    if error is None:
        assert held.call is not None
        body = held.call.response(held.choices)
        response = {"status_code": 200, "request_id": held.call.job.job_id, "body": body}
    elif held.line.error is None:
        response = {"status_code": error.status, "request_id": held.line.unique, "body": error.body()}
    fault = None if error is None else error.body()["error"]
    return held.line.prefix + b'"response":' + to_json(response) + b',"error":' + to_json(fault) + b"}\n"


def _seeded(job: Job, engine_seed: int) -> Job:
    """The job with a seed for every prompt that has none: a function of the engine's seed and the place, so a
    restart repeats it.
    """

    def seed(place: int) -> int:
        return int.from_bytes(blake2b(f"{engine_seed}/{job.job_id}/{place}".encode(), digest_size=4).digest())

    prompts = [
        prompt if prompt.params.seed is not None else replace(prompt, params=replace(prompt.params, seed=seed(place)))
        for place, prompt in enumerate(job.prompts)
    ]
    return replace(job, prompts=tuple(prompts))
