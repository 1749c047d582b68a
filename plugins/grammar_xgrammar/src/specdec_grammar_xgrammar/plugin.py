"""The hooks of the grammar backend ``xgrammar``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl
from specdec_grammar_xgrammar.config import XGrammarConfig

if TYPE_CHECKING:
    from specdec.grammar import GrammarBackend
    from specdec.types import EngineContext


@hookimpl
def config_class() -> type:
    """The options that stand in ``grammar_options``."""
    return XGrammarConfig


@hookimpl
def grammar(config: XGrammarConfig, engine: EngineContext) -> GrammarBackend:
    """Build the backend for an engine."""
    from specdec_grammar_xgrammar.backend import XGrammarBackend

    return XGrammarBackend(config, engine)
