"""Compiled kernels in a process without a compiler: a shared library for the kernel modules of a package.

A package names its kernel modules (see `specdec.cpu.compile`) and takes what it calls from them by name; it never
imports them::

    KERNELS = Kernels("specdec_mine.kernels")

    team.run(KERNELS.address("my_region"), arguments)        # of a @region
    count = KERNELS.function("count_pairs")(array, 3)        # of a @compiled function

The first use compiles the modules in a process of its own (`specdec.cpu.build`), together, because they share
functions, links the result with the system's C compiler and keeps it in the cache directory; later starts load files of
some tens of kilobytes. The key holds everything the code depends on: the modules and what they import from their own
package and from specdec, the versions of numba and llvmlite, and the processor. Whoever adds an entry removes those
that nobody has used for a month, of older versions and other processors.

Where no process can be started, this one compiles; where nothing can link, or the cache directory does not allow
loading code, this one loads the same object file through LLVM, which takes about 100 MB more. Either way the machine
code is the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

_OBJECT, _SIGNATURES, _LIBRARY = "kernels.o", "signatures.json", "kernels.so"
"""What an entry of the cache holds."""
_BUILDER = "specdec.cpu.build"
_IMPORT = re.compile(r"^(?:import|from) +([\w.]+)(?: +import +(\([^)]*\)|.*))?", re.MULTILINE)
_LINKERS = ("cc", "gcc", "clang")
_IDENTIFYING = frozenset(
    {"vendor_id", "cpu family", "model", "stepping", "flags"}  # x86
    | {"CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"}  # ARM
    | {"cpu", "isa", "uarch"}  # Power, RISC-V
)
"""What /proc/cpuinfo says about a processor that code may depend on."""

_C_TYPES: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
} | {f"{sign}int{bits}": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


class Kernels:
    """The compiled functions of some kernel modules; compiled or loaded at the first use, once for all threads."""

    def __init__(self, *modules: str) -> None:
        """Name the modules.

        Args:
            modules: full names, all of one package. Entries of all of them have different names.
        """
        self._modules = modules
        self._lock = threading.Lock()
        self._loaded: dict[str, _Symbol] | None = None
        self._functions: dict[str, Function] = {}

    def load(self) -> None:
        """Compile or load now, so that no request waits for it.

        Raises:
            specdec.cpu.build.KernelError: a module holds what cannot be compiled, or two have entries of one name.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = _load(self._modules)

    def address(self, name: str) -> int:
        """The address of an entry.

        Raises:
            KeyError: there is none of this name.
        """
        return self._find(name).address

    def function(self, name: str) -> Function:
        """A function declared with `specdec.cpu.compile.compiled`, ready to be called.

        Raises:
            KeyError: there is none of this name.
        """
        known = self._functions.get(name)
        if known is None:
            symbol = self._find(name)
            known = self._functions[name] = Function(name, symbol.address, symbol.signature)
        return known

    def _find(self, name: str) -> _Symbol:
        if self._loaded is None:
            self.load()
        assert self._loaded is not None
        try:
            return self._loaded[name]
        except KeyError:
            there = ", ".join(self._loaded)
            raise KeyError(f"{name}: not an entry of {', '.join(self._modules)}; there are {there}") from None


class _Symbol(NamedTuple):
    """An entry that has been loaded."""

    address: int
    signature: dict[str, Any]


class Function:
    """A compiled function that takes numbers and numpy arrays; other Python threads run meanwhile."""

    __slots__ = ("_call", "_parameters", "name")

    def __init__(self, name: str, address: int, signature: dict[str, Any]) -> None:
        """Describe a function.

        Args:
            name: for error messages.
            address: where it is.
            signature: as `specdec.cpu.build` writes it.
        """
        self.name = name
        self._parameters: list[tuple[np.dtype[Any], int | None]] = []
        types: list[Any] = []
        for dtype, ndim in signature["arguments"]:
            self._parameters.append((np.dtype(dtype), ndim))
            types += [_C_TYPES[dtype]] if ndim is None else [ctypes.c_int64] * (1 + ndim)
        result = signature["result"]
        self._call = ctypes.CFUNCTYPE(None if result is None else _C_TYPES[result], *types)(address)

    def __call__(self, *arguments: Any) -> Any:
        """Call it.

        Args:
            arguments: Python's numbers, and numpy arrays of exactly the dtypes and dimensions declared, C-contiguous.

        Raises:
            TypeError: an array is not as declared.
            ctypes.ArgumentError: a number is not one of Python's.
            ValueError: there are too many arguments, or too few.
        """
        values: list[Any] = []
        for argument, (dtype, ndim) in zip(arguments, self._parameters, strict=True):
            if ndim is None:
                values.append(argument)
                continue
            if argument.dtype != dtype or argument.ndim != ndim or not argument.flags.c_contiguous:
                raise TypeError(
                    f"{self.name}: needs a C-contiguous {dtype} array of {ndim} dimensions, got {argument.dtype} "
                    f"of {argument.ndim}, strides {argument.strides}"
                )
            try:
                values.append(_addressof(_memory_of(argument)))
            except (TypeError, ValueError):  # read-only or empty: NumPy knows, but takes a microsecond longer
                values.append(argument.ctypes.data)
            values += argument.shape
        return self._call(*values)


_addressof, _memory_of = ctypes.addressof, ctypes.c_char.from_buffer
"""Looked up once, because every array of every call goes through them."""

_cache_dir: str | None = None


def keep_in(cache_dir: str | None) -> None:
    """Look for kernels, and keep them, below an engine's ``cache_dir``; those already loaded stay.

    Args:
        cache_dir: as in the configuration; None: where `specdec.target.cache.cache_root` says.
    """
    global _cache_dir
    _cache_dir = cache_dir


def _load(modules: tuple[str, ...]) -> dict[str, _Symbol]:
    """Load the code of modules from the cache, after compiling it if it is not there."""
    from specdec.target.cache import cache_root, creating, note_use, remove_unused

    entry = cache_root(_cache_dir) / "kernels" / f"{modules[0]}-{_key(*modules)[:24]}"
    try:
        for _ in range(2):
            with creating(entry) as partial:
                if partial is not None:
                    partial.mkdir()
                    _build(modules, partial)
                    _link(partial)
            if partial is not None:
                remove_unused(entry.parent)
            try:
                note_use(entry)
                return _open(entry)
            except FileNotFoundError:  # removed by another process as unused just before this one used it
                continue
    except ConfigError as error:
        _say_once(f"kernels are compiled at every start, because they cannot be kept: {error}")
    with tempfile.TemporaryDirectory() as folder:
        _build(modules, Path(folder))
        return _open(Path(folder))


def _announce(modules: tuple[str, ...]) -> None:
    """Say on a terminal, and in the log, why it takes so long."""
    package = modules[0].rpartition(".")[0]
    text = f"compiling kernels for this processor ({package}), which happens once and takes some seconds"
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
    else:
        logger.info("%s", text)


def _build(modules: tuple[str, ...], folder: Path) -> None:
    """Compile modules into a folder: in a process of its own, or in this one if that is not possible."""
    _announce(modules)
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    arguments = [str(folder / _OBJECT), str(folder / _SIGNATURES), *modules]
    command = [sys.executable or "python", "-P", "-m", _BUILDER, *arguments]
    try:
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode == 0:
            return
        failure = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    except OSError as error:
        failure = str(error)
    names = ", ".join(modules)
    logger.warning("%s: compiled in this process, which costs memory, because another failed: %s", names, failure)
    importlib.import_module(_BUILDER).main(arguments)


def _link(folder: Path) -> Path | None:
    """The shared library in a folder, linked from its object file if it is not there yet; None: it cannot be."""
    library = folder / _LIBRARY
    if library.exists():
        return library
    linker = next(filter(None, map(shutil.which, _LINKERS)), None)
    if linker is None:
        return None
    partial = library.with_name(f"{_LIBRARY}.{os.getpid()}")
    try:
        command = [linker, "-shared", "-o", str(partial), str(folder / _OBJECT), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(partial, library)
    except (OSError, subprocess.CalledProcessError) as error:
        logger.debug("%s cannot link kernels: %s", linker, error)
        partial.unlink(missing_ok=True)
        return None
    return library


def _open(folder: Path) -> dict[str, _Symbol]:
    """Load a folder's kernels."""
    signatures = json.loads((folder / _SIGNATURES).read_text())
    library, find = _link(folder), None
    reason = f"no C compiler ({', '.join(_LINKERS)}) links them"
    if library is not None:
        try:
            find = _finder(ctypes.CDLL(str(library)))
        except OSError as error:
            reason = str(error)
    if find is None:
        _say_once(f"kernels are loaded through LLVM, which takes about 100 MB of memory, because {reason}")
        find = _through_llvm(folder / _OBJECT)
    return {name: _Symbol(find(name), signature) for name, signature in signatures.items()}


@cache
def _say_once(warning: str) -> None:
    logger.warning(warning)


def _finder(library: ctypes.CDLL) -> Callable[[str], int]:
    return lambda name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


_engines: list[Any] = []
"""LLVM's owners of loaded code; it goes with them."""


def _through_llvm(path: Path) -> Callable[[str], int]:
    """Load an object file without a linker."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(reloc="pic")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_path(str(path)))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address


def _key(*modules: str) -> str:
    """Digest of everything that machine code depends on."""
    digest = hashlib.sha256("\0".join(modules).encode() + b"\0")
    for name, path in sorted(_sources(*modules).items()):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join(surroundings()).encode())
    return digest.hexdigest()


@cache
def surroundings() -> tuple[str, ...]:
    """What else compiled code depends on: versions and settings of the compiler, Python's ABI, the processor."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("numba", "llvmlite"))
    settings = (f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("NUMBA_"))
    return (*versions, *settings, str(sysconfig.get_config_var("SOABI")), *_processor())


def _processor() -> tuple[str, ...]:
    """What tells processors apart: the first one's lines in /proc/cpuinfo, where there are any."""
    try:
        with open("/proc/cpuinfo") as stream:
            first = takewhile(str.strip, stream)
            lines = [line.strip() for line in first if line.partition(":")[0].strip() in _IDENTIFYING]
    except OSError:
        lines = []
    return (platform.machine(), *(lines or [platform.processor(), platform.node()]))


def _sources(*modules: str) -> dict[str, Path]:
    """The files of modules and of all that they import at their top from their own package and specdec, by name.

    Nothing is imported to find them.
    """
    packages = {*(module.partition(".")[0] for module in modules), "specdec"}
    waiting, found = [*modules, _BUILDER], dict[str, Path]()
    while waiting:
        name = waiting.pop()
        path = _file_of(name) if name not in found and name.partition(".")[0] in packages else None
        if path is not None:
            found[name] = path
            waiting += _imports(path)
    return found


def _file_of(module: str) -> Path | None:
    """The source file of a module below an imported package; None when it is not a module."""
    package, *below = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin and not below else None
    for place in spec.submodule_search_locations:
        path = Path(place, *below)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _imports(path: Path) -> Iterator[str]:
    """Full names of what a file may import at its top, modules or not."""
    for module, names in _IMPORT.findall(path.read_text()):
        yield module
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))
