"""The HTTP application: routes that translate, and nothing else. `run_server` puts it behind a port."""

import asyncio
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from mimo_jax.engine.engine import Engine
from mimo_jax.engine.scheduler import Limits
from mimo_jax.engine.setup import EngineOptions, Load, load_engine
from mimo_jax.errors import RequestError
from mimo_jax.text import Tokenizer
from serve.endpoints import ENDPOINTS
from serve.errors import ApiError, EngineFailed, ServerStopping, as_api_error, to_json
from serve.jobs import Choice
from serve.protocol import MAX_BODY_BYTES, parse_json
from serve.replies import Call, Context, Json, check_model
from serve.streaming import ClientGone, EventStream, while_connected
from serve.worker import EngineWorker, Generation, WorkerState

# Errors that are answers; any other is also logged by the web framework.
_FORESEEN = (
    ApiError,
    ClientDisconnect,
    ClientGone,
    EngineFailed,
    HTTPException,
    RecursionError,
    RequestError,
    ServerStopping,
)
_GRACE_S = 5  # for answers that are being written when the server is told to stop


def create_app(worker: EngineWorker, *, served_model_name: str) -> FastAPI:
    """The application around a worker that may be loading; until it is ready, all but /health is 503."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    created = int(time.time())

    def card() -> Json:
        _check_ready(worker)
        name = {"id": served_model_name, "object": "model", "created": created, "owned_by": "mimo_jax"}
        return name | {"max_model_len": worker.engine.limits.max_model_tokens}

    @app.get("/health")
    async def health() -> Response:
        ready = worker.state is WorkerState.READY
        return _json({"status": "ok" if ready else worker.state.value}, 200 if ready else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        found = card()
        check_model(name, served_model_name)
        return _json(found)

    async def answer(request: Request) -> Response:
        return await _answer(worker, request, served_model_name)

    for path in ENDPOINTS:
        app.post(path)(answer)
    for kind in (*_FORESEEN, Exception):
        app.add_exception_handler(kind, _error_response)
    return app


async def _answer(worker: EngineWorker, request: Request, served_model_name: str) -> Response:
    """Reads, translates and runs one request; the answer is JSON or a stream of events."""
    _check_ready(worker)
    data = await _read_body(request)
    context = Context(worker.engine.tokenizer, served_model_name, uuid.uuid4().hex, int(time.time()))
    # Parsing a large body, templates and tokenizers take time that other clients would wait for.
    call = await asyncio.to_thread(lambda: ENDPOINTS[request.url.path](parse_json(data), context))
    generation = Generation(worker, call.job)
    try:
        await while_connected(request.receive, generation.begin())
        if not call.stream:
            return _json(await while_connected(request.receive, _collect(call, generation)))
    except BaseException:
        generation.close()
        raise
    return EventStream(call, generation)


async def _collect(call: Call, generation: Generation) -> Json:
    choices = [Choice(index) for index in range(call.job.sequences)]
    async for delta in generation.deltas():
        choices[delta.index].add(delta)
    return call.response(choices)


async def _read_body(request: Request) -> bytes:
    """The body, once its type and size are right: nothing over the limit is kept."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also keeps a web page of another origin from sending requests: browsers ask first.
        raise ApiError(400, f"the content type is {kind[:100]!r}; application/json is needed")
    too_long = ApiError(413, f"the body is over {MAX_BODY_BYTES} bytes")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_long
    return bytes(body)


def _check_ready(worker: EngineWorker) -> None:
    if worker.state is not WorkerState.READY:
        raise ApiError(503, f"the model is not ready: {worker.state.value}", code=worker.state.value)


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case ClientDisconnect() | ClientGone():
            return Response(status_code=408)  # nobody reads it
        case HTTPException(status_code=404):
            answer = ApiError(404, f"there is no {request.url.path[:100]}", code="not_found")
        case HTTPException(status_code=405):
            answer = ApiError(405, f"{request.url.path} does not take {request.method}", code="method_not_allowed")
        case HTTPException():
            answer = ApiError(error.status_code, str(error.detail))
        case _:
            answer = as_api_error(error)
    headers = error.headers if isinstance(error, HTTPException) else None
    return _json(answer.body(), answer.status, headers)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def run_server(options: EngineOptions, *, host: str, port: int, served_model_name: str) -> None:
    """Serves until SIGINT or SIGTERM. The port is open from the start; the model loads meanwhile.

    Ends the process with code 1, and the reason on stderr, when the port is taken or the model cannot be
    loaded.
    """
    worker = EngineWorker(lambda: _load(options))
    app = create_app(worker, served_model_name=served_model_name)
    config = uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=_GRACE_S, lifespan="off")
    server = uvicorn.Server(config)

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn has handlers of its own while it serves, and afterwards repeats the signal for whoever handled
    # it before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=config.backlog)
    except (OSError, OverflowError) as error:
        print(f"error: cannot listen on {host}:{port}: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    worker.start(on_failure=stop)
    server.run(sockets=[listening])
    ended = worker.stop(0 if worker.state is WorkerState.LOADING else _GRACE_S)
    if worker.error is not None:
        print(f"error: {worker.error}", file=sys.stderr)
        raise SystemExit(1)
    if not ended:
        # A compilation cannot be interrupted, and the interpreter would wait for it.
        sys.stderr.flush()
        os._exit(0)


def _load(options: EngineOptions) -> Engine:
    """An engine with everything compiled that requests can reach."""

    def everything(_: Tokenizer | None, limits: Limits) -> Load:
        most = limits.max_model_tokens
        return Load(limits.max_seqs, max(1, most - 1), most, scoring=True)

    return load_engine(options, expect=everything, progress=True)
