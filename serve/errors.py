"""What goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
from typing import Any

from mimo_jax.errors import RequestError

log = logging.getLogger(__name__)

_MESSAGE_CHARACTERS = 500


class ApiError(Exception):
    """An answer other than 200. `param` names the field that is wrong, `code` the kind of fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON answer. Cut, because a message may quote what a client sent."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message, param = _cut(self.message), None if self.param is None else _cut(self.param)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


class EngineFailed(Exception):
    """The device failed during a step; the request is lost, the next one is not."""


class ServerStopping(Exception):
    """The server ends before the request does."""


def as_api_error(error: BaseException) -> ApiError:
    """The answer to an exception. What is not foreseen is a 500 that says nothing of the inside."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case RecursionError():
            return ApiError(400, "the body is nested too deeply")
        case ServerStopping():
            return ApiError(503, "the server is stopping", code="stopping")
        case EngineFailed():
            return ApiError(500, "the engine failed while it ran this request", code="engine_error")
        case _:
            log.error("a request failed in a way that was not foreseen", exc_info=error)
            return ApiError(500, "internal error", code="internal_error")


def to_json(value: Any) -> bytes:
    """JSON on one line in ASCII: lone surrogates survive, and nobody takes U+2028 for the end of a line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARACTERS else text[: _MESSAGE_CHARACTERS - 3] + "..."
