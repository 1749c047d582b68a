"""Compiled functions are kept under a key that holds all kernel sources."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest

from specdec.cpu import compile as compiling
from specdec.cpu.compile import native
from specdec.cpu.simd import put_int64


def _write_seven(address: int) -> None:
    put_int64(address, 7)


def test_works_without_a_place_for_machine_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing can be written, kernels are compiled at every start, and the log says so."""

    def refuse(function: Any) -> Any:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(compiling, "_KeyedCache", refuse)
    with caplog.at_level(logging.WARNING):
        compiled = native(compiling.types.intp)(_write_seven)
    assert "compiled at every start" in caplog.text
    target = ctypes.c_int64(0)
    compiled.ctypes(ctypes.addressof(target))
    assert target.value == 7


def test_a_change_in_any_kernel_source_changes_the_key(tmp_path: Path) -> None:
    """numba alone would look at the file of the compiled function only."""
    (tmp_path / "a.py").write_text("x = 1")
    before = compiling._digest.__wrapped__(tmp_path)
    assert compiling._digest.__wrapped__(tmp_path) == before
    (tmp_path / "b.py").write_text("y = 1")
    assert compiling._digest.__wrapped__(tmp_path) != before
