"""Which of the plugins found may be used: settings, environment variables, versions, conflicts, dependencies."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

import importlib_metadata
from attrs import frozen
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specdec.registry.discovery import CORE, Found
from specdec.version import __version__ as CORE_VERSION

if TYPE_CHECKING:
    from specdec.config.schema import PluginsConfig

ALLOW_VARIABLE = "SPECDEC_PLUGINS_ALLOW"
BLOCK_VARIABLE = "SPECDEC_PLUGINS_BLOCK"

Installed = Callable[[str], str | None]
"""Tells the installed version of a distribution; None: there is none."""

Status = Literal[
    "ok", "missing dependency", "wrong core version", "conflict", "blocked", "broken", "not on this machine"
]
"""What a plugin is like; only listings ask what it needs of the machine (`specdec.registry.machine`)."""


@frozen(kw_only=True)
class PluginEntry:
    """One installed plugin, known from metadata alone."""

    kind: str | None
    """None, like ``name``, for a distribution whose entry points cannot be read."""
    name: str | None
    distribution: str
    version: str
    status: Status
    detail: str = ""
    """Why the status is not ok."""
    found: Found
    """What the distribution declares."""


@frozen(kw_only=True)
class Policy:
    """The settings about plugins, from the configuration and the environment.

    Names in ``allow`` and ``block`` are plugin names or distributions. An allow list, even an empty one, never shuts
    out what specdec-core brings itself: an engine cannot run without it.
    """

    prefer: Mapping[str, str]
    allow: tuple[tuple[str, frozenset[str]], ...]
    """(setting, names): a plugin must be in each."""
    block: tuple[tuple[str, frozenset[str]], ...]
    """(setting, names): a plugin must be in none."""

    @classmethod
    def from_settings(cls, plugins: PluginsConfig | None, environ: Mapping[str, str]) -> Policy:
        """Join the ``plugins`` section with the environment variables; each can only restrict further.

        The configuration reads the same variables; a list that came from one is named after the variable alone.
        """
        allow: dict[frozenset[str], str] = {}
        block: dict[frozenset[str], str] = {}
        if plugins is not None:
            allow = {frozenset(plugins.allow): "plugins.allow"} if plugins.allow is not None else {}
            block = {frozenset(plugins.block): "plugins.block"} if plugins.block else {}
        if ALLOW_VARIABLE in environ:
            allow[_names(environ[ALLOW_VARIABLE])] = ALLOW_VARIABLE
        if environ.get(BLOCK_VARIABLE):
            block[_names(environ[BLOCK_VARIABLE])] = BLOCK_VARIABLE
        return cls(
            prefer=plugins.prefer if plugins is not None else {},
            allow=tuple((setting, names) for names, setting in allow.items()),
            block=tuple((setting, names) for names, setting in block.items()),
        )

    def forbidding(self, found: Found) -> str | None:
        """The setting that forbids a plugin, or None."""
        for setting, names in self.block:
            if _is_in(found, names):
                return setting
        if canonicalize_name(found.distribution) == CORE:
            return None
        return next((setting for setting, names in self.allow if not _is_in(found, names)), None)

    def unmatched(self, plugins: Iterable[Found]) -> list[str]:
        """One warning for each name in the settings that no installed plugin or distribution has."""
        known = {found.name for found in plugins if found.name} | {found.distribution for found in plugins}
        listed = ", ".join(sorted(known))
        normalised = {canonicalize_name(name) for name in known}
        warnings = []
        preferences = ("plugins.prefer", frozenset(self.prefer) | frozenset(self.prefer.values()))
        for setting, names in (*self.allow, *self.block, preferences):
            for name in sorted(names):
                if canonicalize_name(name) not in normalised:
                    close = difflib.get_close_matches(name, known, n=1)
                    hint = f" Did you mean {close[0]!r}?" if close else ""
                    warnings.append(f"{setting} names {name!r}, which is not installed.{hint} Known: {listed}.")
        return warnings


def judge(plugins: Sequence[Found], policy: Policy) -> tuple[PluginEntry, ...]:
    """Give each plugin its status."""
    permitted = [found for found in plugins if not found.problem and policy.forbidding(found) is None]
    offers = Counter((found.kind, found.name) for found in permitted)
    installed = cache(installed_version)  # plugins share most requirements, and reading metadata takes long
    entries = []
    for found in plugins:
        rivals = [other for other in permitted if (other.kind, other.name) == (found.kind, found.name)]
        contested = offers[(found.kind, found.name)] > 1
        status, detail = _status(found, rivals if contested else [], policy, installed)
        entries.append(
            PluginEntry(
                kind=found.kind,
                name=found.name,
                distribution=found.distribution,
                version=found.version,
                status=status,
                detail=detail,
                found=found,
            )
        )
    return tuple(entries)


def _status(found: Found, rivals: list[Found], policy: Policy, installed: Installed) -> tuple[Status, str]:
    setting = policy.forbidding(found)
    if found.problem:
        return "broken", found.problem
    if setting is not None:
        return "blocked", f"named in {setting}" if setting in dict(policy.block) else f"not named in {setting}"
    if rivals:
        chosen = preferred(rivals, policy)
        if chosen is None:
            others = ", ".join(f"{r.distribution} {r.version}" for r in rivals if r is not found)
            return "conflict", f"also offered by {others}"
        if chosen is not found:
            return "blocked", f"plugins.prefer chooses {chosen.distribution}"
    required = core_requirement(found)
    if required is not None and not required.specifier.contains(CORE_VERSION, prereleases=True):
        return "wrong core version", f"requires specdec-core {required.specifier}; {CORE_VERSION} is installed"
    missing = missing_requirements(found, installed)
    return ("missing dependency", "; ".join(missing)) if missing else ("ok", "")


def preferred(rivals: Sequence[Found], policy: Policy) -> Found | None:
    """The one that ``plugins.prefer`` chooses among plugins of one name, or None."""
    wanted = policy.prefer.get(rivals[0].name or "")
    if wanted is None:
        return None
    return next((r for r in rivals if canonicalize_name(r.distribution) == canonicalize_name(wanted)), None)


def core_requirement(found: Found) -> Requirement | None:
    """The distribution's own requirement on specdec-core, or None."""
    return next((r for r in found.requirements if canonicalize_name(r.name) == CORE and applies(r)), None)


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return str(importlib_metadata.version(distribution))
    except Exception:  # not installed, or its metadata cannot be read
        return None


def missing_requirements(found: Found, installed: Installed = installed_version) -> list[str]:
    """Each requirement of a plugin that the environment does not meet, in words.

    Args:
        found: the plugin.
        installed: tells the installed version of a distribution; one that remembers, where many plugins are judged.
    """
    needed = [
        requirement
        for requirement in found.requirements
        if canonicalize_name(requirement.name) != CORE and applies(requirement, *found.extras)
    ]
    versions = [installed(requirement.name) for requirement in needed]
    return [_unmet(r, version) for r, version in zip(needed, versions, strict=True) if not _satisfies(version, r)]


def _unmet(requirement: Requirement, installed: str | None) -> str:
    if installed is None:
        return f"{requirement.name} is not installed"
    return f"requires {requirement.name} {requirement.specifier}; {installed} is installed"


def is_met(requirement: Requirement) -> bool:
    """Whether a distribution that satisfies the requirement is installed."""
    return _satisfies(installed_version(requirement.name), requirement)


def _satisfies(installed: str | None, requirement: Requirement) -> bool:
    return installed is not None and requirement.specifier.contains(installed, prereleases=True)


def applies(requirement: Requirement, *extras: str) -> bool:
    """Whether a requirement holds on this machine with the given extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _is_in(found: Found, names: frozenset[str]) -> bool:
    normalised = {canonicalize_name(name) for name in names}
    return found.name in names or canonicalize_name(found.distribution) in normalised
