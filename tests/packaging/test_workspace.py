"""What the packages of the workspace declare: common settings, and a dependency for everything they import."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import importlib_metadata
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specdec.registry.catalogue import CHECKPOINTS, DISTRIBUTIONS, GROUPS

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_packages", ROOT / "scripts/check_packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MEMBERS: list[Path] = _script().members()


def test_the_workspace_has_no_problems() -> None:
    assert list(_script().problems()) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"specdec-core>=0.1,<0.2"', '"specdec-core>=0.1"', "should be a range"),
        ('"specdec-core>=0.1,<0.2"', '"specdec-core>=7,<8"', "does not hold the core of this workspace"),
        ('"specdec-core>=0.1,<0.2"', '"specdec-core>=0.1,<0.2", "specdec-demo"', "depends on another plugin"),
        ('requires-python = ">=3.11"', 'requires-python = ">=3.10"', "project.requires-python differs"),
        ('path = "src/specdec_ngram/__init__.py"', 'path = "src/none.py"', "no __version__"),
        ('name = "specdec-ngram"', 'name = "ngram"', "should be called specdec-"),
    ],
)
def test_a_wrong_setting_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, told: str
) -> None:
    shutil.copy(ROOT / "LICENSE", tmp_path)
    for member in ("core", "builtin_proposers/ngram"):
        ignored = shutil.ignore_patterns("tests", "__pycache__")
        shutil.copytree(ROOT / member, tmp_path / member, ignore=ignored)
    settings = tmp_path / "builtin_proposers/ngram/pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    assert old in text
    settings.write_text(text.replace(old, new), encoding="utf-8")
    script = _script()
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (problem,) = script.problems()
    assert problem.startswith("builtin_proposers/ngram: ")
    assert told in problem


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_everything_imported_is_declared(member: Path) -> None:
    """An import that works only because another package happens to bring it is a failure waiting for that package."""
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [text for extra in project.get("optional-dependencies", {}).values() for text in extra]
    declared = {canonicalize_name(Requirement(text).name) for text in [*project["dependencies"], *optional]}
    # a plugin takes torch in the range that the core asks for, since both share its tensors
    declared |= {canonicalize_name(project["name"]), "torch"}
    providers = {**importlib_metadata.packages_distributions(), "specdec": ["specdec-core"]}
    undeclared = {
        f"{path.relative_to(member)} imports {name}"
        for path in member.glob("src/**/*.py")
        for name in _imported(path) - set(sys.stdlib_module_names)
        if declared.isdisjoint(map(canonicalize_name, providers.get(name, [name])))
    }
    assert sorted(undeclared) == []


def _imported(path: Path) -> set[str]:
    """Top-level packages that a module imports, inside functions too; for type checking only does not count."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_what_messages_tell_to_install_is_here_and_brings_the_name() -> None:
    """A name that no member offers would send users to a package of nobody, or of somebody else."""
    named = {(kind, name): dist for kind, names in DISTRIBUTIONS.items() for name, dist in names.items()}
    offered: dict[tuple[str, str], str] = {}
    for file in [ROOT / "core/pyproject.toml", *ROOT.glob("*/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for group, points in project.get("entry-points", {}).items():
            if group in GROUPS:
                offered |= {(GROUPS[group].name, name): project["name"] for name in points}
    assert named == offered
    assert {name for _, name in CHECKPOINTS} <= set(DISTRIBUTIONS["proposer"])
