"""Keeps PyTorch's graph compiler out while a model is imported and loaded.

Importing any model class of transformers imports ``torch._dynamo`` for the sake of models that get compiled, and so
does making a model on the meta device: over 100 MB of resident memory and more than a second, which an engine that
compiles nothing should not pay. A placeholder stands in meanwhile; whoever imports ``torch._dynamo`` afterwards, as
`torch.compile` does, gets the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"


class _Placeholder(ModuleType):
    """A package whose submodules are the real ones, and whose functions are decorators that change nothing."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        self.met: list[Callable[..., Any]] = []
        """Functions that were handed to a decorator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._unchanged

    def _unchanged(self, function: Any = None, *_arguments: Any, **_settings: Any) -> Any:
        """Stand for ``torch._dynamo.disable`` and its like, with or without arguments."""
        if not callable(function):
            return self._unchanged
        self.met.append(function)
        return function


@contextmanager
def without_compiler() -> Iterator[None]:
    """Stand in for ``torch._dynamo`` unless it has been imported already."""
    if _COMPILER in sys.modules:
        yield
        return
    placeholder = _Placeholder()
    sys.modules[_COMPILER] = placeholder
    try:
        yield
    finally:
        sys.modules.pop(_COMPILER, None)
        if vars(torch).get("_dynamo") is placeholder:
            del vars(torch)["_dynamo"]
        for function in placeholder.met:
            # PyTorch keeps what the decorator returned; the real one is asked the next time.
            vars(function).pop("__dynamo_disable", None)
