"""From the members' tables to members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import ConfigError
from specdec_composite.config import MEMBERS
from specdec_composite.member import Member
from specdec_composite.options import read_members

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec_composite.config import CompositeConfig


def build_members(config: CompositeConfig, engine: EngineContext) -> list[Member]:
    """Build the proposers that the configuration names.

    Raises:
        ConfigError: an option of a member is wrong; the path names the member (``speculative.proposers[1].model``).
        PluginError: a member's method is not installed or cannot serve the target.
    """
    if engine.registry is None:
        raise ConfigError("the method composite builds other methods, which needs an engine", path=MEMBERS)
    members: list[Member] = []
    for options in read_members(config.proposers, engine.registry):
        method = options.method
        limit = options.num_speculative_tokens or engine.num_speculative_tokens
        members.append(
            Member(
                engine.registry.create("proposer", method, "propose", config=options.config, engine=engine),
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
