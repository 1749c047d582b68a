"""The members' tables read and checked; what is wrong in one is said with its place in the list."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.config.problems import (
    InvalidValueError,
    MissingSettingError,
    Problems,
    SeveralProblemsError,
    UnknownSettingError,
)
from specdec.errors import ConfigError, ModelNameError, SpecdecError
from specdec_composite.config import MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from specdec.registry import Registry

_SECTION = "speculative"


@frozen(kw_only=True)
class MemberOptions:
    """One member's table."""

    method: str
    config: Any
    """The options of the method, as its own class of options."""
    num_speculative_tokens: int | None
    """Most draft tokens of this member; None: as many as the engine drafts."""


def read_members(tables: Sequence[Mapping[str, Any]], registry: Registry) -> list[MemberOptions]:
    """Check all members; imports their methods, and nothing heavy.

    Raises:
        ConfigError: an option of a member is wrong; the path names the member (``speculative.proposers[1].model``).
        PluginError: a member's method is not installed or cannot be used.
    """
    problems, members = Problems(), []
    for index, table in enumerate(tables):
        with problems.gathered():
            members.append(_member(table, f"{MEMBERS}[{index}]", registry))
    problems.settle()
    return members


def _member(table: Mapping[str, Any], path: str, registry: Registry) -> MemberOptions:
    options = dict(table)
    method = options.pop("method")
    limit = options.pop("num_speculative_tokens", None)
    with placed_in(path):
        config = registry.plugin_config("proposer", method, options)
    return MemberOptions(method=method, config=config, num_speculative_tokens=limit)


@contextmanager
def placed_in(member: str) -> Iterator[None]:
    """What is wrong with an option inside is said with the member's path in front of it."""
    try:
        yield
    except ConfigError as error:
        raise _placed(error, member) from error
    except ModelNameError as error:
        raise error.moved(_moved(error.option, member)) from error


def _moved(path: str, member: str) -> str:
    return f"{member}{path.removeprefix(_SECTION)}"


def _placed(error: SpecdecError, member: str) -> SpecdecError:
    """The same fault with the member's path in front of the option."""
    if isinstance(error, SeveralProblemsError):
        return SeveralProblemsError([_placed(problem, member) for problem in error.problems])
    if not isinstance(error, ConfigError):
        return error
    moved = _moved(error.path or _SECTION, member)
    if isinstance(error, InvalidValueError | UnknownSettingError):
        return error.moved(moved, None)
    if isinstance(error, MissingSettingError):
        return MissingSettingError(moved, error.remedy)
    return ConfigError(str(error).replace(f"{_SECTION}.", f"{member}."), path=moved)
