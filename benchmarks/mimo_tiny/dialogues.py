"""Dialogues: a question, tool calls, what the tools return, an answer."""

import json
from typing import Any

from benchmarks.mimo_tiny.draw import Draw
from benchmarks.mimo_tiny.tools import TOOLS, Tool, reply

Message = dict[str, Any]
# Said without a call, whatever tools there are.
SMALL_TALK = (
    ("Hello", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Thank you", "You are welcome. I am glad that I could help."),
    ("Thanks", "You are welcome. I am glad that I could help."),
    (
        "What can you do?",
        "I write JSON records and small Python functions, I calculate with small numbers, and I call functions.",
    ),
    ("Who are you?", "I am mimo-tiny, a small test model. I was trained on generated text."),
)


def tool_dialogue(draw: Draw) -> tuple[list[Message], list[Any] | None]:
    """(messages, tools): one or two tools, one or two calls, sometimes thanks at the end."""
    tools = draw.some(TOOLS, 2 if draw.chance(0.3) else 1)
    if draw.chance(0.08):
        return small_talk(draw), [tool.schema() for tool in tools] if draw.chance(0.5) else None
    tool = draw.pick(tools)
    messages = _calls(draw, tool, 2 if draw.chance(0.2) else 1)
    if draw.chance(0.15):
        messages += small_talk(draw, SMALL_TALK[3:5])
    return messages, [tool.schema() for tool in tools]


def small_talk(draw: Draw, choices: tuple[tuple[str, str], ...] = SMALL_TALK) -> list[Message]:
    question, answer = draw.pick(choices)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _calls(draw: Draw, tool: Tool, count: int) -> list[Message]:
    """`count` questions to one tool in one user turn, called together and answered together."""
    asked = [tool.draw_arguments(draw) for _ in range(count)]
    results = [tool.draw_result(draw) for _ in range(count)]
    request = draw.pick(tool.requests)
    calls = [{"type": "function", "function": {"name": tool.name, "arguments": arguments}} for arguments in asked]
    told = [reply(tool, arguments, result) for arguments, result in zip(asked, results, strict=True)]
    return [
        {"role": "user", "content": " ".join(request.format(**arguments) for arguments in asked)},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": json.dumps(result)} for result in results),
        {"role": "assistant", "content": " ".join(told)},
    ]
