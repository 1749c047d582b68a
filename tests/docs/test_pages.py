"""The documentation says what is there: hooks, folders, links and changelog fragments."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specdec import hookspecs
from specdec.registry.loading import spec_names
from specdec.testing.models import ARCHITECTURES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/*/README.md")]
    if ".venv" not in path.parts
)


@pytest.mark.parametrize("hook", spec_names())
def test_each_hook_has_a_heading_with_its_exact_arguments(hook: str) -> None:
    page = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"\n## `{hook}({arguments})`\n" in page


@pytest.mark.parametrize("hook", spec_names())
def test_each_hook_says_when_it_is_called_and_since_when_it_exists(hook: str) -> None:
    docstring = inspect.getdoc(getattr(hookspecs, hook)) or ""
    assert "\nWhen called: " in docstring
    assert "\nCompatibility: since " in docstring
    for argument in inspect.signature(getattr(hookspecs, hook)).parameters:
        assert re.search(rf"^    {argument}: ", docstring, re.M), f"{argument} is not described"


def test_the_hook_reference_is_what_the_docstrings_say() -> None:
    script = ROOT / "scripts/gen_hook_docs.py"
    assert subprocess.run([sys.executable, script, "--check"], cwd=ROOT).returncode == 0


def test_the_modules_that_authors_are_sent_to_exist() -> None:
    text = (ROOT / "docs/how-to/write-a-plugin.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`specdec\.[^|]+) \|", text, re.M)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 5
    assert [name for name in names if not _is_module(name)] == []


def _is_module(name: str) -> bool:
    path = ROOT / "core/src" / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_every_name_of_the_python_reference_has_a_meaning() -> None:
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.M)
    assert len(rows) > 200
    assert [name for name, meaning in rows if not meaning.strip(" |")] == []


def test_the_page_of_what_runs_names_the_architectures_that_are_tested() -> None:
    text = (ROOT / "docs/reference/supported.md").read_text(encoding="utf-8")
    listed = re.search(r"^Tested as targets, by `model_type`: (.*?)\. Others", text, re.M | re.S)
    assert listed
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == ARCHITECTURES


def test_the_structure_page_names_only_what_is_there() -> None:
    text = (ROOT / "docs/explanation/structure.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([^`]+)` \|", text, re.M)
    assert len(named) > 20
    assert [name for name in named if named.count(name) > 1] == []
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_structure_page_names_every_part_of_the_core() -> None:
    text = (ROOT / "docs/explanation/structure.md").read_text(encoding="utf-8")
    package = ROOT / "core/src/specdec"
    folders = {path.parent for path in package.glob("*/__init__.py")}
    modules = {path for path in package.glob("*.py") if path.name not in ("__init__.py", "version.py")}
    missing = [path.relative_to(ROOT) for path in folders | modules if f"`{path.relative_to(ROOT)}`" not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_begins_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line.split("#")[0].strip() for line in lines if line.startswith("    ")]
    assert commands[:2] == ["make demo", "make test"]


def test_changelog_fragments_have_an_issue_a_type_and_packages() -> None:
    members = {path.parent.name for pattern in ("core", "*/*") for path in ROOT.glob(f"{pattern}/pyproject.toml")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    types = "|".join(kind["directory"] for kind in settings["tool"]["towncrier"]["type"])
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    for path in fragments:
        assert re.fullmatch(rf"\d+\.({types})(\.\d+)?\.md", path.name), path.name
        packages = path.read_text(encoding="utf-8").partition(": ")[0].split(", ")
        assert set(packages) <= members, f"{path.name} does not begin with the folders of its packages"
