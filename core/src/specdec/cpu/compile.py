"""Declares the functions of kernel modules that Python calls.

A *kernel module* imports numba, and nothing that runs an engine imports it: `specdec.cpu.build` does, in a process of
its own, and leaves a shared library from which `specdec.cpu.library` takes addresses. Functions that only kernels call
are ordinary ``njit`` functions; `region`, `native` and `compiled` mark those that become symbols of the library.

What compiled functions may do: compute, call one another and libm, and work in arrays from ``np.empty``, ``np.zeros``
or ``np.full``. They must not raise, print, sort with numpy or use lists, because numba and Python are not there when
they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen
from numba import types
from numba.core.sigutils import normalize_signature


@frozen(eq=False)
class Entry:
    """A function of a kernel module that becomes a symbol of the library, under its own name."""

    function: Callable[..., Any]
    result: types.Type
    arguments: tuple[types.Type, ...]
    options: dict[str, Any]
    """Of ``njit``."""

    @property
    def name(self) -> str:
        """The symbol."""
        return self.function.__name__


def compiled(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Entry]:
    """Decorator: a function to be called from Python, through `specdec.cpu.library.Kernels.function`.

    Args:
        signature: numba's, as a string or an object: numbers, and C-contiguous arrays of numbers.
        options: of ``njit``, such as ``fastmath``.
    """
    arguments, result = normalize_signature(signature)
    return lambda function: Entry(function, result, tuple(arguments), options)


def native(*arguments: Any) -> Callable[[Callable[..., None]], Entry]:
    """Decorator: a function of these argument types that returns nothing, to be called by its address."""
    return compiled(types.void(*arguments))


def region(function: Callable[[int], None]) -> Entry:
    """Decorator: an entry point for `specdec.cpu.team.Team.run`, which passes it its argument block."""
    return native(types.intp)(function)
