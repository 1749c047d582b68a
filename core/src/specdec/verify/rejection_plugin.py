"""The built-in verifier `rejection` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl
from specdec.verify.config import RejectionConfig

if TYPE_CHECKING:
    from specdec.verify.base import Verifier


@hookimpl
def config_class() -> type:
    """The options of `rejection`."""
    return RejectionConfig


@hookimpl
def verify(config: RejectionConfig) -> Verifier:
    """Build the rejection verifier."""
    from specdec.verify.rejection import RejectionVerifier

    return RejectionVerifier(config)
