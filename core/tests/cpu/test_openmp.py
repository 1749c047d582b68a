"""How torch's OpenMP threads wait, and who owns them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from specdec.cpu import openmp
from specdec.cpu.openmp import WAIT_SETTINGS, library_path, limit_waiting, release_threads

OWN = ("OMP_WAIT_POLICY", *WAIT_SETTINGS)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No settings of the user's own, and torch not loaded yet."""
    for name in OWN:
        monkeypatch.setenv(name, "")  # so that whatever a test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch")
    return monkeypatch


def test_waiting_is_limited_before_torch_is_loaded(environment: pytest.MonkeyPatch) -> None:
    """Both runtimes' variables are set."""
    limit_waiting()
    assert {name: os.environ[name] for name in WAIT_SETTINGS} == WAIT_SETTINGS


@pytest.mark.parametrize("name", OWN)
def test_the_users_own_setting_stands(environment: pytest.MonkeyPatch, name: str) -> None:
    """Whoever sets one of the variables gets exactly that."""
    environment.setenv(name, "7")
    limit_waiting()
    assert {other: os.environ[other] for other in OWN if other in os.environ} == {name: "7"}


def test_nothing_is_set_when_it_is_too_late(environment: pytest.MonkeyPatch) -> None:
    """A variable without effect here would only reach child processes."""
    environment.setitem(sys.modules, "torch", torch)
    limit_waiting()
    assert not any(name in os.environ for name in WAIT_SETTINGS)


def test_imports_nothing_heavy() -> None:
    """It must run before torch is loaded, so it may not load it."""
    code = "import sys, specdec.cpu.openmp; print(*({'torch', 'numba', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_finds_torchs_own_runtime() -> None:
    """The OpenMP library in use is the one that torch has loaded."""
    assert str(Path(torch.__file__).parent) in (library_path() or "")


def test_no_runtime_is_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Systems without /proc, or without OpenMP."""
    monkeypatch.setattr(openmp, "_MAPS", tmp_path / "maps")
    assert library_path() is None
    release_threads()
    (tmp_path / "maps").write_text("7f00-7f01 r--p 00000000 fe:00 1  /usr/lib/libc.so.6\n")
    assert library_path() is None


def test_released_threads_are_gone_and_come_back() -> None:
    """Parallel operations work after the release as before it."""

    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    results = []

    def work() -> None:
        torch.set_num_threads(2)
        values = torch.ones(1 << 20)
        results.append(float(values.sum()))
        before = count()
        release_threads()
        results.append(before - count())
        results.append(float(values.sum()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [float(1 << 20), 1, float(1 << 20)]
