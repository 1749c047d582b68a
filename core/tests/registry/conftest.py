"""Toy distributions: folders with metadata and modules, put on ``sys.path`` for one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import importlib_metadata
import pytest

from specdec.registry import Registry

PROPOSER = """
from specdec.drafting.base import Proposer
from specdec.hookspecs import hookimpl


class Toy(Proposer):
    def __init__(self, config):
        self.config = config

    def propose(self, batch):
        raise NotImplementedError


@hookimpl
def propose(config):
    return Toy(config)
"""


class Toys:
    """Makes toy distributions. Discovery sees these and nothing else."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._monkeypatch = monkeypatch
        self._folders: list[Path] = []

    def add(
        self,
        distribution: str,
        entry_points: Mapping[str, Mapping[str, str]] | str | bytes,
        *,
        version: str = "1.0",
        requires: tuple[str, ...] = ("specdec-core>=0.1,<0.2",),
        files: Mapping[str, str] = {},
        metadata: str | None = None,
    ) -> Path:
        """One distribution in a folder of its own; a later one comes later on the path."""
        folder = self._root / f"{len(self._folders)}-{distribution}"
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_bytes(_as_bytes(entry_points))
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(dedent(text))
        self._folders.append(folder)
        self._monkeypatch.setattr(sys, "path", [*map(str, self._folders), *self._original_path])
        paths = list(map(str, self._folders))
        self._monkeypatch.setattr(importlib_metadata, "distributions", lambda: _discover(paths))
        return folder

    def proposer(self, distribution: str, name: str, code: str = PROPOSER, **more: object) -> Path:
        """A distribution with one proposer, in the package ``toy_<name>``."""
        package = f"toy_{name}"
        files = {f"{package}/__init__.py": "", f"{package}/plugin.py": code, **more.pop("files", {})}  # type: ignore[dict-item]
        points = {"specdec.proposers": {name: f"{package}.plugin"}}
        return self.add(distribution, points, files=files, **more)  # type: ignore[arg-type]

    @property
    def _original_path(self) -> list[str]:
        return [path for path in sys.path if Path(path) not in self._folders]


def _discover(paths: list[str]) -> Iterator[importlib_metadata.Distribution]:
    yield from importlib_metadata.Distribution.discover(path=paths)


def _as_bytes(entry_points: Mapping[str, Mapping[str, str]] | str | bytes) -> bytes:
    if isinstance(entry_points, bytes):
        return entry_points
    if isinstance(entry_points, str):
        return dedent(entry_points).encode()
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in entry_points.items()
    ]
    return "\n".join(lines).encode()


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    before = set(sys.modules)
    monkeypatch.delenv("SPECDEC_PLUGINS_ALLOW", raising=False)
    monkeypatch.delenv("SPECDEC_PLUGINS_BLOCK", raising=False)
    yield Toys(tmp_path, monkeypatch)
    for name in set(sys.modules) - before:
        if name.startswith("toy"):
            del sys.modules[name]


def statuses(registry: Registry) -> dict[str, str]:
    """Status by plugin name; by distribution where the plugin's name is not known."""
    return {entry.name or entry.distribution: entry.status for entry in registry.entries()}
