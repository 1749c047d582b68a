"""Remembers, in the cache directory, that a model gave its own logits when packed and fused.

A start compares a model's logits over packed tokens, before and after fusion, with what the model gives alone
(`specdec.target.trace.check_packed`): most of a start's forward passes. As long as nothing changes that they depend
on, they come out the same, so a success is kept as an empty file whose name is a digest of all that: the checkpoint's
files, the code of specdec and of the model's class, the versions of the libraries, the processor and the device. What
was refused is never remembered, and every start still proves each fused module on random input.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specdec.cpu.library import surroundings
from specdec.errors import ConfigError
from specdec.target.cache import make_folder, note_use, remove_unused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdec.target.parts import ModelParts

logger = logging.getLogger(__name__)

_LIBRARIES = ("specdec-core", "torch", "transformers", "safetensors")
_OWN_CODE = Path(__file__).parents[1]
_KNOWN_CLASSES = "transformers.models."


class Passed:
    """Whether one model, loaded in one way, has passed."""

    def __init__(self, entry: Path | None) -> None:
        """Name the file; None: nothing is remembered. Use `of`."""
        self._entry = entry
        self.before = entry is not None and note_use(entry)
        """Whether it passed at an earlier start."""

    @classmethod
    def of(cls, parts: ModelParts, checkpoint: Path | None, cache: Path | None, *, fuse: bool) -> Passed:
        """Look up a model that has been loaded and not been changed yet.

        Args:
            parts: the model. Nothing is remembered of classes from outside transformers, whose code may lie anywhere.
            checkpoint: its directory; None: nothing is remembered.
            cache: the cache directory; None: nothing is remembered.
            fuse: whether modules are going to be replaced by faster ones.
        """
        if cache is None or checkpoint is None or not type(parts.decoder).__module__.startswith(_KNOWN_CLASSES):
            return cls(None)
        digest = hashlib.sha256("\0".join(_facts(parts, checkpoint, fuse)).encode())
        return cls(cache / "checks" / digest.hexdigest()[:32])

    def remember(self) -> None:
        """Note that the model passed; where that cannot be written, the next start compares again."""
        if self._entry is None or self.before:
            return
        try:
            make_folder(self._entry.parent)
            self._entry.touch()
            remove_unused(self._entry.parent)
        except (ConfigError, OSError) as error:
            logger.debug("that the model passed its checks is not remembered: %s", error)


def _facts(parts: ModelParts, checkpoint: Path, fuse: bool) -> Iterator[str]:
    """Everything that the outcome of the comparisons depends on."""
    yield from (str(fuse), str(parts.dtype), torch.get_float32_matmul_precision(), *_device(parts.device))
    yield from (f"{library} {version(library)}" for library in _LIBRARIES)
    yield from surroundings()
    yield _digest(sorted(_OWN_CODE.rglob("*.py")))
    yield _state(Path(inspect.getfile(type(parts.decoder))))
    yield str(checkpoint.resolve())
    yield from (_state(file) for file in sorted(checkpoint.iterdir()) if file.is_file())


def _device(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return (device.type, torch.cuda.get_device_name(device), str(torch.version.cuda))
    return (device.type, torch.backends.cpu.get_cpu_capability())


def _state(file: Path) -> str:
    """A file's name, size and time of change, which tell a change as far as `make` can."""
    state = os.stat(file)
    return f"{file.name} {state.st_size} {state.st_mtime_ns}"


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
