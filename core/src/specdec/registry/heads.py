"""Checkpoints of heads that installed distributions bring along, each for a target it names.

A distribution ships ``specdec_heads.toml`` beside the module of one of its entry points, whatever that is for::

    [[head]]
    target = "demo:smollm2"                    # the model it was made for, as users name it
    method = "wizard"                          # the proposer that uses it
    folder = "heads/wizard"                    # its checkpoint, beside this file
    name = "demo:smollm2-wizard"               # what speculative.model calls it; without it the folder's path does

Nothing is imported to find them.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from specdec.registry.sources import package_folders

if TYPE_CHECKING:
    from specdec.registry.policy import PluginEntry

logger = logging.getLogger("specdec.registry")

FILE_NAME = "specdec_heads.toml"
_REQUIRED = {"target", "method", "folder"}


@frozen(kw_only=True)
class OfferedHead:
    """One ``[[head]]`` table."""

    target: str
    method: str
    name: str
    """What to write as ``speculative.model``."""
    folder: Path


def offered_heads(entries: Iterable[PluginEntry]) -> list[OfferedHead]:
    """The heads that the distributions of these plugins bring, without those whose folder is missing."""
    modules = dict.fromkeys(entry.found.module for entry in entries if entry.kind is not None)
    files = dict.fromkeys(folder / FILE_NAME for module in modules for folder in package_folders(module))
    return [head for file in files if file.is_file() for head in _read(file) if head.folder.is_dir()]


def _read(file: Path) -> Iterator[OfferedHead]:
    try:
        for table in tomllib.loads(file.read_text(encoding="utf-8"))["head"]:
            if not _REQUIRED <= set(table) <= _REQUIRED | {"name"}:
                raise ValueError(f"a table has the keys {', '.join(sorted(_REQUIRED))}, and may have name")
            folder = file.parent / table["folder"]
            yield OfferedHead(**{"name": str(folder), **table, "folder": folder})
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is malformed: %s: %s", file, type(error).__name__, error)
