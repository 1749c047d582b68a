"""Whether an object still refers to something."""

from __future__ import annotations

import gc
import types
from typing import Any

_NOT_STATE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
_MAX_OBJECTS = 200_000


def reaches_string(start: Any, text: str) -> bool:
    """Whether the state of an object, followed through containers and attributes, contains a string.

    Classes, modules and functions are not followed.

    Args:
        start: where to begin.
        text: the string, which should be a distinctive one.
    """
    stack, known = [start], {id(start)}
    while stack and len(known) < _MAX_OBJECTS:
        for held in _held_by(stack.pop()):
            if isinstance(held, str):
                if held == text:
                    return True
            elif id(held) not in known and not isinstance(held, _NOT_STATE):
                known.add(id(held))
                stack.append(held)
    return False


def _held_by(holder: Any) -> list[Any]:
    """What an object refers to; the garbage collector leaves out a dictionary's keys when all are strings."""
    return [*holder.keys(), *holder.values()] if type(holder) is dict else gc.get_referents(holder)
