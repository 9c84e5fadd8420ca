"""Whatever a client sends: an error of OpenAI's shape with a 4xx status, and the next request runs."""

import json
import socket
import time
from typing import Any

import pytest

from serve.protocol import MAX_BODY_BYTES
from tests.serve.bad_requests import BAD_BODIES, BAD_CHATS, BAD_COMPLETIONS, HELLO
from tests.serve.client import MODEL_NAME, Json, Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def check_error(response: Any, status: int) -> Json:
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(response.content) < 2000
    return error  # type: ignore[no-any-return]


def check_still_good(server: Server) -> None:
    assert server.complete(prompt="abc", max_tokens=1)["usage"]["total_tokens"] == 4


def name_of(case: object) -> str | None:
    return str(case)[:60] if isinstance(case, dict) else None


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=name_of)
def test_a_bad_completion_is_refused_by_field(server: Server, fields: Json, param: str) -> None:
    check_refused(server, COMPLETIONS, {"model": MODEL_NAME, "prompt": "abc"} | fields, param)


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=name_of)
def test_a_bad_chat_is_refused_by_field(server: Server, fields: Json, param: str) -> None:
    check_refused(server, CHAT, {"model": MODEL_NAME} | fields, param)


def check_refused(server: Server, path: str, body: Json, param: str) -> None:
    headers = {"content-type": "application/json"}
    start = time.monotonic()
    response = server.http.post(path, content=json.dumps(body), headers=headers)
    assert time.monotonic() - start < 30  # milliseconds on an idle machine; not minutes for the largest bodies
    error = check_error(response, 400)
    assert str(error["param"]).startswith(param)
    check_still_good(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_body_that_is_no_request_is_refused(server: Server, path: str, body: bytes) -> None:
    response = server.http.post(path, content=body, headers={"content-type": "application/json"})
    check_error(response, 400)
    check_still_good(server)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_another_content_type_is_refused(server: Server, kind: str) -> None:
    body = json.dumps({"model": MODEL_NAME, "prompt": "abc"})
    response = server.http.post(COMPLETIONS, content=body, headers={"content-type": kind})
    assert "application/json" in check_error(response, 400)["message"]
    good = server.http.post(COMPLETIONS, content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert good.status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "model", ["other", "../../x", "/etc/passwd", "org/name", "http://x", "tiny\x00", "", "x" * 1_000_000]
)
def test_an_unknown_model_is_not_found(server: Server, path: str, model: str) -> None:
    body: Json = {"prompt": "abc"} if path == COMPLETIONS else {"messages": HELLO}
    error = check_error(server.http.post(path, json=body | {"model": model}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("model", [None, 5, ["tiny"]])
def test_the_model_has_to_be_a_string(server: Server, model: Any) -> None:
    error = check_error(server.http.post(COMPLETIONS, json={"prompt": "abc", "model": model}), 400)
    assert error["param"] == "model"


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(server: Server, missing: str) -> None:
    body = {"model": MODEL_NAME, "prompt": "abc"}
    del body[missing]
    error = check_error(server.http.post(COMPLETIONS, json=body), 400)
    assert (error["param"], error["code"]) == (missing, "missing_field")


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/", "/v1/completions/", "/v2/models", "/docs", "/openapi.json", "/v1/../health/x"],
)
def test_an_unknown_route_is_not_found(server: Server, path: str) -> None:
    check_error(server.http.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", COMPLETIONS),
        ("PUT", CHAT),
        ("DELETE", COMPLETIONS),
        ("POST", "/health"),
        ("POST", "/v1/models"),
        ("OPTIONS", CHAT),
        ("PATCH", "/v1/models/tiny"),
    ],
)
def test_a_wrong_method_is_refused(server: Server, method: str, path: str) -> None:
    response = server.http.request(method, path)
    check_error(response, 405)
    assert response.headers["allow"]


def raw_request(server: Server, head: str, body: bytes) -> tuple[int, Json]:
    """Sends a request that may be incomplete and reads the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
            header, _, content = answer.partition(b"\r\n\r\n")
            if content.endswith(b"}}"):
                break
    return int(header.split()[1]), json.loads(content)


HEAD = f"POST {COMPLETIONS} HTTP/1.1\nhost: x\ncontent-type: application/json\n"


def test_a_body_announced_as_too_long_is_refused_before_it_comes(server: Server) -> None:
    status, answer = raw_request(server, HEAD + "content-length: 200000000\n", b"{")
    assert status == 413
    assert answer["error"]["type"] == "invalid_request_error"
    check_still_good(server)


def test_a_body_that_grows_too_long_is_refused(server: Server) -> None:
    size = MAX_BODY_BYTES + 1
    chunk = f"{size:x}\r\n".encode() + b" " * size + b"\r\n"
    status, answer = raw_request(server, HEAD + "transfer-encoding: chunked\n", chunk)
    assert status == 413
    assert answer["error"]["type"] == "invalid_request_error"
    check_still_good(server)


def test_refused_requests_leave_one_in_flight_as_it_was(server: Server) -> None:
    body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    undisturbed = server.complete(**body)
    with server.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
        pieces = response.iter_raw()
        first = next(pieces)
        for fields, _ in BAD_COMPLETIONS[:20]:
            server.http.post(COMPLETIONS, json=body | fields)
        events = (first + b"".join(pieces)).split(b"\n\n")[:-2]
    decoded = [json.loads(event.removeprefix(b"data: ")) for event in events]
    text = "".join(event["choices"][0]["text"] for event in decoded)
    assert text == undisturbed["choices"][0]["text"]


def test_health_and_models_answer(server: Server) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    listed = server.http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL_NAME]
    assert server.http.get(f"/v1/models/{MODEL_NAME}").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 128
    for name in ("other", "org/other", "..%2f..%2fx", ""):
        assert check_error(server.http.get(f"/v1/models/{name}"), 404)["code"] == "model_not_found"
