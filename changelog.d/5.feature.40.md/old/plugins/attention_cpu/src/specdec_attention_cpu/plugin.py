"""The attention backend `cpu` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.attention.interface import AttentionBackend


@hookimpl
def attention_backend() -> AttentionBackend:
    """Build the compiled CPU backend; the first start on a machine compiles its kernels, later ones load them."""
    from specdec_attention_cpu.backend import CpuBackend

    return CpuBackend()
