"""The verifier `block` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.verify.base import Verifier


@hookimpl
def verify() -> Verifier:
    """Build the block verifier; it has no options."""
    from specdec_verify_block.block import BlockVerifier

    return BlockVerifier()
