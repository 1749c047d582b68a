"""Text from the command line or an environment variable -> the value its setting's type asks for."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from specdec.config.introspect import unwrap_optional
from specdec.config.problems import InvalidValueError
from specdec.config.sizes import is_size

SPECULATIVE_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
TABLE_EXAMPLE = '{"name": "value"}'

_SEVERAL = {int: "integers", float: "numbers", str: "names"}

_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


def parse_text(annotation: Any, text: str, path: str, origin: str) -> Any:
    """Parse the text of one setting.

    Args:
        annotation: the field's type. Lists are written ``a,b``; tables as JSON objects; ``none`` unsets a setting that
            may be None.
        text: what was typed.
        path: dotted path, for the message.
        origin: the option or variable, for the message.

    Raises:
        InvalidValueError: the text is not of that type.
    """
    kind, optional = unwrap_optional(annotation)
    if optional and text.strip().lower() in ("none", "null"):
        return None
    try:
        return _parser(kind)(text)
    except (ValueError, TypeError) as error:
        raise InvalidValueError(path, text, str(error), origin=origin) from None


def parse_untyped(text: str) -> Any:
    """Parse the value of an option whose type is not known here: JSON when it is JSON, otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _parser(kind: Any) -> Callable[[str], Any]:
    simple: dict[Any, Callable[[str], Any]] = {int: _int, float: _float, bool: _bool, str: str}
    if kind in simple:
        return simple[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal or is_size(kind):
        return str
    if is_list_of_scalars(kind):
        return lambda text: _list(arguments[0], text)
    if origin in (dict, Mapping):
        return lambda text: parse_object(text, TABLE_EXAMPLE)
    return parse_object if attrs.has(kind) else parse_untyped


def _list(kind: Any, text: str) -> list[Any]:
    item = _parser(kind)
    try:
        return [item(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{_SEVERAL[kind]} with commas between them") from None


def is_list_of_scalars(kind: Any, *scalars: type) -> bool:
    """Whether a type is a list or tuple of strings or numbers, or of the ``scalars`` named."""
    arguments = typing.get_args(kind)
    return typing.get_origin(kind) in (list, tuple, set, frozenset) and arguments[0] in (scalars or (str, int, float))


def parse_object(text: str, example: str = SPECULATIVE_EXAMPLE) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: what was typed.
        example: an object, for the message.

    Raises:
        ValueError: not JSON, or not an object; the text is the end of "must be ...".
    """
    allowed = f"a JSON object such as {example!r}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{allowed} ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(allowed)
    return value


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE
    raise ValueError("true or false")
