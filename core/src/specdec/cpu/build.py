"""Compiles kernel modules to an object file: the only place that runs numba's compiler.

Usually a process of its own, so that numba and LLVM (over 100 MB) never get into a process that serves requests::

    python -m specdec.cpu.build OBJECT_FILE SIGNATURES_FILE MODULE...

Each `specdec.cpu.compile.Entry` of the modules becomes a function of the C calling convention. Numbers are passed as
they are, an array as its address and its sizes; numba's own wrapper would report errors through Python. numba only
types and lowers: it would optimise every function once more in each of its callers. All functions are joined in one
LLVM module, which is optimised once, for this processor. Code is position-independent, with everything but the
entries hidden.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.np.arrayobj import make_array, populate_array

from specdec.cpu.compile import Entry

_MATH = (
    *("ceil", "cos", "exp", "exp2", "expm1", "floor", "fma", "fmod", "log", "log10", "log1p", "log2", "nearbyint"),
    *("pow", "rint", "sin", "sqrt", "tan", "tanh", "trunc"),
)
_SYMBOLS = frozenset({"memcpy", "memmove", "memset", "malloc", "free", *_MATH, *(f"{name}f" for name in _MATH)})
"""What the C library has for kernels; anything else would be numba's or Python's."""

_RUNTIME = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare void @llvm.trap()

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %room = add i64 %size, %wide
  %bytes = add i64 %room, 48
  %block = call ptr @malloc(i64 %bytes)
  %failed = icmp eq ptr %block, null
  br i1 %failed, label %full, label %done
full:
  call void @llvm.trap()
  unreachable
done:
  %first = ptrtoint ptr %block to i64
  %behind = add i64 %first, 48
  %below = sub i64 %wide, 1
  %rounded = add i64 %behind, %below
  %mask = sub i64 0, %wide
  %start = and i64 %rounded, %mask
  %data = inttoptr i64 %start to ptr
  store i64 1, ptr %block
  %destructor = getelementptr i8, ptr %block, i64 8
  store ptr null, ptr %destructor
  %information = getelementptr i8, ptr %block, i64 16
  store ptr null, ptr %information
  %address = getelementptr i8, ptr %block, i64 24
  store ptr %data, ptr %address
  %length = getelementptr i8, ptr %block, i64 32
  store i64 %size, ptr %length
  %allocator = getelementptr i8, ptr %block, i64 40
  store ptr null, ptr %allocator
  ret ptr %block
}

define void @NRT_MemInfo_call_dtor(ptr %block) {
  call void @free(ptr %block)
  ret void
}

define ptr @NRT_Allocate(i64 %size) {
  %block = call ptr @malloc(i64 %size)
  %failed = icmp eq ptr %block, null
  br i1 %failed, label %full, label %done
full:
  call void @llvm.trap()
  unreachable
done:
  ret ptr %block
}

define void @NRT_Free(ptr %block) {
  call void @free(ptr %block)
  ret void
}
"""
"""numba's memory for arrays made inside compiled functions, a block with its count of references, destructor, address
and size before the data; and for copies between parts of an array. The process ends where there is none left."""


class _Library(JITCodeLibrary):
    """A compiled function as numba lowers it: neither optimised, nor linked to what it calls, nor loaded."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Nothing but the end of additions."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """None: nobody calls it here."""
        return 0


class _Gathering(JITCPUCodegen):
    """In place of numba's: gathers what functions are lowered to."""

    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        """Nothing: functions would need it to raise."""


class KernelError(Exception):
    """Something in a kernel module cannot be compiled ahead; the message names it and says why."""


def entries_of(module: str) -> list[Entry]:
    """The entries that a module defines, in order."""
    values = vars(importlib.import_module(module)).values()
    return [value for value in values if isinstance(value, Entry) and value.function.__module__ == module]


@global_compiler_lock
def build(entries: Iterable[Entry]) -> tuple[bytes, dict[str, Any]]:
    """Compile entries for this processor.

    Returns:
        An object file, and for each entry what `specdec.cpu.library` must know to call it.

    Raises:
        KernelError: an entry needs something that is not there when it runs, or two have one name.
    """
    entries = list(entries)
    names = [entry.name for entry in entries]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise KernelError(f"modules of the same kernels have several entries named {', '.join(sorted(twice))}")
    module = llvm.parse_assembly(_RUNTIME)
    module.triple = llvm.get_process_triple()
    with _gathering() as codegen:
        module.data_layout = codegen._data_layout
        for library in _with_all_called([_lowered(entry) for entry in entries]):
            module.link_in(library._final_module, preserve=True)
    _hide(module, set(names))
    machine = _machine()
    _optimise(module, machine)
    _remove_unused(module, machine)
    _check(module)
    return machine.emit_object(module), {entry.name: _signature(entry) for entry in entries}


@contextmanager
def _gathering() -> Iterator[_Gathering]:
    """While this lasts, numba lowers functions and does nothing more with them."""
    context = cpu_target.target_context
    usual = context._internal_codegen
    context._internal_codegen = gathering = _Gathering("specdec")
    try:
        yield gathering
    finally:
        context._internal_codegen = usual


def _with_all_called(libraries: Iterable[Any]) -> list[Any]:
    """Libraries and all that they call, each once, callers first: LLVM links in only what has been asked for."""
    called_first: dict[int, Any] = {}
    entered: set[int] = set()

    def enter(library: Any) -> None:
        if id(library) not in entered:
            entered.add(id(library))
            for below in library._linking_libraries:
                enter(below)
            called_first[id(library)] = library

    for library in libraries:
        enter(library)
    return [*reversed(called_first.values())]


def _optimise(module: Any, machine: Any) -> None:
    """numba's passes: each function by itself, which unrolls loops that are to be vectorised as part of a caller's;

    then over all at once: calls are copied in and references dropped, and last all the rest.
    """
    alone = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    simplify = alone.getFunctionPassManager()
    simplify.add_refprune_pass()
    for function in module.functions:
        if not function.is_declaration:
            simplify.run(function, alone)
    for level in (0, 3):
        options = llvm.create_pipeline_tuning_options(speed_level=level)
        options.loop_vectorization = level > 0
        options.slp_vectorization = False
        builder = llvm.create_pass_builder(machine, options)
        manager = builder.getModulePassManager()
        if level == 0:
            manager.add_loop_rotate_pass()
            manager.add_instruction_combine_pass()
            manager.add_jump_threading_pass()
        manager.add_refprune_pass()
        manager.run(module, builder)


def _signature(entry: Entry) -> dict[str, Any]:
    """Types by name, those of arrays with the number of dimensions."""
    arguments = [
        [str(kind.dtype), kind.ndim] if isinstance(kind, types.Array) else [str(kind), None] for kind in entry.arguments
    ]
    return {"result": None if entry.result == types.none else str(entry.result), "arguments": arguments}


def _lowered(entry: Entry) -> Any:
    """The library of an entry, which leads to those of all it calls."""
    dispatcher = njit(
        entry.function, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **entry.options
    )
    dispatcher.compile(entry.result(*entry.arguments))
    compiled = dispatcher.overloads[entry.arguments]
    library = cpu_target.target_context.codegen().create_library(entry.name)
    library.add_ir_module(_wrapper(entry, compiled, library.create_ir_module(entry.name)))
    library.add_linking_library(compiled.library)
    return library


def _wrapper(entry: Entry, compiled: Any, module: Any) -> Any:
    """A function of the C calling convention around a compiled one, whose status is ignored: kernels do not raise."""
    context, result = compiled.target_context, compiled.signature.return_type
    kinds: list[Any] = []
    for kind in entry.arguments:
        is_array = isinstance(kind, types.Array)
        kinds += [ir.IntType(64)] * (1 + kind.ndim) if is_array else [_c_type(context, entry, kind)]
    returned = ir.VoidType() if result == types.none else _c_type(context, entry, result)
    outer = ir.Function(module, ir.FunctionType(returned, kinds), entry.name)
    inner_type = context.call_conv.get_function_type(result, entry.arguments)
    inner = ir.Function(module, inner_type, compiled.fndesc.llvm_func_name)
    builder = ir.IRBuilder(outer.append_basic_block())
    given, values = iter(outer.args), []
    for kind in entry.arguments:
        if isinstance(kind, types.Array):
            values.append(_array(context, builder, kind, [next(given) for _ in range(1 + kind.ndim)]))
        else:
            values.append(context.data_model_manager[kind].from_data(builder, next(given)))
    _, value = context.call_conv.call_function(builder, inner, result, entry.arguments, values)
    if result == types.none:
        builder.ret_void()
    else:
        builder.ret(context.data_model_manager[result].as_data(builder, value))
    return module


def _c_type(context: Any, entry: Entry, kind: Any) -> Any:
    if not isinstance(kind, types.Integer | types.Float | types.Boolean):
        raise KernelError(f"{entry.name}: {kind} cannot be passed; numbers and C-contiguous arrays can")
    return context.get_data_type(kind)


def _array(context: Any, builder: Any, kind: Any, words: list[Any]) -> Any:
    """The array at an address, C-contiguous, of the sizes that follow."""
    address, *sizes = words
    array = make_array(kind)(context, builder)
    item = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides: list[Any] = []
    step = ir.Constant(ir.IntType(64), item)
    for size in reversed(sizes):
        strides.insert(0, step)
        step = builder.mul(step, size)
    data = builder.inttoptr(address, context.get_data_type(kind.dtype).as_pointer())
    populate_array(array, data=data, shape=sizes, strides=strides, itemsize=item, meminfo=None)
    return array._getvalue()


def _hide(module: Any, visible: set[str]) -> None:
    """Give everything defined but the visible functions internal linkage."""
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in visible:
            value.linkage = "internal"


def _check(module: Any) -> None:
    missing = {
        function.name
        for function in module.functions
        if function.is_declaration and not function.name.startswith("llvm.")
    }
    if missing - _SYMBOLS:
        raise KernelError(
            f"kernels must not use {', '.join(sorted(missing - _SYMBOLS))}: it is numba's or Python's own"
        )


def _machine() -> Any:
    """Position-independent code for this processor, with the features that numba uses."""
    codegen = cpu_target.target_context.codegen()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=codegen._get_host_cpu_name(), features=codegen._tm_features, opt=3, reloc="pic", codemodel="default"
    )


def _remove_unused(module: Any, machine: Any) -> None:
    manager = llvm.create_new_module_pass_manager()
    manager.add_global_dead_code_eliminate_pass()
    manager.add_strip_dead_prototype_pass()
    manager.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))


def main(arguments: list[str]) -> int:
    """Build modules; see above."""
    object_file, signatures_file, *modules = arguments
    code, signatures = build([entry for module in modules for entry in entries_of(module)])
    Path(object_file).write_bytes(code)
    Path(signatures_file).write_text(json.dumps(signatures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
