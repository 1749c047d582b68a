"""The method `mlp_speculator` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.drafting import Proposer
    from specdec.types import EngineContext, ProposerCapabilities
    from specdec_mlp_speculator.config import MlpSpeculatorConfig


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_mlp_speculator.config import MlpSpeculatorConfig

    return MlpSpeculatorConfig


@hookimpl
def check(config: MlpSpeculatorConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that the network fits the target."""
    from specdec_mlp_speculator.speculator import check as check_method

    return check_method(config, engine)


@hookimpl
def propose(config: MlpSpeculatorConfig, engine: EngineContext) -> Proposer:
    """Load the heads and build the proposer."""
    from specdec_mlp_speculator.speculator import build

    return build(config, engine)
