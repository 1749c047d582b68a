"""The method `suffix` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec_suffix.config import SuffixConfig
    from specdec_suffix.suffix import SuffixProposer


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_suffix.config import SuffixConfig

    return SuffixConfig


@hookimpl
def propose(config: SuffixConfig, engine: EngineContext) -> SuffixProposer:
    """Build the proposer."""
    from specdec_suffix.suffix import SuffixProposer

    return SuffixProposer(config, engine)
