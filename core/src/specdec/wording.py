"""How messages put values and faults: as configuration files and people write them, not as Python does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LONGEST = 80
"""Characters of a value that are shown."""


def shown(value: Any) -> str:
    """A value as JSON writes it, on its own text in single quotes; long ones lose their middle."""
    text = repr(value) if isinstance(value, str) else _as_json(value)
    if len(text) <= LONGEST:
        return text
    half = (LONGEST - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def _as_json(value: Any) -> str:
    try:
        return json.dumps(_plain(value), ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # keys of other types, or a table that holds itself
        return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def reason_of(error: BaseException) -> str:
    """What went wrong, in the first line of an exception's text: of an operating system's error without its number."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
