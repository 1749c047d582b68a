"""The registry's errors: what was asked, what is there, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from specdec.errors import (
    PluginBlockedError,
    PluginConflictError,
    PluginContractError,
    PluginKindError,
    PluginNotFoundError,
    PluginUnsuitableError,
    PluginVersionError,
)
from specdec.registry.catalogue import DISTRIBUTIONS, KINDS
from specdec.registry.policy import PluginEntry, core_requirement
from specdec.version import __version__ as CORE_VERSION


def describe(entry: PluginEntry) -> str:
    """For example "proposer 'ngram' of specdec-ngram 0.1.0"."""
    label = KINDS[entry.kind].label if entry.kind else "plugin"
    return f"{label} {entry.name!r} of {entry.distribution} {entry.version}"


def installed_names(kind: str, entries: Iterable[PluginEntry]) -> str:
    """The end of many messages: "Installed proposers: ngram 0.1.0."."""
    listed = ", ".join(f"{entry.name} {entry.version}" for entry in entries if entry.kind == kind)
    return f"Installed {KINDS[kind].label}s: {listed or 'none'}."


def not_found(kind: str, name: str, entries: Sequence[PluginEntry]) -> PluginNotFoundError | PluginKindError:
    """No plugin of a kind has the name: it is another kind's, known but not installed, misspelt, or unknown."""
    known = DISTRIBUTIONS.get(kind, {})
    other = _other_kind(kind, name, entries)
    if other is not None and name not in known:
        return _wrong_kind(kind, name, other, entries)
    installed = tuple(dict.fromkeys(str(entry.name) for entry in entries if entry.kind == kind))
    label = KINDS[kind].label
    if name in known:
        suggestion, install = None, known.get(name)
        text = f"No {label} named {name!r} is installed: pip install {install}."
    else:
        close = difflib.get_close_matches(name, [*installed, *known], n=1)
        suggestion = close[0] if close else None
        install = known.get(suggestion or "") if suggestion not in installed else None
        text = f"No {label} named {name!r}." + did_you_mean(suggestion, install)
    broken = "".join(
        f" {entry.distribution} {entry.version} is installed but broken: {entry.detail}."
        for entry in entries
        if entry.status == "broken" and entry.kind in (None, kind)
    )
    return PluginNotFoundError(
        f"{text} {installed_names(kind, entries)}{broken}",
        kind=kind,
        name=name,
        suggestion=suggestion,
        install=install,
        installed=installed,
    )


def did_you_mean(suggestion: str | None, install: str | None) -> str:
    """ " Did you mean 'eagle' (not installed: pip install specdec-eagle)?"; empty without a suggestion."""
    if suggestion is None:
        return ""
    return f" Did you mean {suggestion!r}" + (f" (not installed: pip install {install})?" if install else "?")


def _other_kind(kind: str, name: str, entries: Iterable[PluginEntry]) -> str | None:
    installed = (entry.kind for entry in entries if entry.name == name and entry.kind != kind)
    known = (other for other, names in DISTRIBUTIONS.items() if name in names and other != kind)
    return next((found for found in (*installed, *known) if found), None)


def _wrong_kind(kind: str, name: str, actual: str, entries: Sequence[PluginEntry]) -> PluginKindError:
    is_a, wanted = KINDS[actual], KINDS[kind]
    return PluginKindError(
        f"{name!r} is {_a(is_a.label)}, not {_a(wanted.label)}: {is_a.label}s {is_a.use}. "
        f"{installed_names(kind, entries)}",
        kind=kind,
        name=name,
        actual_kind=actual,
    )


def _a(label: str) -> str:
    return f"{'an' if label[0] in 'aeiou' else 'a'} {label}"


def blocked(entry: PluginEntry) -> PluginBlockedError:
    """A setting or a variable shuts the plugin out."""
    setting = entry.detail.rpartition(" ")[2]
    remedy = "Add it there to use it" if entry.detail.startswith("not") else "Take it out there to use it"
    return PluginBlockedError(
        f"The {describe(entry)} is installed but may not be loaded: it is {entry.detail}. {remedy}.",
        kind=entry.kind,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        setting=setting,
    )


def conflict(entries: Sequence[PluginEntry], preferred: str | None) -> PluginConflictError:
    """Several distributions offer one name."""
    first, last = entries[0], entries[-1]
    listed = " and ".join(f"{entry.distribution} {entry.version}" for entry in entries)
    label = KINDS[first.kind].label if first.kind else "plugin"
    unhelpful = f" plugins.prefer names {preferred!r} for it, which does not offer it." if preferred else ""
    return PluginConflictError(
        f"{len(entries)} distributions offer the {label} {first.name!r}: {listed}.{unhelpful} "
        f'Choose one with plugins.prefer = {{"{first.name}" = "{first.distribution}"}}, block one with '
        f'plugins.block = ["{last.distribution}"], or remove one: pip uninstall {last.distribution}',
        kind=first.kind,
        name=first.name,
        distributions=[entry.distribution for entry in entries],
    )


def wrong_core_version(entry: PluginEntry) -> PluginVersionError:
    """The plugin asks for another version of specdec-core."""
    requirement = core_requirement(entry.found)
    required = str(requirement.specifier) if requirement else ""
    if _is_too_old(Version(CORE_VERSION), SpecifierSet(required)):
        remedy = f"Upgrade the core: pip install 'specdec-core{required}'"
    else:
        remedy = f"Upgrade the plugin: pip install --upgrade {entry.distribution}"
    return PluginVersionError(
        f"The {describe(entry)} requires specdec-core {required}, but {CORE_VERSION} is installed. {remedy}",
        kind=entry.kind,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        required=required,
        core_version=CORE_VERSION,
    )


def _is_too_old(version: Version, required: SpecifierSet) -> bool:
    """Whether a version lies below a range (rather than above it)."""
    lower = [s.version.removesuffix(".*") for s in required if s.operator in (">=", ">", "~=", "==", "===")]
    return any(version < Version(bound) for bound in lower)


def broken(entry: PluginEntry) -> PluginContractError:
    """The distribution's metadata is wrong."""
    return contract(entry, f"{entry.detail}.")


def unsuitable(entry: PluginEntry, subject: str, reasons: Sequence[str]) -> PluginUnsuitableError:
    """The backend was asked for but cannot serve this model or machine; the setting is called like the kind."""
    listed = "; ".join(reasons)
    return PluginUnsuitableError(
        f'The {describe(entry)} cannot serve {subject}: {listed}. With {entry.kind} = "auto" one that can is taken.',
        kind=entry.kind,
        name=entry.name,
        reasons=reasons,
    )


def contract(entry: PluginEntry, problem: str) -> PluginContractError:
    """What the plugin declares, registers, returns or raises breaks the contract."""
    return PluginContractError(
        f"The {describe(entry)} breaks the contract of plugins: {problem}",
        kind=entry.kind,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
    )
