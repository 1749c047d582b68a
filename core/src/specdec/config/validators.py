"""attrs validators whose refusals name the setting's path, its value and what is allowed.

They check types strictly: True is not an integer and '7' is not a number. Plugins may use them in their own
configuration classes; a class may name the section its fields belong to in ``SECTION``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from specdec.config.problems import InvalidValueError, closest, join
from specdec.config.sizes import ALLOWED as SIZE_ALLOWED
from specdec.config.sizes import parse_size
from specdec.wording import shown


@attrs.frozen
class Check:
    """A validator: a test, and in words what passes it."""

    passes: Callable[[Any], bool]
    allowed: str
    """The end of the sentence "must be ..."; the command line's help shows it too."""
    names: tuple[str, ...] = ()
    """The accepted names when there are few, for a "did you mean"."""

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        """Raise `InvalidValueError` unless the value passes."""
        if self.passes(value):
            return
        path = join(getattr(type(instance), "SECTION", ""), attribute.name)
        raise InvalidValueError(path, value, self.allowed, hint=hint_for(value, self))


def hint_for(value: Any, check: Check | None) -> str | None:
    """A second sentence about a refused value: the nearest name, or the spelling without quotes."""
    if isinstance(value, str) and check is not None and check.names:
        near = closest(value, check.names)
        return f"Did you mean {near!r}?" if near else None
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d+)?|true|false", value, re.IGNORECASE):
        return f"{value!r} is a string: write {value} without quotes."
    if isinstance(value, bool):
        return f"{shown(value)} is a boolean."
    return None


def integer(low: int | None = None, high: int | None = None) -> Check:
    """An int (not bool) within bounds, both included."""

    def passes(value: Any) -> bool:
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            and (low is None or value >= low)
            and (high is None or value <= high)
        )

    return Check(passes, f"an integer{_range(low, high)}")


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Check:
    """A finite int or float (not bool) within bounds; ``above`` excludes the bound itself."""

    def passes(value: Any) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (low is None or value >= low)
            and (high is None or value <= high)
            and (above is None or value > above)
        )

    bounds = f" above {above:g}" if above is not None else _range(low, high)
    return Check(passes, f"a number{bounds}")


def boolean() -> Check:
    """True or False."""
    return Check(lambda value: isinstance(value, bool), "true or false")


def choice(*names: str) -> Check:
    """One of a few names."""
    return Check(lambda value: isinstance(value, str) and value in names, _listed(names), names)


def text(pattern: str | None = None, allowed: str = "a non-empty string") -> Check:
    """A non-empty string, matching ``pattern`` as a whole when one is given."""
    compiled = re.compile(pattern or r"(?s).*\S.*")
    return Check(lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None, allowed)


def names() -> Check:
    """A tuple of non-empty strings."""

    def passes(value: Any) -> bool:
        return isinstance(value, tuple) and all(isinstance(item, str) and item.strip() for item in value)

    return Check(passes, "a list of names")


def table(values: type | None = None) -> Check:
    """A mapping with string keys; ``values`` restricts the type of its values."""

    def passes(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and (values is None or isinstance(item, values)) for key, item in value.items()
        )

    return Check(passes, "a table" if values is None else f"a table of {values.__name__} values")


def instance(cls: type, allowed: str) -> Check:
    """An instance of a configuration class."""
    return Check(lambda value: isinstance(value, cls), allowed)


def as_tuple(value: Any) -> Any:
    """Converter: lists become tuples; anything else is left for the validator to judge."""
    return tuple(value) if isinstance(value, list) else value


def as_dict(value: Any) -> Any:
    """Converter: a mapping is copied, so that the caller's later changes do not reach a frozen configuration."""
    return dict(value) if isinstance(value, Mapping) else value


def size() -> Check:
    """A positive number of bytes, or a string that `specdec.config.sizes.parse_size` takes."""

    def passes(value: Any) -> bool:
        try:
            return parse_size(value) > 0
        except ValueError:
            return False

    return Check(passes, SIZE_ALLOWED)


def find_check(validator: Any) -> Check | None:
    """The `Check` in a field's validator, looking inside `attrs.validators.optional` and `and_`."""
    if isinstance(validator, Check):
        return validator
    inner = getattr(validator, "validator", None)
    candidates = (inner,) if inner is not None else getattr(validator, "_validators", ())
    return next((check for check in map(find_check, candidates) if check is not None), None)


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"


def _listed(items: tuple[str, ...]) -> str:
    quoted = [repr(item) for item in items]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
