"""Chat messages in every form clients send (case B25)."""

import copy
from typing import Any

import pytest

from mimo_jax.errors import CheckpointError, RequestError
from mimo_jax.text import ChatTemplate, normalise_messages

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

# What templates in the wild do with content: add it to a string, walk its parts, or look which it is.
STRING_ONLY = "{% for m in messages %}[{{ m['role'] + ': ' + m['content'] }}]{% endfor %}"
PARTS_ONLY = "{% for m in messages %}[{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}]{% endfor %}"
BOTH = (
    "{% for m in messages %}[{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}]{% endfor %}"
)


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def contents(*values: Any, role: str = "user") -> list[Any]:
    return [m["content"] for m in normalise_messages([{"role": role, "content": value} for value in values])]


def test_content_becomes_a_string() -> None:
    assert contents("Hi", [part("Hi")], [part("a"), part("b")], [], "") == ["Hi", "Hi", "a\nb", "", ""]


@pytest.mark.parametrize("template", [STRING_ONLY, PARTS_ONLY, BOTH])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_every_form_of_content_reaches_every_kind_of_template(template: str, role: str) -> None:
    chat = ChatTemplate(template, {}, origin="test")

    def shown(content: Any) -> str:
        return chat.render([{"role": role, "content": content}], add_generation_prompt=False)

    assert shown("Hi") == shown([part("Hi")]) == f"[{role}: Hi]"
    assert shown([part("a"), part("b")]) == f"[{role}: a\nb]"
    assert shown([]) == shown("") == f"[{role}: ]"


@pytest.mark.parametrize("template", [STRING_ONLY, PARTS_ONLY, BOTH])
def test_null_content_of_an_assistant_shows_as_nothing(template: str) -> None:
    chat = ChatTemplate(template, {}, origin="test")
    for message in ({"content": None}, {"content": None, "tool_calls": [CALL]}, {"tool_calls": [CALL]}):
        shown = chat.render([{"role": "assistant", **message}], add_generation_prompt=False)
        assert shown == "[assistant: ]"


def test_an_empty_tool_list_and_null_fields_are_absent() -> None:
    sent: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [],
        "name": None,
        "reasoning_content": "r",
    }
    assert normalise_messages([sent]) == [{"role": "assistant", "content": "x", "reasoning_content": "r"}]


def test_tool_arguments_become_the_object_they_describe() -> None:
    (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    empty = {"function": {"name": "f", "arguments": ""}}
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": [empty]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_the_developer_role_is_the_system_role() -> None:
    assert normalise_messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_the_input_is_not_changed_and_twice_is_once() -> None:
    sent: list[dict[str, Any]] = [{"role": "assistant", "content": [part("a")], "tool_calls": [CALL]}]
    kept = copy.deepcopy(sent)
    once = normalise_messages(sent)
    assert sent == kept
    assert normalise_messages(once) == once


@pytest.mark.parametrize(
    ("messages", "message", "param"),
    [
        ([], "messages is empty", "messages"),
        ("Hi", "messages is empty", "messages"),
        (["Hi"], "is 'Hi'; an object", "messages[0]"),
        ([{"content": "x"}], "role is None; allowed are system", "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "role is 'robot'", "messages[0].role"),
        ([{"role": "user", "content": None}], "missing or null", "messages[0].content"),
        ([{"role": "user"}], "missing or null", "messages[0].content"),
        ([{"role": "tool", "content": None}], "missing or null", "messages[0].content"),
        ([{"role": "user", "content": 3}], "of type int", "messages[0].content"),
        (
            [{"role": "user", "content": [part("a"), {"type": "image_url", "image_url": {}}]}],
            "type 'image_url'",
            "messages[0].content[1]",
        ),
        ([{"role": "user", "content": ["a"]}], "type 'str'", "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text is None", "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "of type str", "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "no function with a name", "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "is no JSON",
            "messages[0].tool_calls[0]",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "is no JSON object",
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_what_cannot_be_used_is_named(messages: Any, message: str, param: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        normalise_messages(messages)
    assert caught.value.param == param
    assert not isinstance(caught.value, CheckpointError)
