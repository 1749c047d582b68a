"""The verifier `block` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec.verify.base import Verifier


@hookimpl
def verify(engine: EngineContext) -> Verifier:
    """Build the block verifier; it has no options. Its kernels are compiled here, not at the first draft."""
    from specdec_verify_block.block import KERNELS, BlockVerifier

    if engine.device == "cpu":
        KERNELS.load()

    return BlockVerifier()
