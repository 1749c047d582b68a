"""The method `medusa` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.drafting import Proposer
    from specdec.types import EngineContext, Identification, ProposerCapabilities
    from specdec_medusa.config import MedusaConfig


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_medusa.config import MedusaConfig

    return MedusaConfig


@hookimpl
def identify(checkpoint: Path) -> Identification | None:
    """Recognise heads, alone or beside the tensors of their target."""
    from specdec_medusa.heads import identified

    return identified(checkpoint)


@hookimpl
def check(config: MedusaConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that the heads fit the target."""
    from specdec_medusa.medusa import check as check_method

    return check_method(config, engine)


@hookimpl
def propose(config: MedusaConfig, engine: EngineContext) -> Proposer:
    """Load the heads and build the proposer."""
    from specdec_medusa.medusa import build

    return build(config, engine)
