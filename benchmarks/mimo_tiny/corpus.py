"""The text mimo-tiny learns: conversations of four kinds, generated from a seed and rendered with its chat template.

Training and held-out text are drawn from different seeds, and no question of one is asked in the other: the checksum of
the first question says to which part a document belongs.
"""

import enum
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.mimo_tiny.arithmetic import arithmetic_exchange
from benchmarks.mimo_tiny.dialogues import SMALL_TALK, Message, tool_dialogue
from benchmarks.mimo_tiny.draw import Draw
from benchmarks.mimo_tiny.functions import function_exchange
from benchmarks.mimo_tiny.json_records import json_exchange
from mimo_jax.text import ChatTemplate

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer briefly.", "You are an assistant that writes JSON and Python.")
_HELD_OUT_IN = 16  # one question in so many


class Part(enum.Enum):
    """The value is the seed from which the part's documents are drawn."""

    TRAIN = 20260401
    HELD_OUT = 20260402


@dataclass(frozen=True)
class Document:
    """One conversation. `kind` is json, function, arithmetic or tools."""

    kind: str
    messages: tuple[Message, ...]
    tools: list[Any] | None = None

    def text(self) -> str:
        """The whole conversation as the model reads it."""
        return chat_template().render(list(self.messages), tools=self.tools, add_generation_prompt=False)

    def prompt(self) -> str:
        """Up to the first answer of the assistant, which `answer` is."""
        first = next(place for place, message in enumerate(self.messages) if message["role"] == "assistant")
        return chat_template().render(list(self.messages[:first]), tools=self.tools, add_generation_prompt=True)

    def answer(self) -> str:
        """What stands behind `prompt` until the turn ends."""
        return self.text().removeprefix(self.prompt()).partition("<|im_end|>")[0]


EXCHANGES: dict[str, Callable[[Draw], tuple[str, str]]] = {
    "json": json_exchange,
    "function": function_exchange,
    "arithmetic": arithmetic_exchange,
}
KINDS = (*EXCHANGES, "tools")


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), {}, origin=TEMPLATE.name)


def documents(part: Part) -> Iterator[Document]:
    """An endless stream of documents, the kinds in turn."""
    number = 0
    while True:
        kind = KINDS[number % len(KINDS)]
        document = _document(kind, Draw(part.value * 1_000_000 + number))
        if _belongs(document, part):
            yield document
        number += 1


def _belongs(document: Document, part: Part) -> bool:
    question = next(message["content"] for message in document.messages if message["role"] == "user")
    if question in dict(SMALL_TALK):  # too few for two parts
        return part is Part.TRAIN
    held_out = zlib.crc32(question.encode()) % _HELD_OUT_IN == 0
    return held_out == (part is Part.HELD_OUT)


def _document(kind: str, draw: Draw) -> Document:
    messages: list[Message] = []
    tools: list[Any] | None = None
    if draw.chance(0.2):
        messages.append({"role": "system", "content": draw.pick(SYSTEM_TEXTS)})
    if kind == "tools":
        conversation, tools = tool_dialogue(draw)
        messages += conversation
    else:
        messages += _turn(EXCHANGES[kind](draw))
        if draw.chance(0.15):
            messages += _turn(EXCHANGES[draw.pick(tuple(EXCHANGES))](draw))
    return Document(kind, tuple(messages), tools)


def _turn(exchange: tuple[str, str]) -> list[Message]:
    request, answer = exchange
    return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
