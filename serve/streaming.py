"""Server-sent events, and the watch for clients that leave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.errors import as_api_error, to_json
from serve.jobs import Delta
from serve.replies import Call, Json
from serve.worker import Generation

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled with ClientGone when the client leaves. The request's body
    must be read by then.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(call: Call, generation: Generation) -> AsyncIterator[bytes]:
    """A generation as events: pieces of its choices, finish reasons, usage if asked for, [DONE]; or an error
    as the last.
    """
    opened: set[int] = set()
    completion_tokens = 0
    try:
        async for delta in generation.deltas():
            completion_tokens += len(delta.token_ids)
            for choice in _choices(call, delta, opened):
                yield _event(call.chunk(choice))
    except Exception as error:
        yield _event(as_api_error(error).body())
        return
    if call.include_usage:
        yield _event(call.usage_chunk(completion_tokens))
    yield b"data: [DONE]\n\n"


def _choices(call: Call, delta: Delta, opened: set[int]) -> list[Json]:
    """A delta as choices of chunks. One without text is not sent, unless it carries more than text."""
    choices = []
    opening = None if delta.index in opened else call.reply.opening(delta.index)
    opened.add(delta.index)
    if opening is not None:
        choices.append(opening)
    piece = call.reply.piece(delta)
    if delta.text or piece["logprobs"] is not None or "token_ids" in piece:
        choices.append(piece)
    if delta.finish_reason is not None:
        choices.append(call.reply.ending(delta))
    return choices


def _event(value: Json) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(Response):
    """Streams a generation that has begun, and closes it on every way out: end, error, a client that left,
    cancellation.
    """

    media_type = "text/event-stream"

    def __init__(self, call: Call, generation: Generation) -> None:
        self._call = call
        self._generation = generation
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._write(send))
        finally:
            self._generation.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in events(self._call, self._generation):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
