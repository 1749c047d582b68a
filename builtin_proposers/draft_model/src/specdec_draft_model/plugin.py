"""The method `draft_model` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.types import EngineContext, Identification, ProposerCapabilities
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
def check(config: DraftModelConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that the drafter can be loaded and the options fit it."""
    from specdec_draft_model.drafter import check as check_method

    return check_method(config, engine)


@hookimpl
def propose(config: DraftModelConfig, engine: EngineContext) -> DraftModelProposer:
    """Load the drafter and build the proposer."""
    from specdec_draft_model.drafter import Drafter
    from specdec_draft_model.proposer import DraftModelProposer

    return DraftModelProposer(config, engine, Drafter.loaded(config, engine))
