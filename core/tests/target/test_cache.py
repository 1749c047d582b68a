"""Entries of the cache directory that others write, use and remove at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.target.cache import note_use, remove_unused


def _old(path: Path) -> Path:
    path.mkdir()
    os.utime(path, (1, 1))
    return path


def test_an_entry_that_another_process_removes_first_keeps_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [_old(tmp_path / name) for name in ("a", "b", "c")]
    rename = Path.rename

    def too_late(self: Path, target: Path) -> Path:
        if self.name == "b":
            raise FileNotFoundError(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", too_late)
    remove_unused(tmp_path)
    assert [entry.exists() for entry in entries] == [False, True, False]


def test_nobody_finds_half_of_an_entry_that_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = _old(tmp_path / "a")
    seen: list[bool] = []
    monkeypatch.setattr("specdec.target.cache.shutil.rmtree", lambda _path: seen.append(entry.exists()))
    remove_unused(tmp_path)
    assert seen == [False]


def test_an_entry_that_others_wrote_for_us_is_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> None:
        raise PermissionError("not yours")

    assert not note_use(tmp_path / "a")
    entry = _old(tmp_path / "a")
    monkeypatch.setattr(os, "utime", refuse)
    assert note_use(entry)
