"""specdec: a speculative-decoding engine for language models in which every method is a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.cpu.openmp import limit_waiting
from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.async_llm import AsyncLLM
    from specdec.llm import LLM
    from specdec.outputs import CompletionOutput, RequestOutput
    from specdec.sampling.params import SamplingParams
    from specdec.speculation import RequestSpeculation

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "RequestSpeculation",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "specdec.llm",
    "AsyncLLM": "specdec.async_llm",
    "CompletionOutput": "specdec.outputs",
    "RequestOutput": "specdec.outputs",
    "RequestSpeculation": "specdec.speculation",
    "SamplingParams": "specdec.sampling.params",
}

limit_waiting()


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``specdec plugins`` need not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
