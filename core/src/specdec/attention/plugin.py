"""The built-in attention backend `sdpa` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.attention.interface import AttentionBackend


@hookimpl
def attention_backend() -> AttentionBackend:
    """Build the backend over torch's scaled dot-product attention."""
    from specdec.attention.sdpa import SdpaBackend

    return SdpaBackend()
