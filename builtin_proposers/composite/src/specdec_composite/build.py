"""From the members' tables to members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import ConfigError, DraftLengthError
from specdec.types import ProposerCapabilities
from specdec_composite.config import MEMBERS
from specdec_composite.member import Member
from specdec_composite.options import placed_in, read_members

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec_composite.config import CompositeConfig


def check_members(config: CompositeConfig, engine: EngineContext) -> ProposerCapabilities:
    """Let each member check itself against the target, before it is loaded.

    Returns:
        What is known of the drafts: trees where a member drafts some, draft probabilities where one may give them.

    Raises:
        SpecdecError: what a member raised; the path of an option names the member.
    """
    if engine.registry is None:
        raise ConfigError("the method composite builds other methods, which needs an engine", path=MEMBERS)
    trees = False
    for index, options in enumerate(read_members(config.proposers, engine.registry)):
        with placed_in(f"{MEMBERS}[{index}]"):
            drafts = engine.registry.check(options.method, options.config, engine)
        trees = trees or (drafts is not None and drafts.trees)
    return ProposerCapabilities(trees=trees, draft_probs=True)


def build_members(config: CompositeConfig, engine: EngineContext) -> list[Member]:
    """Build the proposers that the configuration names.

    Raises:
        ConfigError: an option of a member is wrong; the path names the member (``speculative.proposers[1].model``).
        PluginError: a member's method is not installed or cannot serve the target.
    """
    if engine.registry is None:
        raise ConfigError("the method composite builds other methods, which needs an engine", path=MEMBERS)
    members: list[Member] = []
    for index, options in enumerate(read_members(config.proposers, engine.registry)):
        method = options.method
        with placed_in(f"{MEMBERS}[{index}]"):
            proposer = engine.registry.create("proposer", method, "propose", config=options.config, engine=engine)
        label = engine.registry.describe("proposer", method)
        limit, most = options.num_speculative_tokens, proposer.capabilities.max_draft_tokens
        if limit is not None and most is not None and limit > most:
            path = f"{MEMBERS}[{index}].num_speculative_tokens"
            raise DraftLengthError(path, limit, label, most)
        reach = [number for number in (limit, most, engine.num_speculative_tokens) if number is not None]
        members.append(
            Member(
                proposer,
                name=_unused(method, members),
                label=label,
                max_draft_tokens=min(reach),
                max_faults=config.max_member_faults,
            )
        )
    return members


def _unused(method: str, members: list[Member]) -> str:
    """The method's name, with a number when it is there already."""
    taken = {member.name for member in members}
    names = [method, *(f"{method}#{number}" for number in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)
