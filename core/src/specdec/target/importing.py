"""Imports transformers and makes its models without what an engine never uses.

To know which class is where, transformers reads all of its two thousand files when it is imported, and once more when
its models are. It imports ``torch.distributed.tensor``, and with it SymPy, for models that are spread over processes.
And PyTorch imports SymPy for symbolic shapes, which no tensor of an engine has. Together that was more than a quarter
of the time until an engine of a small model was ready.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_READER = "transformers.utils.import_utils"
"""The module that looks for classes in transformers' files."""


_is_alone = False
"""Whether this process is a program that runs engines and nothing else."""


def forgo_distributed() -> None:
    """Let transformers, once it is imported, take this torch for one without ``torch.distributed``.

    For programs that run engines and nothing else, such as the commands. It changes nothing in a process that is one of
    several which work together.
    """
    global _is_alone
    _is_alone = True


def import_transformers() -> None:
    """Import transformers, for everything in this process; does nothing where it has been imported already."""
    if "transformers" in sys.modules:
        return
    with _reading_fast(), _as_if_alone():
        importlib.import_module("transformers.models")
        from transformers.utils import is_torch_distributed_available

        is_torch_distributed_available()  # it remembers its first answer


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Let torch say that it cannot work with other processes, where nothing will need that."""
    distributed = torch.distributed
    if not _is_alone or not distributed.is_available() or distributed.is_initialized() or "WORLD_SIZE" in os.environ:
        yield
        return
    told, distributed.is_available = distributed.is_available, lambda: False
    try:
        yield
    finally:
        distributed.is_available = told


@contextmanager
def _reading_fast() -> Iterator[None]:
    """Let transformers' reader find names in a quarter of the time."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds transformers' reader as Python does, and improves it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        spec = PathFinder.find_spec(name, path, target) if name == _READER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_improve(module: ModuleType) -> None:
            execute(module)
            _improve(module)

        spec.loader.exec_module = execute_and_improve  # type: ignore[method-assign]
        return spec


def _improve(reader: Any) -> None:
    """Let a reader look for ``__all__`` from the end of a file, and remember every folder, not only the last 128."""
    names_in = getattr(reader, "fetch__all__", None)
    structure_of = getattr(getattr(reader, "create_import_structure_from_path", None), "__wrapped__", None)
    if names_in is not None:
        reader.fetch__all__ = lambda text: names_in(_from_last_all(text))
    if structure_of is not None:
        reader.create_import_structure_from_path = functools.cache(structure_of)


def _from_last_all(text: str) -> str:
    """A file's text from the last line on that begins with ``__all__``; the whole text where there is none."""
    return text[text.rfind("\n__all__") + 1 :]


@contextmanager
def without_symbols() -> Iterator[None]:
    """Let a model of transformers be made on the meta device without SymPy, which PyTorch imports for whatever it
    computes there: initial values, of which none are kept, and rotary angles, which are made again on loading."""
    fills = {name: fill for name, fill in vars(torch.nn.init).items() if re.fullmatch(r"[a-z]\w*_", name)}
    with torch.device("meta"):
        torch.empty(0)  # now torch notes which functions make tensors; later it would note the wrong `torch.arange`
    arange = torch.arange
    vars(torch.nn.init).update({name: _unless_meta(fill) for name, fill in fills.items()})
    torch.arange = _on_cpu_unless_told(arange)
    try:
        yield
    finally:
        vars(torch.nn.init).update(fills)
        torch.arange = arange


def _unless_meta(fill: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.nn.init` that leaves tensors without memory as they are."""
    return lambda tensor, *args, **settings: tensor if tensor.is_meta else fill(tensor, *args, **settings)


def _on_cpu_unless_told(arange: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.arange` that is on the CPU where the meta device is only the default."""

    def counted(*args: Any, device: Any = None, **settings: Any) -> Any:
        if device is None and torch.get_default_device().type == "meta":
            device = "cpu"
        return arange(*args, device=device, **settings)

    return counted
