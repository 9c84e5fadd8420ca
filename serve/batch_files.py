"""The two files of a batch run: lines in, lines out, and where an earlier run stopped.

The output has one line per request, in the order of the input. Its beginning follows from the input alone, so
an output can be compared with the input it claims to answer, and a run that was killed goes on behind the
last whole line.
"""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from serve.endpoints import ENDPOINTS
from serve.errors import ApiError
from serve.protocol import MAX_BODY_BYTES, parse_json


class BatchError(ValueError):
    """The files do not fit together. Nothing was written."""


@dataclass(frozen=True)
class BatchLine:
    """One line of the input, read but not yet translated; `error` says what is wrong with the line itself."""

    place: int  # among the lines that are not empty, from 0
    number: int  # in the file, from 1
    custom_id: str | None
    url: str
    body: Any
    error: ApiError | None

    @property
    def unique(self) -> str:
        return f"batch-{self.place}"

    @property
    def prefix(self) -> bytes:
        """How its line in the output begins."""
        return f'{{"id":"batch_req_{self.place}","custom_id":{json.dumps(self.custom_id)},'.encode()


def read_lines(file: IO[bytes]) -> Iterator[BatchLine]:
    """The lines of an input, one at a time. Empty lines are no requests; all others give a line, whatever is
    wrong.
    """
    place = number = 0
    seen: set[bytes] = set()  # digests: about 80 bytes of memory a line
    while data := file.readline(MAX_BODY_BYTES + 1):
        number += 1
        too_long = len(data) > MAX_BODY_BYTES and not data.endswith(b"\n")
        while too_long and data and not data.endswith(b"\n"):
            data = file.readline(MAX_BODY_BYTES)
        if not too_long and not data.strip():
            continue
        yield _too_long(place, number) if too_long else _read_line(data, place, number, seen)
        place += 1


def _too_long(place: int, number: int) -> BatchLine:
    error = ApiError(400, f"line {number}: over {MAX_BODY_BYTES} bytes", code="invalid_line")
    return BatchLine(place, number, None, "", None, error)


def _read_line(data: bytes, place: int, number: int, seen: set[bytes]) -> BatchLine:
    custom_id: str | None = None
    try:
        value = parse_json(data)
        if not isinstance(value, dict):
            raise ApiError(400, "an object with custom_id, method, url and body is needed")
        given = value.get("custom_id")
        if not isinstance(given, str) or not given:
            raise ApiError(400, "custom_id has to be a string, and not empty", param="custom_id")
        custom_id = given
        _check_new(custom_id, seen)
        _check_line(value)
    except ApiError as error:
        fault = ApiError(error.status, f"line {number}: {error.message}", param=error.param, code="invalid_line")
        return BatchLine(place, number, custom_id, "", None, fault)
    return BatchLine(place, number, custom_id, value["url"], value["body"], None)


def _check_new(custom_id: str, seen: set[bytes]) -> None:
    digest = blake2b(json.dumps(custom_id).encode(), digest_size=16).digest()
    if digest in seen:
        raise ApiError(400, "the custom_id is that of an earlier line", param="custom_id")
    seen.add(digest)


def _check_line(value: dict[str, Any]) -> None:
    unknown = next((name for name in value if name not in ("custom_id", "method", "url", "body")), None)
    if unknown is not None:
        raise ApiError(400, f"the field {unknown!r} is not known", param=unknown)
    if value.get("method") != "POST":
        raise ApiError(400, "method has to be POST", param="method")
    if value.get("url") not in list(ENDPOINTS):
        raise ApiError(400, f"url has to be {' or '.join(ENDPOINTS)}", param="url")
    if "body" not in value:
        raise ApiError(400, "the body is missing", param="body")


def check_paths(input_path: Path, output_path: Path) -> None:
    """Raises BatchError for files that cannot be these."""
    if not input_path.is_file():
        raise BatchError(f"{input_path}: no such file")
    if output_path.exists() and os.path.samefile(input_path, output_path):
        raise BatchError(f"{output_path}: is the input as well; the output needs a file of its own")
    if output_path.is_dir() or not output_path.parent.is_dir():
        raise BatchError(f"{output_path}: cannot be written; a file in an existing folder is needed")


@dataclass(frozen=True)
class Output:
    """An output file opened behind the lines that an earlier run has finished, and the input lines that
    remain.
    """

    file: IO[bytes]
    kept: int
    kept_failed: int
    remaining: Iterator[BatchLine]


def open_output(path: Path, lines: Iterator[BatchLine]) -> Output:
    """Opens `path`, made anew if it is not there. A half-written last line is cut off.

    Raises BatchError, having changed nothing, when the file is not the beginning of an answer to these lines.
    """
    file = path.open("r+b" if path.exists() else "w+b")
    try:
        kept_bytes = kept = failed = 0
        for data in file:
            line = next(lines, None)
            if line is None or not _answers(data, line):
                where = f"{path}: line {kept + 1} is no answer to the input"
                raise BatchError(f"{where}; name another output, or remove this one")
            if not data.endswith(b"\n"):
                lines = itertools.chain([line], lines)
                break
            kept_bytes, kept, failed = kept_bytes + len(data), kept + 1, failed + _has_failed(data)
        file.truncate(kept_bytes)
        file.seek(kept_bytes)
    except BaseException:
        file.close()
        raise
    return Output(file, kept, failed, lines)


def _answers(data: bytes, line: BatchLine) -> bool:
    """Whether an output line, or the first part of one, is about this line of the input."""
    if not data.endswith(b"\n"):
        return data[: len(line.prefix)] == line.prefix[: len(data)]
    try:
        return data.startswith(line.prefix) and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def _has_failed(data: bytes) -> bool:
    return json.loads(data).get("error") is not None
