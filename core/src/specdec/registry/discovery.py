"""What is installed: entry points of all distributions, read from metadata alone.

Nothing is imported here. Each distribution is read under a guard of its own, so that one with unreadable metadata is
named as broken and the others are still found.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import importlib_metadata
from attrs import evolve, field, frozen
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from specdec.registry.catalogue import GROUPS
from specdec.wording import reason_of

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint
    from importlib_metadata import IDistribution as Distribution

CORE = "specdec-core"
_PREFIX = "specdec."


@frozen(kw_only=True)
class Found:
    """One plugin as its distribution declares it, before any setting is applied."""

    kind: str | None
    """None when the distribution is broken and its plugins cannot be told."""
    name: str | None
    distribution: str
    version: str
    value: str = ""
    """``module`` or ``module:attribute``."""
    extras: tuple[str, ...] = ()
    """Extras of the distribution that the entry point says it needs."""
    requirements: tuple[Requirement, ...] = field(default=(), eq=False, repr=False)
    problem: str = ""
    """Why it cannot be used, when its metadata is broken."""

    @property
    def module(self) -> str:
        """The module part of ``value``."""
        return self.value.partition(":")[0].strip()


@frozen
class Discovery:
    """All plugins, and what a user should know about the way they were found."""

    plugins: tuple[Found, ...]
    warnings: tuple[str, ...]


@frozen
class _Source:
    """The plugins of one metadata folder."""

    name: str
    version: str
    place: str
    plugins: tuple[Found, ...]


def discover() -> Discovery:
    """Read the entry points of everything on ``sys.path``."""
    by_name: dict[str, list[_Source]] = {}
    for dist in importlib_metadata.distributions():
        source = _read(_Distribution(dist))
        if source is not None:
            by_name.setdefault(canonicalize_name(source.name), []).append(source)
    plugins: list[Found] = []
    warnings: list[str] = []
    for sources in by_name.values():
        kept, warning = _merge(sources)
        plugins.extend(kept)
        warnings.extend(warning)
    plugins.sort(key=lambda found: (found.kind or "~", found.name or "", found.distribution))
    return Discovery(tuple(plugins), tuple(warnings))


# --- one metadata folder ------------------------------------------------------------------------


class _Distribution:
    """A distribution whose metadata is parsed once, instead of for every fact that is asked."""

    def __init__(self, dist: Distribution) -> None:
        self._dist = dist

    @cached_property
    def metadata(self) -> Any:
        return self._dist.metadata

    @property
    def version(self) -> Any:
        return self.metadata["Version"]

    @property
    def requires(self) -> list[str] | None:
        return self.metadata.get_all("Requires-Dist") or self._dist.requires

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)


def _read(dist: _Distribution) -> _Source | None:
    """The plugins of a distribution; None when it has nothing to do with specdec."""
    try:
        text = dist.read_text("entry_points.txt")
    except UnicodeDecodeError as error:
        concerns_us = _PREFIX.encode() in error.object
        return _broken(dist, "its entry_points.txt is not UTF-8 text") if concerns_us else None
    except OSError as error:
        problem = f"its entry_points.txt cannot be read ({reason_of(error)})"
        return _broken(dist, problem) if _name(dist).startswith("specdec") else None
    if text is None:
        return None
    if not text.strip():
        return _broken(dist, "its entry_points.txt is empty") if _requires_core(dist) else None
    if _PREFIX not in text:
        return None
    try:
        points = [point for point in dist.entry_points if point.group.startswith(_PREFIX)]
    except Exception as error:
        return _broken(dist, f"its entry_points.txt cannot be parsed: {_bad_line(text, error)}")
    twice = _duplicate(points)
    if twice is not None:
        return _broken(dist, f"its entry_points.txt has the key {twice.name!r} twice in [{twice.group}]")
    return _source(dist, points)


def _source(dist: _Distribution, points: list[EntryPoint]) -> _Source:
    name, version = _name(dist), _version(dist)
    requirements, problem = _requirements(dist)
    plugins = [_plugin(point, name, version) for point in points]
    if problem:
        plugins = [evolve(plugin, problem=plugin.problem or problem) for plugin in plugins]
    return _Source(name, version, _place(dist), tuple(evolve(plugin, requirements=requirements) for plugin in plugins))


_REFERENCE = re.compile(r"\s*([A-Za-z_][\w.]*\s*(?::\s*[A-Za-z_][\w.]*)?)\s*(?:\[([\w\s,.-]*)\])?\s*")


def _plugin(point: EntryPoint, distribution: str, version: str) -> Found:
    kind = GROUPS.get(point.group)
    reference = _REFERENCE.fullmatch(point.value)
    problem = ""
    if kind is None:
        close = difflib.get_close_matches(point.group, GROUPS, n=1)
        problem = f"no entry-point group is called {point.group!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    elif reference is None:
        problem = f"the entry point's value {point.value!r} is not 'module' or 'module:attribute'"
    elif kind.name == "head" and not all(point.name.partition(".")):
        problem = f"a head is named METHOD.MODEL_TYPE, such as 'eagle.llama', not {point.name!r}"
    extras = (reference[2] or "") if reference else ""
    return Found(
        kind=kind.name if kind else None,
        name=point.name,
        distribution=distribution,
        version=version,
        value=re.sub(r"\s", "", reference[1]) if reference else point.value,
        extras=tuple(extra for extra in re.split(r"[\s,]+", extras) if extra),
        problem=problem,
    )


def _broken(dist: _Distribution, problem: str) -> _Source:
    name, version = _name(dist), _version(dist)
    found = Found(kind=None, name=None, distribution=name, version=version, problem=problem)
    return _Source(name, version, _place(dist), (found,))


def _bad_line(text: str, error: Exception) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith(("#", ";", "[")) and "=" not in stripped:
            return f"line {number}, {stripped!r}, has no '='"
    return f"{type(error).__name__}: {error}"


def _duplicate(points: list[EntryPoint]) -> EntryPoint | None:
    seen: set[tuple[str, str]] = set()
    for point in points:
        if (point.group, point.name) in seen:
            return point
        seen.add((point.group, point.name))
    return None


def _requirements(dist: _Distribution) -> tuple[tuple[Requirement, ...], str]:
    requirements = []
    for text in _requires(dist):
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement:
            return (), f"its metadata holds the requirement {text!r}, which cannot be parsed"
    return tuple(requirements), ""


def _requires(dist: _Distribution) -> list[str]:
    try:
        return list(dist.requires or ())
    except Exception:  # metadata of any shape; the name and version below are guarded alike
        return []


def _requires_core(dist: _Distribution) -> bool:
    return any(canonicalize_name(re.split(r"[^\w.-]", text)[0]) == CORE for text in _requires(dist))


def _name(dist: _Distribution) -> str:
    try:
        name = dist.metadata["Name"]
    except Exception:
        name = None
    folder = getattr(dist, "_path", None)  # the name in the folder's own name is the last resort
    return str(name) if name else (folder.name.partition("-")[0] if folder is not None else "unknown")


def _version(dist: _Distribution) -> str:
    try:
        return str(dist.version or "unknown")
    except Exception:
        return "unknown"


def _place(dist: _Distribution) -> str:
    folder = getattr(dist, "_path", None)
    return str(folder.resolve() if isinstance(folder, Path) else dist.locate_file(""))


# --- several metadata folders of one distribution -----------------------------------------------


def _merge(sources: list[_Source]) -> tuple[tuple[Found, ...], list[str]]:
    """Settle several metadata folders of one distribution, for example a stale egg-info before the installed one.

    The newest version counts, wherever it stands on the path; the user is told when the folders differ.
    """
    sources = list({source.place: source for source in sources}.values())
    newest = max(sources, key=lambda source: _as_version(source.version))
    if all(_offers(source) == _offers(newest) and source.version == newest.version for source in sources):
        return newest.plugins, []
    places = ", ".join(f"{source.place} ({source.version})" for source in sources)
    warning = (
        f"{newest.name} has {len(sources)} metadata folders that differ: {places}. "
        f"Version {newest.version} is used; remove what is stale."
    )
    same_version = [source for source in sources if source.version == newest.version]
    return tuple(_union(same_version)), [warning]


def _union(sources: list[_Source]) -> Iterator[Found]:
    seen: set[tuple[str | None, str | None]] = set()
    for source in sources:
        for plugin in source.plugins:
            if (plugin.kind, plugin.name) not in seen:
                seen.add((plugin.kind, plugin.name))
                yield plugin


def _offers(source: _Source) -> set[tuple[str | None, str | None, str, str]]:
    return {(plugin.kind, plugin.name, plugin.value, plugin.problem) for plugin in source.plugins}


def _as_version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0.dev0")
