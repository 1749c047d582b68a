"""The method `extract_hidden_states` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec_extract_hidden_states.config import ExtractConfig
    from specdec_extract_hidden_states.extract import HiddenStatesExtractor


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_extract_hidden_states.config import ExtractConfig

    return ExtractConfig


@hookimpl
def check(config: ExtractConfig, engine: EngineContext) -> None:
    """See that the target has the layers."""
    from specdec_extract_hidden_states.config import check_layers

    check_layers(config, engine.target_info)


@hookimpl
def propose(config: ExtractConfig, engine: EngineContext) -> HiddenStatesExtractor:
    """Build the proposer."""
    from specdec_extract_hidden_states.extract import HiddenStatesExtractor

    return HiddenStatesExtractor(config, engine)
