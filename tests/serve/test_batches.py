from pathlib import Path
from typing import Any

import pytest

from mimo_jax.engine.request import Request
from mimo_jax.llm import LLM
from serve.batches import BatchSummary
from serve.protocol import MAX_BODY_BYTES
from tests.serve.batch_lines import CHAT, COMPLETIONS, check_idle, line, mixed_lines, run
from tests.serve.client import Json, Server

HELLO = [{"role": "user", "content": "hello"}]


def test_answers_are_those_of_the_server_in_the_order_of_the_input(server: Server, llm: LLM, tmp_path: Path) -> None:
    bodies: list[tuple[str, Json]] = [
        (COMPLETIONS, {"prompt": "long", "temperature": 0, "max_tokens": 90, "ignore_eos": True}),
        (CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 3, "logprobs": True}),
        (COMPLETIONS, {"prompt": ["a", "b"], "seed": 3, "n": 2, "max_tokens": 9, "return_token_ids": True}),
        (CHAT, {"messages": HELLO, "seed": 5, "max_tokens": 20, "stop": ["a", "e"]}),
    ]
    answers, summary = run(llm, tmp_path, [line(f"{n}", url, **body) for n, (url, body) in enumerate(bodies)])
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2", "3"]
    for answer, (url, body) in zip(answers, bodies, strict=True):
        expected = server.post(url, **body)
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        got = answer["response"]["body"]
        assert got["id"] == answer["response"]["request_id"]
        assert without_logprobs(got["choices"]) == without_logprobs(expected["choices"])
        assert (got["object"], got["usage"]) == (expected["object"], expected["usage"])
    tokens = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)
    assert summary == BatchSummary(lines=4, kept=0, failed=0, completion_tokens=tokens)


def without_logprobs(choices: list[Json]) -> list[Json]:
    return [{name: value for name, value in choice.items() if name != "logprobs"} for choice in choices]


BAD_LINES: dict[str, tuple[Json | bytes, str | None, int | None, str]] = {
    # what, custom_id of the answer, status if it was a request at all, words of the message
    "not JSON": (b"{", None, None, "JSON"),
    "not UTF-8": (b'{"custom_id": "\xff"}', None, None, "UTF-8"),
    "no object": (b"[1]", None, None, "object"),
    "no custom_id": (b'{"method": "POST"}', None, None, "custom_id"),
    "custom_id is no string": (line(5), None, None, "custom_id"),
    "custom_id again": (line("good 0"), "good 0", None, "earlier"),
    "a lone surrogate": (line("\ud800"), None, None, "surrogate"),
    "wrong method": (line("x") | {"method": "GET"}, "x", None, "method"),
    "wrong url": (line("x", "/v1/embeddings"), "x", None, "url"),
    "url is no string": (line("x") | {"url": ["/v1/completions"]}, "x", None, "url"),
    "no body": (b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}', "x", None, "body"),
    "unknown field": (line("x") | {"priority": 1}, "x", None, "priority"),
    "too long": (b'{"custom_id": "' + b"x" * 2 * MAX_BODY_BYTES + b'"}', None, None, "bytes"),
    "deep": (b"[" * 100_000, None, None, "deep"),
    "body is no object": (line("x") | {"body": 7}, "x", 400, "object"),
    "body refused": (line("x", prompt="abc", echo=True), "x", 400, "echo"),
    "prompt refused by the engine": (line("x", prompt=[999]), "x", 400, "999"),
    "streamed": (line("x", prompt="abc", stream=True), "x", 400, "stream"),
    "empty messages": (line("x", CHAT, messages=[]), "x", 400, "messages"),
}


@pytest.mark.parametrize(("bad", "custom_id", "status", "words"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_an_answer_with_an_error_and_the_others_run(
    llm: LLM, tmp_path: Path, bad: Json | bytes, custom_id: str | None, status: int | None, words: str
) -> None:
    good: Json = {"prompt": "abc", "max_tokens": 2}
    answers, summary = run(llm, tmp_path, [line("good 0", **good), bad, line("good 1", **good)])
    assert [answer["custom_id"] for answer in answers] == ["good 0", custom_id, "good 1"]
    assert [answer["error"] is None for answer in answers] == [True, False, True]
    assert summary.failed == 1
    response, error = answers[1]["response"], answers[1]["error"]
    assert words in error["message"]
    assert (response and response["status_code"]) == status
    if response is None:
        assert "line 2" in error["message"]
    else:
        assert response["body"] == {"error": error}


def test_empty_lines_are_no_requests(llm: LLM, tmp_path: Path) -> None:
    answers, _ = run(llm, tmp_path, [b"", line("a", prompt="abc", max_tokens=1), b"  ", b"\r", b"{"])
    assert [answer["custom_id"] for answer in answers] == ["a", None]
    assert answers[1]["error"]["message"].startswith("line 5: ")


def test_an_empty_input_gives_an_empty_output(llm: LLM, tmp_path: Path) -> None:
    assert run(llm, tmp_path, []) == ([], BatchSummary(0, 0, 0, 0))


def test_lines_without_a_seed_differ_and_repeat(llm: LLM, tmp_path: Path) -> None:
    body: Json = {"prompt": ["abc", "abc"], "max_tokens": 12, "ignore_eos": True}
    lines: list[Json | bytes] = [line(f"{place}", **body) for place in range(3)]
    texts = []
    for name in "ab":
        (tmp_path / name).mkdir()
        answers, _ = run(llm, tmp_path / name, lines)
        bodies = [answer["response"]["body"] for answer in answers]
        texts.append([choice["text"] for body in bodies for choice in body["choices"]])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 6


def test_a_failing_step_costs_the_lines_that_ran_and_a_second_one_ends_the_run(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = llm.engine.steps.run
    calls: list[None] = []

    def fails_from(first: int, last: int) -> Any:
        def fails(*arguments: Any) -> Any:
            calls.append(None)
            if first <= len(calls) <= last:
                raise RuntimeError("the device is gone")
            return healthy(*arguments)

        calls.clear()
        return fails

    monkeypatch.setattr(llm.engine.steps, "run", fails_from(3, 3))
    answers, summary = run(llm, tmp_path, mixed_lines(20))
    assert 0 < summary.failed < 20
    assert {answer["response"]["status_code"] for answer in answers if answer["error"]} == {500}
    (tmp_path / "output.jsonl").unlink()
    monkeypatch.setattr(llm.engine.steps, "run", fails_from(3, 4))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(llm, tmp_path, mixed_lines(20))
    check_idle(llm)


def test_a_bounded_number_of_lines_is_in_memory(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.batches._HELD_LINES", 30)
    queued: list[int] = []
    add = llm.engine.add

    def counted(request: Request) -> None:
        add(request)
        queued.append(llm.engine.unfinished)

    monkeypatch.setattr(llm.engine, "add", counted)
    body: Json = {"prompt": "a", "max_tokens": 1}
    lines: list[Json | bytes] = [line("slow", prompt="a", max_tokens=120, ignore_eos=True)]
    lines += [line(f"{place}", **body) for place in range(100)]
    answers, _ = run(llm, tmp_path, lines)
    assert [answer["custom_id"] for answer in answers][:2] == ["slow", "0"]
    assert len(answers) == 101
    assert max(queued) <= 8  # twice the sequences that run at once
