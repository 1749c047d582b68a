"""Conversations as clients send them -> as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specdec_server.http.bodies import num_parts
from specdec_server.http.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MOST_PARTS = 100_000
"""Lists, objects and keys that the arguments of one call may have: they are parsed, which stops everything else."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def for_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain text as content.

    Text parts are joined line by line, "developer" becomes "system", and the arguments of tool calls, which clients
    send as JSON text, become objects, because that is what templates expect.

    Raises:
        APIError: a message has a form that no template could take, or holds an image or sound.
    """
    if not messages:
        raise invalid("messages is empty; send at least one message", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def last_of_assistant(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the last message if it is the assistant's, else nothing."""
    return str(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else ""


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}", "messages")
    result = dict(message)
    result["role"] = "system" if role == "developer" else role
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(_list(calls, f"{where}.tool_calls"))
        ]
    else:
        result.pop("tool_calls", None)
    content = message.get("content")
    if content is None and role != "assistant":
        raise invalid(f"{where} has no content", "messages")
    result["content"] = "" if content is None else text_of(content, where)
    return result


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, or a list of text parts, between which there is a line break."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(_list(content, f"{where}.content", "a string or a list")):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise invalid(f"{where}.content[{number}] is of type {kind!r}; only text is understood here", "messages")
        texts.append(text)
    return "\n".join(texts)


def _list(value: Any, where: str, allowed: str = "a list") -> list[Any]:
    if not isinstance(value, list):
        raise invalid(f"{where} must be {allowed}, not {type(value).__name__}", "messages")
    return value


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} must have function.name", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        if (parts := num_parts(arguments.encode("utf-8", "replace"), MOST_PARTS)) > MOST_PARTS:
            most = f"{parts} lists, objects and keys; at most {MOST_PARTS} are taken"
            raise invalid(f"{where}.function.arguments has {most}", "messages")
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise invalid(f"{where}.function.arguments is not JSON: {error}", "messages") from error
        except (RecursionError, ValueError) as error:
            what = "is nested too deeply" if isinstance(error, RecursionError) else "has a number with too many digits"
            raise invalid(f"{where}.function.arguments {what}", "messages") from error
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
