"""Keeps what the packages of this workspace must have in common, in one place each; with --check, only looks.

Each distribution's version stands in one file of its own; licence, Python range and build system equal the core's;
the range of specdec-core that a plugin asks for holds the core of this workspace. Without --check, copies of the
licence are brought up to date.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
MEMBER_FOLDERS = ("core", "builtin_proposers/*", "builtin_heads/*", "plugins/*")
COMMON = ("license", "license-files", "requires-python", "readme", "dynamic")


def members() -> list[Path]:
    """Folders of the workspace that are distributions."""
    return sorted(path.parent for pattern in MEMBER_FOLDERS for path in ROOT.glob(f"{pattern}/pyproject.toml"))


def problems() -> Iterator[str]:
    """Everything that is wrong, one sentence each."""
    core = _read(ROOT / "core")
    core_version = _version(ROOT / "core", core)
    for member in members():
        settings = _read(member)
        name = settings["project"]["name"]
        where = member.relative_to(ROOT)
        for key in COMMON:
            if settings["project"].get(key) != core["project"].get(key):
                yield f"{where}: project.{key} differs from the core's"
        if settings["build-system"] != core["build-system"]:
            yield f"{where}: build-system differs from the core's"
        if _version(member, settings) is None:
            yield f"{where}: no __version__ where tool.hatch.version.path points"
        if not name.startswith("specdec-"):
            yield f"{where}: the distribution {name} should be called specdec-..."
        if not (member / "README.md").is_file():
            yield f"{where}: README.md is missing"
        if not any(member.glob("src/*/py.typed")):
            yield f"{where}: py.typed is missing"
        if member.name != "core":
            yield from _core_range(where, settings, core_version)
        if not _same_licence(member):
            yield f"{where}: LICENSE differs from the workspace's: run `make docs`"


def _core_range(where: Path, settings: dict[str, Any], core_version: str | None) -> Iterator[str]:
    requirements = [Requirement(text) for text in settings["project"].get("dependencies", [])]
    ours = [requirement for requirement in requirements if requirement.name == "specdec-core"]
    if not ours:
        yield f"{where}: does not depend on specdec-core"
    for requirement in ours:
        operators = {specifier.operator for specifier in requirement.specifier}
        if operators != {">=", "<"}:
            yield f"{where}: {requirement} should be a range, like specdec-core>=0.1,<0.2"
        elif core_version and not requirement.specifier.contains(core_version):
            yield f"{where}: {requirement} does not hold the core of this workspace, {core_version}"
    if set(settings["project"].get("entry-points", {})) == {"specdec.commands"}:
        return  # a tool may build on the methods it drives
    for requirement in requirements:
        if requirement.name.startswith("specdec-") and requirement.name != "specdec-core":
            yield f"{where}: depends on another plugin, {requirement.name}"


def _read(member: Path) -> dict[str, Any]:
    return tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))


def _version(member: Path, settings: dict[str, Any]) -> str | None:
    path = member / settings.get("tool", {}).get("hatch", {}).get("version", {}).get("path", "missing")
    found = re.search(r'^__version__ = "([^"]+)"$', path.read_text(encoding="utf-8"), re.M) if path.is_file() else None
    return found[1] if found else None


def _same_licence(member: Path) -> bool:
    copy = member / "LICENSE"
    return copy.is_file() and copy.read_bytes() == (ROOT / "LICENSE").read_bytes()


def main() -> int:
    """Check, or update and check; returns the exit code."""
    if "--check" not in sys.argv[1:]:
        for member in members():
            if not _same_licence(member):
                (member / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    found = list(problems())
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
