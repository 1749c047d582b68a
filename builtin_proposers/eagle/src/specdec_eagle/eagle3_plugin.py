"""The method `eagle3` (EAGLE-3) as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.drafting import Proposer
    from specdec.types import EngineContext, Identification, ProposerCapabilities
    from specdec_eagle.config import EagleConfig

METHOD = "eagle3"


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_eagle.config import EagleConfig

    return EagleConfig


@hookimpl
def check(config: EagleConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that the head fits the target."""
    from specdec_eagle.eagle import check as check_method

    return check_method(METHOD, config, engine)


@hookimpl
def propose(config: EagleConfig, engine: EngineContext) -> Proposer:
    """Load the head and build the proposer."""
    from specdec_eagle.eagle import build

    return build(METHOD, config, engine)


@hookimpl
def identify(checkpoint: Path) -> Identification | None:
    """Look at the names of the tensors: configurations of these heads often are those of plain models."""
    from specdec_eagle.identify import identify_as

    return identify_as(METHOD, checkpoint)
