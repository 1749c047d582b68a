"""The method `ngram` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec_ngram.config import NgramConfig
    from specdec_ngram.ngram import NgramProposer


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_ngram.config import NgramConfig

    return NgramConfig


@hookimpl
def propose(config: NgramConfig, engine: EngineContext) -> NgramProposer:
    """Build the proposer."""
    from specdec_ngram.ngram import NgramProposer

    return NgramProposer(
        prompt_lookup_min=config.min_length,
        prompt_lookup_max=config.max_length,
        num_speculative_tokens=engine.num_speculative_tokens,
    )
