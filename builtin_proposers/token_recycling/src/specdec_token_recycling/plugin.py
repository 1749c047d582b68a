"""The method `token_recycling` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.types import EngineContext, ProposerCapabilities
    from specdec_token_recycling.config import TokenRecyclingConfig
    from specdec_token_recycling.proposer import TokenRecyclingProposer


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_token_recycling.config import TokenRecyclingConfig

    return TokenRecyclingConfig


@hookimpl
def check(config: TokenRecyclingConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that a draft may be as large as the tree."""
    from specdec_token_recycling.proposer import check as check_method

    return check_method(config, engine)


@hookimpl
def propose(config: TokenRecyclingConfig, engine: EngineContext) -> TokenRecyclingProposer:
    """Build the proposer."""
    from specdec_token_recycling.proposer import TokenRecyclingProposer

    return TokenRecyclingProposer(config, engine)
