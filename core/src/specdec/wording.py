"""How messages put values and faults: as configuration files and people write them, not as Python does."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from specdec.errors import SpecdecError

LONGEST = 80
"""Characters of a value that are shown."""

LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "pluggy"} - {"__main__"}
"""Packages that raise when they are called wrongly; what called them is the place to look at."""
_OWN = __name__.partition(".")[0]


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


def cause_of(error: BaseException) -> str:
    """An exception in a line: its type, its text, and where to look for it.

    What specdec raises on purpose names no place: its text says what is wrong.
    """
    text = f"{type(error).__name__}: {error}"
    place = None if isinstance(error, SpecdecError) else place_of(error)
    return text if place is None else f"{text} ({place})"


def place_of(error: BaseException) -> str | None:
    """Module and line of the innermost frame outside specdec and the large libraries, else of specdec's innermost."""
    at = frame_at_fault(error.__traceback__)
    if at is None:
        return None
    module, line = _module_of(at[0]), at[1]
    return f"{_file_of_program() if module == '__main__' else module}, line {line}"


def frame_at_fault(start: TracebackType | None) -> tuple[FrameType, int] | None:
    """The innermost frame outside specdec and the large libraries, else specdec's innermost, and its line.

    Args:
        start: an exception's traceback, or the part of it that is looked at.
    """
    frames = list(traceback.walk_tb(start))
    outside = [at for at in frames if _package_of(at[0]) not in {_OWN, *LIBRARIES}]
    inside = [at for at in frames if _package_of(at[0]) == _OWN]
    return (outside or inside)[-1] if outside or inside else None


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package_of(frame: FrameType) -> str:
    return _module_of(frame).partition(".")[0]


def _file_of_program() -> str:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").name
