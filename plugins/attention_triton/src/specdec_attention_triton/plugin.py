"""The attention backend `triton` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.attention.interface import AttentionBackend


@hookimpl
def attention_backend() -> AttentionBackend:
    """Build the backend; its kernels are compiled when they first run."""
    from specdec_attention_triton.backend import TritonBackend

    return TritonBackend()
