"""Chat messages in one form, whatever form a client sent.

Templates are written for plain strings and differ in what else they understand, so lists of parts, nulls and
empty tool lists are resolved here, once, before any template sees them.
"""

import json
from typing import Any

from mimo_jax.errors import RequestError, short

_ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns fresh messages whose `content` is a string, as chat templates expect; the input is not changed.

    - Text parts are joined by a newline; an empty list is "".
    - null content of an assistant is ""; so is content that is absent. Other roles need content.
    - The role "developer" becomes "system", the name templates know.
    - Fields that are null, and an empty `tool_calls`, are dropped. Arguments of tool calls given as JSON text
      become the object they describe. Other fields (name, tool_call_id, reasoning_content) pass unchanged.

    Raises RequestError naming the message for an empty list, an unknown role, and content or a part of
    another kind.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is empty; at least one message is needed", param="messages")
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is {short(message)}; an object with role and content is needed", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role is {short(role)}; allowed are {', '.join(_ROLES)}", param=f"{where}.role")
    result = {key: value for key, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content_text(message.get("content"), role, f"{where}.content")
    tool_calls = result.pop("tool_calls", None)
    if tool_calls:
        result["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls")
    return result


def _content_text(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))
    found = "missing or null" if content is None else f"of type {type(content).__name__}"
    raise RequestError(f"{where} is {found}; a string or a list of text parts is needed", param=where)


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise RequestError(f'{where} has the type {short(kind)}; only "text" is supported', param=where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text is {short(part.get('text'))}; a string is needed", param=where)
    return str(part["text"])


def _tool_calls(tool_calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, list):
        raise RequestError(f"{where} is of type {type(tool_calls).__name__}; a list is needed", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(tool_calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has no function with a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is no JSON ({error})", param=where) from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments is no JSON object", param=where)
    return {**call, "function": {**function, "arguments": arguments}}
