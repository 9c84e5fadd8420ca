import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mimo_jax.text import Tokenizer
from tests.serve.client import MODEL_NAME, Json, Server, decode_event, endings, joined

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

BODIES: dict[str, tuple[str, Json]] = {
    "completion": (COMPLETIONS, {"prompt": "hello", "temperature": 0, "max_tokens": 40}),
    "seeded": (COMPLETIONS, {"prompt": "hello", "seed": 11, "max_tokens": 60, "ignore_eos": True}),
    "two choices": (COMPLETIONS, {"prompt": "abc", "n": 2, "seed": 2, "max_tokens": 30}),
    "prompts in chunks": (COMPLETIONS, {"prompt": ["z" * 70, "hi", "y" * 41], "temperature": 0}),
    "stop string": (COMPLETIONS, {"prompt": "q", "seed": 3, "max_tokens": 99, "stop": ["e", "o", "\x00"]}),
    "log-probabilities": (COMPLETIONS, {"prompt": "hi", "seed": 4, "logprobs": 2, "ignore_eos": True}),
    "chat": (CHAT, {"messages": HELLO, "temperature": 0}),
    "chat, three choices": (CHAT, {"messages": HELLO, "n": 3, "seed": 7, "max_tokens": 25}),
    "chat, log-probabilities": (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "seed": 1}),
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_a_stream_joined_is_the_answer_in_one_piece(server: Server, path: str, body: Json) -> None:
    whole = server.post(path, **body)
    events = server.stream(path, **body, stream_options={"include_usage": True})
    field = "content" if path == CHAT else "text"
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert joined(events, choice["index"], field=field) == text
        assert joined_logprobs(events, choice["index"]) == choice["logprobs"]
    expected = [(choice["index"], choice["finish_reason"]) for choice in whole["choices"]]
    assert sorted(endings(events)) == expected
    assert events[-1]["usage"] == whole["usage"]


def joined_logprobs(events: list[Json], index: int) -> Any:
    pieces = [
        choice["logprobs"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index and choice["logprobs"] is not None
    ]
    if not pieces:
        return None
    lists: Json = {name: [] for name in pieces[0]}
    for piece in pieces:
        for name, values in piece.items():
            lists[name] += values or []
    return lists | ({"refusal": None} if "refusal" in lists else {})


def test_the_order_of_events_is_role_text_finish_usage(server: Server) -> None:
    events = server.stream(CHAT, messages=HELLO, seed=1, stream_options={"include_usage": True})
    first, *middle, last, usage = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in middle)
    assert all(event["choices"][0]["finish_reason"] is None for event in (first, *middle))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert usage["choices"] == []
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert {(event["id"], event["object"], event["model"]) for event in events} == {
        (first["id"], "chat.completion.chunk", MODEL_NAME)
    }


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_without_include_usage_no_event_has_a_usage(server: Server, options: Json | None) -> None:
    events = server.stream(COMPLETIONS, prompt="abc", max_tokens=3, stream_options=options)
    assert not any("usage" in event for event in events)
    assert all(event["choices"] for event in events)


def test_the_prompt_counts_once_when_it_is_computed_in_chunks(server: Server) -> None:
    events = server.stream(
        COMPLETIONS,
        prompt="w" * 100,
        n=2,
        max_tokens=20,
        ignore_eos=True,
        stream_options={"include_usage": True},
    )
    assert events[-1]["usage"] == {"prompt_tokens": 100, "completion_tokens": 40, "total_tokens": 140}


def test_deltas_are_whole_characters_and_a_stop_string_never_shows(server: Server) -> None:
    body = {"prompt": "abc", "seed": 21, "max_tokens": 100, "ignore_eos": True}
    whole = server.complete(**body)["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    events = server.stream(COMPLETIONS, **body, stop=stop)
    assert joined(events) == whole[: whole.index(stop)]
    pieces = [choice["text"] for event in events for choice in event["choices"]]
    assert all(piece for piece in pieces[:-1])  # only the event with the finish reason has no text
    assert endings(events) == [(0, "stop")]


def test_mixed_requests_at_once_have_the_answers_they_have_alone(server: Server) -> None:
    def one(place: int) -> tuple[str, str]:
        path = (COMPLETIONS, CHAT)[place % 2]
        prompt = "abcdefghij"[place % 7 :] * (1 + place % 5)
        body: Json = {"temperature": 0, "max_tokens": 10 + 3 * place}
        body |= {"prompt": prompt} if path == COMPLETIONS else {"messages": [HELLO[0] | {"content": prompt}]}
        if place % 3:
            events = server.stream(path, **body)
            return joined(events, field="content" if path == CHAT else "text"), endings(events)[0][1]
        (choice,) = server.post(path, **body)["choices"]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"], choice["finish_reason"]

    alone = [one(place) for place in range(20)]
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(one, range(20))) == alone


def test_a_step_that_fails_is_a_500_and_an_event_and_the_next_request_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.worker.engine
    steps = engine.steps
    healthy = steps.run

    def fails(*arguments: Any) -> Any:
        if any(len(request.output) == 3 for request in engine.scheduler.running):
            raise RuntimeError("the device is gone")
        return healthy(*arguments)

    good = server.complete(prompt="abc", temperature=0)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "run", fails)
        body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 9, "ignore_eos": True}
        refused = server.http.post(COMPLETIONS, json=body)
        streamed = server.http.post(COMPLETIONS, json=body | {"stream": True})
    assert refused.status_code == 500
    assert refused.json()["error"]["type"] == "server_error"
    assert "device is gone" not in refused.text
    *pieces, last, rest = streamed.content.split(b"\n\n")
    assert streamed.status_code == 200
    assert len(pieces) <= 3
    assert decode_event(last) == refused.json()
    assert rest == b""
    assert server.complete(prompt="abc", temperature=0)["choices"] == good["choices"]


def test_health_is_quick_while_a_chat_is_being_rendered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, rendering = Tokenizer.encode_chat, threading.Event()

    def slow(*arguments: Any, **named: Any) -> list[int]:
        rendering.set()
        time.sleep(3)  # longer than /health takes on a busy machine
        return encode(*arguments, **named)

    monkeypatch.setattr(Tokenizer, "encode_chat", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, messages=HELLO, max_tokens=1)
        assert rendering.wait(10)
        assert server.http.get("/health").status_code == 200
        assert not answer.done()
        assert answer.result()["usage"]["completion_tokens"] == 1
