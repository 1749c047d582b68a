"""Tools: their definitions, and the calls in a model's text.

Models write calls in one of a few ways, all of them JSON: between ``<tool_call>`` tags (Hermes, Qwen), after
``[TOOL_CALLS]`` (Mistral), or as the whole answer, one object or a list of them (Llama 3.1 and others, some after
``<|python_tag|>``). An object has ``name`` and ``arguments`` or ``parameters``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from attrs import define, frozen

from specdec_server.api.service import new_id
from specdec_server.http.errors import invalid

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = (OPEN, "[TOOL_CALLS]", "<|python_tag|>")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


@frozen
class ToolCall:
    """One call."""

    name: str
    arguments: str
    """JSON text."""

    def as_dict(self, index: int | None = None) -> dict[str, Any]:
        """As the chat API has it; with ``index`` in streams."""
        call = {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


@frozen
class ToolChoice:
    """What a request allows the model to do with its tools."""

    tools: tuple[dict[str, Any], ...] = ()
    mode: str = "none"
    """'none', 'auto', 'required', or 'named'."""
    name: str | None = None
    parallel: bool = True
    """Whether one answer may have several calls."""

    @property
    def is_on(self) -> bool:
        """Whether calls are looked for in the answer."""
        return self.mode != "none"

    def constraint(self) -> dict[str, Any] | None:
        """What the text must look like, as structured output; None when it is free."""
        if self.mode == "named":
            return {"json": next(_parameters(tool) for tool in self.tools if _name(tool) == self.name)}
        if self.mode == "required":
            calls = [
                {
                    "type": "object",
                    "properties": {"name": {"const": _name(tool)}, "arguments": _parameters(tool)},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
                for tool in self.tools
            ]
            most = {} if self.parallel else {"maxItems": 1}
            return {"json": {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}}
        return None


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return dict(tool["function"].get("parameters") or {"type": "object"})


def read_choice(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, *, parallel: bool = True
) -> ToolChoice:
    """Check ``tools`` and ``tool_choice``.

    Args:
        tools: as sent.
        choice: as sent.
        parallel: whether one answer may have several calls.

    Raises:
        APIError: a tool is no function, or the choice fits none.
    """
    checked = tuple(_check_tool(tool, number) for number, tool in enumerate(tools or ()))
    if not checked:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return ToolChoice()
    if choice is None or choice in ("auto", "none", "required"):
        return ToolChoice(checked, str(choice or "auto"), parallel=parallel)
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    known = [_name(tool) for tool in checked]
    if name not in known:
        raise invalid(
            f"tool_choice is {choice!r}; it must be auto, none, required or name one of {known}", "tool_choice"
        )
    return ToolChoice(checked, "named", str(name))


def _check_tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type", "function") == "function" and "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}  # responses API
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if (
        tool.get("type") != "function"
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(parameters, dict | None)
    ):
        raise invalid(f"tools[{number}] must be a function with a name and an object of parameters", "tools")
    return tool


def find_calls(text: str, choice: ToolChoice) -> tuple[str, list[ToolCall]]:
    """The text beside the calls, and the calls; only the first where the choice allows one.

    Text that looks like a call but is not JSON with the name of a given tool stays text.
    """
    content, calls = _find_calls(text, choice)
    return content, calls if choice.parallel else calls[:1]


def _find_calls(text: str, choice: ToolChoice) -> tuple[str, list[ToolCall]]:
    if choice.mode == "named":
        return "", [ToolCall(str(choice.name), text.strip())]
    known = {_name(tool) for tool in choice.tools}
    if OPEN in text:
        return _between_tags(text, known)
    stripped = text.strip()
    for marker in _MARKERS[1:]:
        before, found, after = text.partition(marker)
        if found and (calls := _parse(after.strip(), known)):
            return before, calls
    fenced = _FENCE.fullmatch(stripped)
    calls = _parse(fenced[1] if fenced else stripped, known)
    return ("", calls) if calls else (text, [])


def _between_tags(text: str, known: set[str]) -> tuple[str, list[ToolCall]]:
    content, calls, rest = "", list[ToolCall](), text
    while OPEN in rest:
        before, _, after = rest.partition(OPEN)
        body, _, rest = after.partition(CLOSE)
        content += before
        found = _parse(body.strip(), known)
        if found:
            calls += found
        else:
            content += OPEN + body + CLOSE
    content += rest
    return (content, calls) if calls else (text, [])


def _parse(text: str, known: set[str]) -> list[ToolCall]:
    if not text.startswith(("{", "[")):
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(item, known) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if calls and all(calls) else []


def _call(item: Any, known: set[str]) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
    function = item.get("function") if isinstance(item.get("function"), dict) else item
    assert isinstance(function, dict)
    arguments = function.get("arguments", function.get("parameters", {}))
    if function.get("name") not in known or not isinstance(arguments, dict | str):
        return None
    return ToolCall(function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


@define
class HeldText:
    """The text of a stream in which calls may come: held back from where one might begin."""

    _choice: ToolChoice
    _text: str = ""
    _sent: int = 0

    def add(self, text: str) -> str:
        """Take new text; return what can be sent at once."""
        self._text += text
        if self._choice.mode in ("named", "required") or self._text.lstrip()[:1] in ("{", "[", "`", ""):
            return ""
        end = self._safe_end()
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left: text to send, and the calls."""
        content, calls = find_calls(self._text, self._choice)
        if not calls:
            return self._text[self._sent :], []
        return content[self._sent :].rstrip(), calls

    def _safe_end(self) -> int:
        """Where the first marker begins, whole or in part at the end."""
        ends = [self._text.find(marker) for marker in _MARKERS]
        whole = [end for end in ends if end >= 0]
        if whole:
            return min(whole)
        longest = max(map(len, _MARKERS)) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(marker.startswith(self._text[-size:]) for marker in _MARKERS):
                return len(self._text) - size
        return len(self._text)
