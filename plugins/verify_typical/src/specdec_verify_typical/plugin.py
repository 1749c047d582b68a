"""The verifier `typical` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl
from specdec_verify_typical.config import TypicalConfig

if TYPE_CHECKING:
    from specdec.verify.base import Verifier


@hookimpl
def config_class() -> type:
    """Return the class of the verifier's options."""
    return TypicalConfig


@hookimpl
def verify(config: TypicalConfig) -> Verifier:
    """Build the verifier."""
    from specdec_verify_typical.typical import TypicalVerifier

    return TypicalVerifier(config)
