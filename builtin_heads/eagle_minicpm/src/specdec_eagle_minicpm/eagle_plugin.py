"""EAGLE heads of MiniCPM as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting import DraftHead
    from specdec.types import EngineContext


@hookimpl
def draft_head(checkpoint: Path, overrides: Mapping[str, Any], engine: EngineContext) -> DraftHead:
    """Load the head."""
    from specdec_eagle_minicpm.eagle import load_eagle

    return load_eagle(checkpoint, overrides, engine.target)
