"""Importing one selected plugin, and calling its hooks."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
from functools import cache
from typing import Any, NoReturn

import pluggy
from attrs import frozen
from packaging.utils import canonicalize_name

from specdec import hookspecs
from specdec.errors import PluginImportError, SpecdecError
from specdec.registry.catalogue import KINDS
from specdec.registry.messages import contract, describe
from specdec.registry.policy import PluginEntry, applies, is_met, missing_requirements
from specdec.wording import cause_of

logger = logging.getLogger("specdec.registry")


@frozen(eq=False)
class Plugin:
    """An imported plugin, alone in a pluggy manager of its own, so that its hooks have one implementation."""

    entry: PluginEntry
    manager: pluggy.PluginManager

    def implements(self, hook: str) -> bool:
        """Whether the plugin has this hook."""
        return bool(getattr(self.manager.hook, hook).get_hookimpls())

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a hook of this plugin.

        Raises:
            PluginContractError: the plugin has no such hook, or it raised what a hook should not raise.
            PluginImportError: an import inside the hook failed.
            SpecdecError: whatever the hook itself raised.
        """
        if not self.implements(hook):
            raise contract(self.entry, f"implements no hook {hook!r}; it implements {_listed(hooks_of(self.manager))}.")
        try:
            return getattr(self.manager.hook, hook)(**arguments)
        except (SpecdecError, KeyboardInterrupt):
            raise
        except ImportError as error:
            _raise_import_error(self.entry, error)
        except BaseException as error:
            # a SystemExit out of a plugin must not end the program
            raise contract(self.entry, f"its hook {hook!r} raised {cause_of(error)}") from error

    def build(self, hook: str, **arguments: Any) -> Any:
        """Call a hook that must return an object, and check what comes back."""
        result = self.call(hook, **arguments)
        if result is None:
            raise contract(self.entry, f"its hook {hook!r} returned None, where an object is required.")
        expected = _result_type(hook)
        if expected is not None and not isinstance(result, expected):
            wanted = f"{expected.__module__}.{expected.__qualname__}"
            raise contract(
                self.entry, f"its hook {hook!r} returned {_described(result)}, where a {wanted} is required."
            )
        return result


def load(entry: PluginEntry) -> Plugin:
    """Import a plugin and register it with a new manager.

    Raises:
        PluginImportError: importing its module fails, in whatever way.
        PluginContractError: what it registers does not fit the hook specifications.
    """
    for unmet in missing_requirements(entry.found) if entry.status == "missing dependency" else ():
        logger.warning("The %s may not work: %s.", describe(entry), unmet)
    plugin = _import(entry)
    if inspect.isclass(plugin) or inspect.isroutine(plugin):
        what = "class" if inspect.isclass(plugin) else "function"
        raise contract(
            entry,
            f"its entry point {entry.found.value!r} is a {what}; it must name a module (or an instance) that holds "
            "functions marked with @hookimpl.",
        )
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=f"{entry.kind}:{entry.name}")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise contract(entry, _validation_text(manager, plugin, error)) from error
    _require_main_hook(entry, manager, plugin)
    return Plugin(entry, manager)


def hooks_of(manager: pluggy.PluginManager) -> list[str]:
    """Names of the hooks that a manager's plugin implements."""
    return [name for name in spec_names() if getattr(manager.hook, name).get_hookimpls()]


@cache
def spec_names() -> tuple[str, ...]:
    """Names of all hooks, in the order of `specdec.hookspecs`."""
    attribute = f"{hookspecs.PROJECT}_spec"
    return tuple(name for name, value in vars(hookspecs).items() if hasattr(value, attribute))


# --- importing ----------------------------------------------------------------------------------


def _import(entry: PluginEntry) -> Any:
    module_name, _, path = entry.found.value.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _raise_import_error(entry, error)
    for part in filter(None, path.split(".")):
        if not hasattr(found, part):
            raise contract(entry, f"its entry point names {entry.found.value!r}, but there is no {part!r} in it.")
        found = getattr(found, part)
    return found


def _raise_import_error(entry: PluginEntry, error: BaseException) -> NoReturn:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    install = None
    if missing:
        install, remedy = _remedy(entry, missing)
        problem = f"module {missing!r} is missing. {remedy}"
    else:
        unmet = "".join(f" {entry.distribution}: {text}." for text in missing_requirements(entry.found))
        problem = f"{type(error).__name__}: {error}.{unmet}"
    raise PluginImportError(
        f"The {describe(entry)} is installed but cannot be imported: {problem}",
        kind=entry.kind,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        missing_module=missing,
        install=install,
    ) from error


def _remedy(entry: PluginEntry, missing: str) -> tuple[str | None, str]:
    """What to install for a missing module, and the sentence that says so."""
    top = missing.partition(".")[0]
    if f"{entry.found.module}.".startswith(f"{missing}."):
        group = KINDS[entry.kind].group if entry.kind else ""
        return None, (
            f"Its entry point names {entry.found.module!r}: correct {entry.name} in "
            f'[project.entry-points."{group}"] of its pyproject.toml and install it again, or reinstall '
            f"{entry.distribution} if the file was lost."
        )
    if top == entry.found.module.partition(".")[0]:
        reinstall = f"pip install --force-reinstall --no-deps {entry.distribution}"
        return None, f"It is the plugin's own; the installation is incomplete or stale: {reinstall}"
    unmet = [r for r in entry.found.requirements if not is_met(r)]
    likely = [r for r in unmet if canonicalize_name(r.name) == canonicalize_name(top)] or unmet
    for requirement in likely:
        if applies(requirement):
            target = f"{requirement.name}{requirement.specifier}"
            return target, f"{entry.distribution} requires {target}: pip install '{target}'"
    for extra in _extras(entry):
        if any(applies(requirement, extra) for requirement in likely):
            target = f"{entry.distribution}[{extra}]"
            return target, f"The extra {extra!r} brings it: pip install '{target}'"
    return None, f"{entry.distribution} does not say which distribution brings it."


def _extras(entry: PluginEntry) -> list[str]:
    """Names of the extras that the requirements' markers mention."""
    names: dict[str, None] = {}
    for requirement in entry.found.requirements:
        text = str(requirement.marker) if requirement.marker else ""
        for part in text.split("extra == ")[1:]:
            names[part.split(part[0])[1]] = None
    return list(names)


# --- what a plugin registers --------------------------------------------------------------------


def _validation_text(manager: pluggy.PluginManager, plugin: Any, error: pluggy.PluginValidationError) -> str:
    callers = manager.get_hookcallers(plugin) or []
    unknown = [caller.name for caller in callers if not caller.has_spec()]
    if not unknown:
        return f"it does not fit the hook specification: {' '.join(str(error).split())}"
    name = unknown[0]
    close = difflib.get_close_matches(name, spec_names(), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Hooks: {', '.join(spec_names())}."
    return f"it implements {name!r}, which is no hook. {hint}"


def _require_main_hook(entry: PluginEntry, manager: pluggy.PluginManager, plugin: Any) -> None:
    hook = KINDS[entry.kind].hook if entry.kind else ""
    if hook in hooks_of(manager):
        return
    text = f"a {entry.kind} must implement the hook {hook!r}; it implements {_listed(hooks_of(manager))}."
    if callable(getattr(plugin, hook, None)):
        text += f" It has a function {hook!r}: mark it with @specdec.hookspecs.hookimpl."
    raise contract(entry, text)


def _result_type(hook: str) -> type | None:
    returns = next((kind.returns for kind in KINDS.values() if kind.hook == hook), "")
    if not returns:
        return None
    module, _, name = returns.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _described(value: object) -> str:
    """What a hook returned, in words; a class where an object of it was meant is the usual slip."""
    if inspect.isclass(value):
        return f"the class {value.__qualname__} itself (not {value.__qualname__}(…), an object of it)"
    return type(value).__qualname__


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
