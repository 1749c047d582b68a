"""From the members' tables to members; what is wrong in a table is said with its place in the list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.config.problems import (
    InvalidValueError,
    MissingSettingError,
    SeveralProblemsError,
    UnknownSettingError,
)
from specdec.errors import ConfigError
from specdec_composite.config import MEMBERS
from specdec_composite.member import Member

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec_composite.config import CompositeConfig

_SECTION = "speculative"


def build_members(config: CompositeConfig, engine: EngineContext) -> list[Member]:
    """Build the proposers that the configuration names.

    Raises:
        ConfigError: an option of a member is wrong; the path names the member (``speculative.proposers[1].model``).
        PluginError: a member's method is not installed or cannot serve the target.
    """
    if engine.registry is None:
        raise ConfigError("the method composite builds other methods, which needs an engine", path=MEMBERS)
    members: list[Member] = []
    for index, table in enumerate(config.proposers):
        options = dict(table)
        method = options.pop("method")
        limit = options.pop("num_speculative_tokens", engine.num_speculative_tokens)
        try:
            own = engine.registry.plugin_config("proposer", method, options)
        except ConfigError as error:
            raise _placed(error, f"{MEMBERS}[{index}]") from error
        proposer = engine.registry.create("proposer", method, "propose", config=own, engine=engine)
        members.append(
            Member(
                proposer,
                name=_unused(method, members),
                label=engine.registry.describe("proposer", method),
                max_draft_tokens=min(limit, engine.num_speculative_tokens),
                max_faults=config.max_member_faults,
            )
        )
    return members


def _unused(method: str, members: list[Member]) -> str:
    """The method's name, with a number when it is there already."""
    taken = {member.name for member in members}
    names = [method, *(f"{method}#{number}" for number in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)


def _placed(error: ConfigError, member: str) -> ConfigError:
    """The same fault with the member's path in front of the option."""
    if isinstance(error, SeveralProblemsError):
        return SeveralProblemsError([_placed(problem, member) for problem in error.problems])
    path = error.path or _SECTION
    moved = f"{member}{path.removeprefix(_SECTION)}"
    if isinstance(error, InvalidValueError | UnknownSettingError):
        return error.moved(moved, None)
    if isinstance(error, MissingSettingError):
        return MissingSettingError(moved, error.remedy)
    return ConfigError(str(error).replace(f"{_SECTION}.", f"{member}."), path=moved)
