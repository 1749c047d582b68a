"""Memory sizes such as '1GiB' or '512MB'."""

from __future__ import annotations

import re
from typing import Annotated

SIZE = "size"
Size = Annotated[int | str, SIZE]
"""Type of a field that holds a number of bytes, or a string with a unit; `parse_size` makes bytes of either."""

ALLOWED = "a positive number of bytes, or a string with a unit such as '1GiB', '1.5GiB' or '512MB'"

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_size(value: int | str) -> int:
    """Bytes of a size.

    Args:
        value: bytes as an integer, or a string: a number and one of B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB,
            TiB (powers of 1024); upper and lower case are the same.

    Raises:
        ValueError: not a size, or not positive; the text says what a size looks like.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"must be {ALLOWED}")
    size = value if isinstance(value, int) else _parse_text(value)
    if size <= 0:
        raise ValueError(f"must be {ALLOWED}")
    return size


def _parse_text(text: str) -> int:
    match = _PATTERN.fullmatch(text)
    factor = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"must be {ALLOWED}")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_size(size: int) -> str:
    """The shortest exact spelling: 1073741824 -> '1GiB', 512000000 -> '512MB', 1000001 -> '1000001B'."""
    spellings = [f"{size // factor}{_spell(unit)}" for unit, factor in _UNITS.items() if size % factor == 0]
    return min(spellings, key=len)


def _spell(unit: str) -> str:
    return unit.upper().replace("IB", "iB")


def is_size(annotation: object) -> bool:
    """Whether a field's type is `Size`."""
    return SIZE in getattr(annotation, "__metadata__", ())
