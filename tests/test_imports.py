"""Imports go one way: the core imports no plugin, plugins import no other plugin and nothing private of the core.

A tool, a package that brings commands alone, may import the plugins that it declares as dependencies.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.name: path
    for pattern in ("core/src/*", "builtin_proposers/*/src/*", "builtin_heads/*/src/*", "plugins/*/src/*")
    for path in ROOT.glob(pattern)
    if (path / "__init__.py").is_file()
}
PLUGINS = sorted(set(SOURCES) - {"specdec"})


def _imports(package: Path) -> Iterator[tuple[Path, str]]:
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((path, f"{node.module or ''}.{alias.name}") for alias in node.names)


def test_the_workspace_is_seen() -> None:
    assert "specdec" in SOURCES
    assert "specdec_ngram" in PLUGINS


def test_the_core_imports_no_plugin() -> None:
    wrong = [(path, name) for path, name in _imports(SOURCES["specdec"]) if name.startswith("specdec_")]
    assert wrong == []


def _drives(package: Path) -> set[str]:
    """Plugins that a tool builds on."""
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if set(project.get("entry-points", {})) != {"specdec.commands"}:
        return set()
    return {Requirement(text).name.replace("-", "_") for text in project["dependencies"]}


def test_a_tool_is_known_by_its_commands() -> None:
    assert _drives(SOURCES["specdec_train"]) & set(PLUGINS) == {"specdec_extract_hidden_states"}
    assert all(_drives(SOURCES[name]) == set() for name in ("specdec_ngram", "specdec_extract_hidden_states"))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_imports_no_other_plugin_and_nothing_private(plugin: str) -> None:
    wrong = []
    allowed = {plugin, *_drives(SOURCES[plugin])}
    for path, name in _imports(SOURCES[plugin]):
        top, *rest = name.split(".")
        if top.startswith("specdec_") and top not in allowed:
            wrong.append((path, name))
        if top == "specdec" and any(part.startswith("_") for part in rest):
            wrong.append((path, name))
    assert wrong == []
