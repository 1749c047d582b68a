"""The ways a setting can be wrong, each an exception that carries the facts its message names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specdec.errors import ConfigError, SpecdecError
from specdec.wording import shown


class InvalidValueError(ConfigError):
    """A setting has a value that is not allowed.

    Attributes:
        path: dotted path of the setting, for example ``speculative.num_speculative_tokens``.
        value: what was given.
        allowed: what would be right, as the end of "must be ...".
        hint: one more sentence, or None.
        origin: where the value came from, or None when it was passed in Python.
    """

    def __init__(
        self, path: str, value: Any, allowed: str, *, hint: str | None = None, origin: str | None = None
    ) -> None:
        self.value = value
        self.allowed = allowed
        self.hint = hint
        self.origin = origin
        text = f"{path} = {shown(value)}{_place(origin)}: must be {allowed}."
        super().__init__(f"{text} {hint}" if hint else text, path=path)

    def moved(self, path: str, origin: str | None) -> InvalidValueError:
        """The same fault at another path or origin."""
        return InvalidValueError(path, self.value, self.allowed, hint=self.hint, origin=origin)


class UnknownSettingError(ConfigError):
    """No setting has this name.

    Attributes:
        path: dotted path as the user wrote it.
        known: the names that exist at this place.
        origin: the file and line, variable or option it came from, or None.
        advice: what to do, where that is known better than by the closest name.
    """

    def __init__(
        self, path: str, known: Iterable[str], *, origin: str | None = None, advice: str | None = None
    ) -> None:
        self.known = tuple(known)
        self.origin = origin
        self.advice = advice
        wrong = path.rpartition(".")[2]
        close = closest(wrong, self.known)
        if advice is not None:
            remedy = advice
        elif close is not None:
            remedy = f"Did you mean {close!r}?"
        else:
            remedy = f"Known here: {', '.join(self.known)}." if self.known else "No settings exist here."
        super().__init__(f"unknown setting {path!r}{_place(origin)}. {remedy}", path=path)

    def moved(self, path: str, origin: str | None) -> UnknownSettingError:
        """The same fault at another path or origin."""
        return UnknownSettingError(path, self.known, origin=origin, advice=self.advice)


class MissingSettingError(ConfigError):
    """A setting without a default was not given.

    Attributes:
        path: dotted path of the setting.
        remedy: how to give it.
    """

    def __init__(self, path: str, remedy: str) -> None:
        self.remedy = remedy
        super().__init__(f"{path} is not set. {remedy}", path=path)


class SettingsConflictError(ConfigError):
    """Two settings exclude each other, or one needs another; the message names both values."""


class SeveralProblemsError(ConfigError):
    """More than one setting is wrong.

    Attributes:
        problems: the errors, one for each setting.
    """

    def __init__(self, problems: Sequence[SpecdecError]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {with_notes(problem, ' (', ')')}" for problem in problems)
        super().__init__(f"{len(problems)} settings are wrong:\n{lines}", path=getattr(problems[0], "path", None))


class Problems:
    """Gathers what is wrong in several places, so that all of it is said at once."""

    def __init__(self) -> None:
        self._found: list[SpecdecError] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """What is raised inside waits for `settle`; the rest of the block is left out."""
        try:
            yield
        except SeveralProblemsError as error:
            self._found += error.problems
        except SpecdecError as error:
            self._found.append(error)

    def settle(self) -> None:
        """Raise what was gathered, if anything."""
        if self._found:
            raise together(self._found)


def with_notes(problem: SpecdecError, before: str = "\n  ", after: str = "") -> str:
    """A problem's text and its notes, which say where its setting came from."""
    return str(problem) + "".join(f"{before}{note}{after}" for note in getattr(problem, "__notes__", ()))


def together(problems: Sequence[SpecdecError]) -> SpecdecError:
    """One error that says all of them."""
    return problems[0] if len(problems) == 1 else SeveralProblemsError(problems)


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``word``, or None when none is near; ``cutoff`` 1.0 asks for equality."""
    names = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def join(section: str, name: str) -> str:
    """Path of ``name`` inside ``section``; the empty section is the top."""
    return f"{section}.{name}" if section else name


def _place(origin: str | None) -> str:
    return f" ({origin})" if origin else ""
