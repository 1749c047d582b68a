"""Looking at a plugin's files without importing it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def package_folders(module: str) -> Iterator[Path]:
    """The folders where ``module`` lies inside its package; none for a module outside any package."""
    package, *inner = module.split(".")[:-1] or [module]
    try:
        spec = importlib.util.find_spec(package)  # imports nothing: the name has no dot
    except (ImportError, ValueError):
        return
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(location, *inner)


def declared_hooks(module: str) -> tuple[str, ...]:
    """Names of the top-level functions of ``module`` that are decorated with ``hookimpl``, read from its source.

    Empty when the source is not found or does not parse; importing would tell more, but also run the plugin.
    """
    for path in _source_files(module):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return ()
        functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
        return tuple(node.name for node in functions if any(map(_is_hookimpl, node.decorator_list)))
    return ()


def _source_files(module: str) -> Iterator[Path]:
    name = module.rpartition(".")[2]
    for folder in package_folders(module):
        for path in (folder / f"{name}.py", folder / name / "__init__.py", folder / "__init__.py"):
            if path.is_file():
                yield path
    if "." not in module:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin)


def _is_hookimpl(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "hookimpl"
