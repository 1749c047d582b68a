"""The method `medusa` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.drafting import Proposer
    from specdec.types import EngineContext
    from specdec_medusa.config import MedusaConfig


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_medusa.config import MedusaConfig

    return MedusaConfig


@hookimpl
def propose(config: MedusaConfig, engine: EngineContext) -> Proposer:
    """Load the heads and build the proposer."""
    from specdec_medusa.medusa import build

    return build(config, engine)
