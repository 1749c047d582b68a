"""The method `draft_model` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.types import EngineContext, Identification
    from specdec_draft_model.config import DraftModelConfig
    from specdec_draft_model.proposer import DraftModelProposer


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_draft_model.config import DraftModelConfig

    return DraftModelConfig


@hookimpl
def identify(checkpoint: Path) -> Identification | None:
    """Recognise a whole causal language model."""
    from specdec_draft_model.identify import identified

    return identified(checkpoint)


@hookimpl
def propose(config: DraftModelConfig, engine: EngineContext) -> DraftModelProposer:
    """Load the drafter and build the proposer."""
    from specdec_draft_model.drafter import Drafter
    from specdec_draft_model.proposer import DraftModelProposer

    return DraftModelProposer(config, engine, Drafter.loaded(config, engine))
