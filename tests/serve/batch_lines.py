"""Batch inputs for the tests, and a run of one."""

import json
from pathlib import Path
from typing import Any

from mimo_jax.llm import LLM
from serve.batches import BatchSummary, run_batch
from tests.serve.client import Json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> Json:
    body = {"model": "any"} | (body or {"prompt": "abc"})
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_input(folder: Path, lines: list[Json | bytes]) -> Path:
    path = folder / "input.jsonl"
    encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    path.write_bytes(b"".join(one + b"\n" for one in encoded))
    return path


def run(llm: LLM, folder: Path, lines: list[Json | bytes]) -> tuple[list[Json], BatchSummary]:
    output = folder / "output.jsonl"
    summary = run_batch(llm, write_input(folder, lines), output)
    check_idle(llm)
    return [json.loads(one) for one in output.read_bytes().splitlines()], summary


def check_idle(llm: LLM) -> None:
    assert llm.engine.unfinished == 0
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.full.reserved == 0


def mixed_lines(count: int) -> list[Json | bytes]:
    """Requests of different kinds and lengths, most without a seed."""
    lines: list[Json | bytes] = []
    for place in range(count):
        text = "abcdefg"[place % 5 :] * (1 + place % 4)
        body: Json = {"max_tokens": 1 + place * 7 % 31, "ignore_eos": True, "n": 1 + place % 2}
        if place % 3 == 2:
            body |= {"messages": [{"role": "user", "content": text}]}
            lines.append(line(f"chat {place}", CHAT, **body))
        else:
            prompt: Any = [text, text] if place % 4 == 1 else text
            lines.append(line(f"text {place}", COMPLETIONS, prompt=prompt, **body))
    return lines
