"""Compiles kernels when their module is imported, and keeps the machine code between runs.

numba's own cache looks at the file of the compiled function alone. These functions are made of kernels from several
files, so their cache key also holds a digest of all source files beside them and beside this file. Machine code lies
where numba puts it: in ``__pycache__`` beside the source, in the user's cache directory, or in ``NUMBA_CACHE_DIR``.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc

logger = logging.getLogger(__name__)


@cache
def _digest(folder: Path) -> str:
    """Digest of the kernels' sources in a folder and in this one."""
    digest = hashlib.sha256()
    for path in sorted({*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache(function: Callable[..., Any]) -> Any:
    """Where a function's machine code is kept; nowhere when no place is writable."""
    try:
        return _KeyedCache(function)
    except RuntimeError as error:
        logger.warning("kernels are compiled at every start, because they cannot be kept: %s", error)
        return NullCache()


class _KeyedCache(FunctionCache):
    def _index_key(self, sig: Any, codegen: Any) -> Any:
        folder = Path(self._py_func.__code__.co_filename).parent
        return (*super()._index_key(sig, codegen), _digest(folder))


def native(*arguments: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorator: compile a function of these argument types that returns nothing, to be called by its ``address``."""

    def compile_now(function: Callable[..., None]) -> Any:
        compiled = CFunc(function, (arguments, types.void), locals={}, options={"error_model": "numpy"})
        compiled._cache = _cache(function)
        compiled.compile()
        return compiled

    return compile_now


def region(function: Callable[[int], None]) -> Any:
    """Decorator: compile an entry point for `specdec.cpu.team.Team.run`, which passes it its argument block."""
    return native(types.intp)(function)


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile a function for one signature, to be called from Python."""

    def compile_now(function: Callable[..., Any]) -> Any:
        dispatcher = njit(function, error_model="numpy")
        dispatcher._cache = _cache(function)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return compile_now
