"""The verifier `synthetic` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl
from specdec_verify_synthetic.config import SyntheticConfig

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec.verify.base import Verifier


@hookimpl
def config_class() -> type:
    """Return the class of the verifier's options."""
    return SyntheticConfig


@hookimpl
def verify(config: SyntheticConfig, engine: EngineContext) -> Verifier:
    """Build the verifier."""
    from specdec_verify_synthetic.synthetic import SyntheticVerifier

    return SyntheticVerifier(config.rates(engine.num_speculative_tokens))
