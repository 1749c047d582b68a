"""The cache directory: how a file or folder gets there once, whole and by one process, and how it leaves again."""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import ConfigError
from specdec.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_KEPT_SECONDS = 30 * 24 * 3600
"""How long an entry that nobody uses is kept, where `remove_unused` is called."""


def cache_root(cache_dir: str | None = None) -> Path:
    """The cache directory: the argument, else ``$SPECDEC_CACHE``, else ``specdec`` below the user's cache directory.

    Raises:
        ConfigError: it lies in the home directory of a user who does not exist.
    """
    named = cache_dir if cache_dir is not None else os.environ.get("SPECDEC_CACHE")
    try:
        if named is not None:
            return Path(named).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "specdec"
    except RuntimeError as error:  # no such user, or no home directory
        raise ConfigError(
            f"the cache directory {named or '~/.cache/specdec'} cannot be found ({reason_of(error)}); set cache_dir or "
            "SPECDEC_CACHE to a directory that can be written",
            path="cache_dir",
        ) from error


@contextmanager
def creating(entry: Path) -> Iterator[Path | None]:
    """Create a cache entry atomically: yields the path to write, or None when the entry exists.

    A lock beside the entry makes other processes wait; the entry appears by a rename when the block ends without an
    error. What an interrupted process left is removed by the next one.

    Raises:
        ConfigError: the cache directory cannot be written.
    """
    from filelock import FileLock

    if entry.exists():
        yield None
        return
    make_folder(entry.parent)
    partial = entry.with_name(entry.name + ".partial")
    with FileLock(entry.with_name(entry.name + ".lock")):
        if entry.exists():
            yield None
            return
        _remove(partial)
        try:
            yield partial
            partial.rename(entry)
        finally:
            _remove(partial)


def note_use(entry: Path) -> bool:
    """Set the time of an entry's last use, unless others wrote it for us; whether the entry is there."""
    try:
        os.utime(entry)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.debug("the time of %s cannot be set: %s", entry, error)
        return entry.exists()
    return True


def remove_unused(folder: Path) -> None:
    """Remove the entries of a folder that nobody has used for 30 days; locks stay, because somebody may wait for
    them."""
    oldest = time.time() - _KEPT_SECONDS
    for entry in folder.iterdir():
        try:
            if entry.suffix != ".lock" and entry.stat().st_mtime < oldest:
                removed = entry.with_name(f"{entry.name}.{os.getpid()}.unused")
                entry.rename(removed)  # whole, so that nobody finds half of it
                _remove(removed)
        except OSError as error:  # most likely another process removes it
            logger.debug("%s is not removed: %s", entry, error)


def make_folder(path: Path) -> None:
    """Make a directory of the cache.

    Raises:
        ConfigError: it cannot be made, or not be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError as error:
        raise _not_writable(path, reason_of(error)) from error
    if not writable:
        raise _not_writable(path, "permission denied")


def _not_writable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"cache_dir: cannot write to {path}: {reason}. Set cache_dir, or the environment variable SPECDEC_CACHE, to a "
        "directory that can be written",
        path="cache_dir",
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
