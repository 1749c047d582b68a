"""Kernels are compiled elsewhere, kept, found again, and the same whichever way they were loaded."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cpu import library
from specdec.cpu.library import Kernels

TWICE = """
from specdec.cpu.compile import compiled
from {name}_constants import FACTOR

@compiled("int64(int64)")
def twice(x):
    return FACTOR * x
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a kernel module of its own, and a cache directory of the test's own."""
    name = f"kernels_{tmp_path.name}".replace("-", "_")
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "unrelated.py").write_text("x = 1")
    (package / "constants.py").write_text("FACTOR = 2")
    (package / "kernels.py").write_text(TWICE.replace("{name}_constants", f"{name}.constants"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return f"{name}.kernels"


def test_numbers_and_arrays_get_there_and_back(examples: Kernels) -> None:
    values = np.arange(6, dtype=np.float64).reshape(2, 3)
    assert examples.function("weighted")(values, False, 1) == 27.0
    assert examples.function("weighted")(values, True, 0) == 24.0
    values.flags.writeable = False
    assert examples.function("weighted")(values, True, 0) == 24.0
    assert examples.function("weighted")(values[:0], True, 0) == 0.0


@pytest.mark.parametrize(
    "values", [np.zeros((2, 3), dtype=np.float32), np.zeros(3), np.zeros((2, 3)).T], ids=["dtype", "ndim", "order"]
)
def test_an_array_that_is_not_as_declared_is_an_error(examples: Kernels, values: np.ndarray) -> None:
    with pytest.raises(TypeError, match="weighted: needs a C-contiguous float64 array of 2 dimensions"):
        examples.function("weighted")(values, False, 1)


def test_an_entry_that_is_not_there_is_an_error(examples: Kernels) -> None:
    with pytest.raises(KeyError, match="whom: not an entry of example_kernels; there are .*who"):
        examples.address("whom")


def test_a_change_in_anything_that_a_kernel_imports_changes_the_key(module: str, tmp_path: Path) -> None:
    folder = tmp_path / module.partition(".")[0]
    before = library._key(module)
    (folder / "unrelated.py").write_text("x = 2")
    assert library._key(module) == before
    (folder / "constants.py").write_text("FACTOR = 3")
    assert library._key(module) != before


def test_the_key_holds_the_kernels_of_specdec_that_are_imported() -> None:
    names = set(library._sources("example_kernels"))
    assert {"example_kernels", "specdec.cpu.simd", "specdec.cpu.threads", "specdec.cpu.layout"} <= names
    assert {"specdec.cpu.compile", "specdec.cpu.build"} <= names
    assert "specdec.cpu.regions" not in names


def test_the_key_holds_the_processor_and_settings_of_numba(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library._key(module)
    library.surroundings.cache_clear()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert library._key(module) != before
    library.surroundings.cache_clear()
    monkeypatch.delenv("NUMBA_CPU_NAME")
    monkeypatch.setattr(library, "_processor", lambda: ("another",))
    assert library._key(module) != before
    library.surroundings.cache_clear()


ASK = """
import sys
from specdec.cpu.library import Kernels
print(Kernels(sys.argv[1]).function("twice")(21), *[m for m in ("numba", "llvmlite") if m in sys.modules])
"""


def test_two_processes_at_once_leave_one_whole_entry(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{ASK}", module]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].split() for process in running] == [["42"], ["42"]]
    entries = [path for path in (tmp_path / "cache" / "kernels").iterdir() if path.suffix != ".lock"]
    assert [sorted(path.name for path in entry.iterdir()) for entry in entries] == [
        ["kernels.o", "kernels.so", "signatures.json"]
    ]


def test_without_a_linker_the_same_code_is_loaded_through_llvm(
    examples: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linked = Path(_file_at(examples.address("exp_all"))).parent
    for file in linked.iterdir():
        if file.name != library._LIBRARY:
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(library, "_LINKERS", ())
    library._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        others = library._open(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are loaded through LLVM, which takes about 100 MB of memory, because no C compiler () links them"
    ]
    x = np.linspace(-100, 100, 4099, dtype=np.float32)
    results = []
    for function in (examples.function("exp_all"), library.Function("exp_all", *others["exp_all"])):
        out = np.empty_like(x)
        function(x.ctypes.data, out.ctypes.data, len(x))
        results.append(out)
    assert results[0].tobytes() == results[1].tobytes()
    values = np.arange(6, dtype=np.float64).reshape(2, 3)
    assert library.Function("weighted", *others["weighted"])(values, False, 1) == 27.0


def _file_at(address: int) -> str:
    """The file that code at an address was loaded from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.split(maxsplit=5)[5]
    raise AssertionError("no such address")


def test_where_no_process_can_be_started_this_one_compiles(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise PermissionError("no processes here")

    monkeypatch.setattr(library, "_LINKERS", ())
    monkeypatch.setattr(subprocess, "run", refuse)
    with caplog.at_level(logging.WARNING):
        assert Kernels(module).function("twice")(4) == 8
    assert "compiled in this process, which costs memory, because another failed: no processes here" in caplog.text


def test_two_entries_of_one_name_are_an_error() -> None:
    from specdec.cpu.build import KernelError, build
    from specdec.cpu.compile import compiled

    def twice(x: int) -> int:
        return 2 * x

    entry = compiled("int64(int64)")(twice)
    with pytest.raises(KernelError, match="several entries named twice"):
        build([entry, entry])


def test_a_new_entry_removes_those_unused_for_a_month(module: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    times = {"old-1": 31, "recent-1": 29}
    for name, days in times.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "kernels.so").touch()
        then = time.time() - days * 86400
        os.utime(folder / name, (then, then))
    lock = folder / "old-1.lock"  # somebody may wait for it
    lock.touch()
    os.utime(lock, (1, 1))
    assert Kernels(module).function("twice")(4) == 8
    assert lock.exists()
    assert not list(folder.glob("*.unused"))
    entries = {path.name.partition("-")[0]: path for path in folder.iterdir() if path.is_dir()}
    assert set(entries) == {"recent", module}
    then = time.time() - 29 * 86400
    os.utime(entries[module], (then, then))
    assert Kernels(module).function("twice")(4) == 8
    assert entries[module].stat().st_mtime > then + 86400


def test_an_entry_that_is_removed_just_before_its_use_is_made_again(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []

    def remove(entry: Path) -> bool:
        if not removed:
            removed.append(entry)
            shutil.rmtree(entry)
        return entry.exists()

    monkeypatch.setattr("specdec.target.cache.note_use", remove)
    assert Kernels(module).function("twice")(4) == 8
    assert removed[0].exists()


def test_ctrl_c_while_kernels_are_compiled_leaves_nothing_half_done(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(command: list[str], **_options: Any) -> Any:
        Path(next(word for word in command if word.endswith(".o"))).write_bytes(b"half an object file")
        raise KeyboardInterrupt

    kernels, folder = Kernels(module), tmp_path / "cache" / "kernels"
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            kernels.load()
    assert [path for path in folder.iterdir() if path.suffix != ".lock"] == []
    assert kernels.function("twice")(4) == 8


def test_kernels_follow_the_cache_directory_of_the_engine(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_cache_dir", None)
    library.keep_in(str(tmp_path / "configured"))
    assert Kernels(module).function("twice")(4) == 8
    assert any((tmp_path / "configured" / "kernels").glob(f"{module}-*/kernels.o"))
    assert not (tmp_path / "cache").exists()


def test_a_terminal_is_told_once_that_kernels_are_compiled(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for _ in range(2):
        assert Kernels(module).function("twice")(4) == 8
    package = module.partition(".")[0]
    told = capsys.readouterr().err.splitlines()
    assert told == [f"compiling kernels for this processor ({package}), which happens once and takes some seconds"]


def test_where_nothing_can_be_kept_kernels_are_compiled_at_every_start(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    library._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert Kernels(module).function("twice")(4) == 8
    assert "kernels are compiled at every start, because they cannot be kept" in caplog.text


def test_a_kernel_that_needs_what_is_not_there_is_refused() -> None:
    from numba import types

    from specdec.cpu.build import KernelError, build
    from specdec.cpu.compile import compiled

    def listing(count: int) -> int:
        found = []
        for i in range(count):
            found.append(i * count)
        return found[count // 2]

    with pytest.raises(KernelError, match="kernels must not use .*NRT_"):
        build([compiled(types.int64(types.int64))(listing)])


def test_what_cannot_be_passed_is_refused() -> None:
    from numba import types

    from specdec.cpu.build import KernelError, build
    from specdec.cpu.compile import compiled

    def first(pair: Any) -> Any:
        return pair[0]

    with pytest.raises(KernelError, match=r"first: UniTuple\(int64 x 2\) cannot be passed"):
        build([compiled(types.int64(types.UniTuple(types.int64, 2)))(first)])


def test_an_address_is_that_of_the_symbol(examples: Kernels) -> None:
    block = np.zeros((2, 8), dtype=np.int64)
    state = np.zeros(32, dtype=np.int64)
    block[0, 0] = state.ctypes.data
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(examples.address("who"))(block.ctypes.data)
    assert block[1, :2].tolist() == [1, 1]
