"""The method `composite` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.types import EngineContext, ProposerCapabilities
    from specdec_composite.composite import CompositeProposer
    from specdec_composite.config import CompositeConfig


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_composite.config import CompositeConfig

    return CompositeConfig


@hookimpl
def check(config: CompositeConfig, engine: EngineContext) -> ProposerCapabilities:
    """Let the members check themselves against the target."""
    from specdec_composite.build import check_members

    return check_members(config, engine)


@hookimpl
def propose(config: CompositeConfig, engine: EngineContext) -> CompositeProposer:
    """Build the members and the proposer."""
    from specdec_composite.build import build_members
    from specdec_composite.composite import CompositeProposer

    return CompositeProposer(
        build_members(config, engine), choose=config.choose, vocab_size=engine.target_info.vocab_size
    )
