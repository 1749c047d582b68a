"""Finds installed plugins, selects by name, and loads what was selected.

Listing reads metadata only; a plugin's module is imported when it is created, configured or asked about a checkpoint. A
registry belongs to one engine, and each plugin in it has a pluggy manager of its own, so that a hook never has a second
implementation to fall through to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import PluginError, PluginUnsuitableError, SpecdecError
from specdec.registry import messages
from specdec.registry.catalogue import KINDS
from specdec.registry.discovery import discover
from specdec.registry.loading import Plugin, load
from specdec.registry.policy import PluginEntry, Policy, judge
from specdec.registry.sources import declared_hooks
from specdec.wording import cause_of

if TYPE_CHECKING:
    import argparse

    from specdec.attention.interface import AttentionBackend
    from specdec.config.schema import PluginsConfig
    from specdec.sampling.backend import SamplingBackend
    from specdec.types import AttentionRequirements, EngineContext, Identification, ProposerCapabilities

logger = logging.getLogger("specdec.registry")


class Registry:
    """The plugins of one engine or command.

    Args:
        plugins: the ``plugins`` section of the configuration; None restricts nothing.
        environ: environment variables, for SPECDEC_PLUGINS_ALLOW and SPECDEC_PLUGINS_BLOCK.
    """

    def __init__(self, plugins: PluginsConfig | None = None, *, environ: Mapping[str, str] = os.environ) -> None:
        self._policy = Policy.from_settings(plugins, environ)
        self._loaded: dict[tuple[str, str], Plugin] = {}

    # --- listing ----------------------------------------------------------------------------------

    def entries(self) -> tuple[PluginEntry, ...]:
        """Every installed plugin with its status, sorted by kind and name. Imports none of them."""
        return self._entries

    @cached_property
    def _entries(self) -> tuple[PluginEntry, ...]:
        discovery = discover()
        for warning in (*discovery.warnings, *self._policy.unmatched(discovery.plugins)):
            logger.warning("%s", warning)
        return judge(discovery.plugins, self._policy)

    def hooks(self, entry: PluginEntry) -> tuple[str, ...]:
        """The hooks an entry's module defines, as far as its source tells; imports nothing."""
        return declared_hooks(entry.found.module) if entry.kind else ()

    # --- selecting and loading --------------------------------------------------------------------

    def select(self, kind: str, name: str) -> PluginEntry:
        """The one plugin that a kind and a name mean.

        Raises:
            PluginNotFoundError, PluginKindError, PluginBlockedError, PluginConflictError, PluginVersionError,
            PluginContractError: there is none, or it cannot be used.
        """
        named = [entry for entry in self._entries if entry.kind == kind and entry.name == name]
        if not named:
            raise messages.not_found(kind, name, self._entries)
        usable = [entry for entry in named if entry.status != "blocked"]
        if not usable:
            raise messages.blocked(named[0])
        contested = [entry for entry in usable if entry.status == "conflict"]
        if contested:
            raise messages.conflict(contested, self._policy.prefer.get(name))
        entry = next((entry for entry in usable if entry.status != "broken"), usable[0])
        if entry.status == "broken":
            raise messages.broken(entry)
        if entry.status == "wrong core version":
            raise messages.wrong_core_version(entry)
        return entry

    def load(self, kind: str, name: str) -> Plugin:
        """Import the plugin that a kind and a name mean, once.

        Raises:
            PluginError: it cannot be selected (see `select`), imported, or does not fit the hook specifications.
        """
        key = (kind, name)
        if key not in self._loaded:
            self._loaded[key] = load(self.select(kind, name))
        return self._loaded[key]

    def create(self, kind: str, name: str, hook: str, **arguments: Any) -> Any:
        """Call a factory hook of one plugin and return the object it builds.

        Args:
            kind: a key of `specdec.registry.catalogue.KINDS`.
            name: the plugin's name.
            hook: the hook to call, for example ``propose``.
            arguments: all arguments of the hook's specification.

        Raises:
            PluginError: the plugin cannot be used (see `load`), or returned nothing or the wrong thing.
            SpecdecError: what the hook itself raised.
        """
        return self.load(kind, name).build(hook, **arguments)

    def describe(self, kind: str, name: str) -> str:
        """A plugin with its distribution and version, for logs: "proposer 'ngram' of specdec-ngram 0.1.0"."""
        return messages.describe(self.select(kind, name))

    # --- configuration ----------------------------------------------------------------------------

    def plugin_config(self, kind: str, name: str, options: Mapping[str, Any]) -> Any:
        """Build a plugin's configuration from plain values.

        Returns:
            An instance of the class that the plugin's `config_class` hook returns; an empty dict when it has none.

        Raises:
            ConfigError: unknown keys and refused values, each with its path and what would be right.
            PluginError: the plugin cannot be used.
        """
        from specdec.registry.options import build_options

        plugin = self.load(kind, name)
        cls = plugin.build("config_class") if plugin.implements("config_class") else None
        config = build_options(plugin.entry, cls, options)
        if hasattr(cls, "check_plugins"):
            config.check_plugins(self)
        return config

    def identify(self, checkpoint: Path) -> Identification:
        """Find the one proposer that a checkpoint belongs to.

        Only proposers whose shipped markers fit ``config.json`` are imported and asked.

        Raises:
            PluginNotFoundError: none claims it; the message says what to install.
            PluginConflictError: several do.
            ModelNotFoundError, ModelLoadError: there is no readable ``config.json``.
        """
        from specdec.registry.identify import identify

        return identify(self, checkpoint)

    def check_method(self, method: str, checkpoint: Path) -> None:
        """Refuse a checkpoint that other installed proposers claim, and the one that is to use it does not.

        A proposer that ships no markers does not say what it takes, and is never contradicted.

        Raises:
            ConfigError: says what the checkpoint is.
            PluginError: there is no such proposer.
        """
        from specdec.registry.identify import check_method

        check_method(self, method, checkpoint)

    def check_target(self, name: str, checkpoint: Path) -> None:
        """Refuse a checkpoint as a target that an installed proposer claims as something to draft with alone.

        Proposers with fitting markers are asked, but for markers with ``language_model``: whole models can be both.

        Args:
            name: the checkpoint as the user named it.
            checkpoint: its directory.

        Raises:
            UnsupportedModelError: says what the checkpoint is.
        """
        from specdec.registry.identify import check_target

        check_target(self, name, checkpoint)

    def check(self, method: str, config: Any, engine: EngineContext) -> ProposerCapabilities | None:
        """Let a proposer check its options against the target, before weights are read (the hook ``check``).

        Returns:
            What its drafts will be like, as far as it tells.

        Raises:
            SpecdecError: what the hook raised.
            PluginError: the plugin cannot be used, or returned something else.
        """
        from specdec.types import ProposerCapabilities

        plugin = self.load("proposer", method)
        if not plugin.implements("check"):
            return None
        found = plugin.call("check", config=config, engine=engine)
        if found is not None and not isinstance(found, ProposerCapabilities):
            raise messages.contract(
                plugin.entry,
                f"check returned {found!r}, where a specdec.types.ProposerCapabilities or None is required.",
            )
        return found

    def heads_for(self, target: str) -> dict[str, str]:
        """Heads that installed distributions bring for a target, as users name it; see `specdec.registry.heads`.

        Returns:
            By method, what to write as ``speculative.model``.
        """
        from specdec.registry.heads import offered_heads

        usable = [entry for entry in self._entries if entry.status != "blocked"]
        return {head.method: head.name for head in offered_heads(usable) if head.target == target}

    # --- backends -----------------------------------------------------------------------------------

    def attention_backends(
        self, requirements: AttentionRequirements, engine: EngineContext, wanted: str = "auto"
    ) -> AttentionBackend:
        """The attention backend for an engine.

        Args:
            requirements: what it must serve.
            engine: passed to the hook.
            wanted: a backend's name, or "auto" for the one with the highest priority among those that can serve.

        Raises:
            PluginUnsuitableError: the named one cannot serve, or none can; all reasons are listed.
            PluginError: the named one cannot be used.
        """
        arguments = {"requirements": requirements, "engine": engine}
        subject = "this model with draft trees" if requirements.trees else "this model"
        backend: AttentionBackend = self._best("attention_backend", wanted, requirements, subject, arguments)
        return backend

    def sampling_backend(self, engine: EngineContext, wanted: str = "auto") -> SamplingBackend:
        """The sampling backend for an engine's device.

        Args:
            engine: passed to the hook; the backend must serve ``engine.device``.
            wanted: a backend's name, or "auto" for the one with the highest priority among those that can serve.

        Raises:
            PluginUnsuitableError: the named one cannot serve, or none can; all reasons are listed.
            PluginError: the named one cannot be used.
        """
        subject = f"the device {engine.device!r}"
        backend: SamplingBackend = self._best("sampling_backend", wanted, engine.device, subject, {"engine": engine})
        return backend

    def _best(self, kind: str, wanted: str, needed: Any, subject: str, arguments: Mapping[str, Any]) -> Any:
        """The named backend of a kind, or the best one, that serves what is needed."""
        if wanted != "auto":
            backend, reasons = self._backend(kind, wanted, needed, arguments)
            if reasons:
                raise messages.unsuitable(self.select(kind, wanted), subject, reasons)
            return backend
        suitable, refused = self._suitable_backends(kind, needed, arguments)
        if not suitable:
            raise PluginUnsuitableError(
                f"No installed {KINDS[kind].label} can serve {subject}: " + "; ".join(refused) + ".",
                kind=kind,
                reasons=refused,
            )
        return max(suitable, key=lambda backend: (backend.priority, backend.name))

    def _suitable_backends(self, kind: str, needed: Any, arguments: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        """The backends that can serve, and for each other one why not."""
        suitable, refused = [], []
        backends = {str(entry.name): entry for entry in self._entries if entry.kind == kind}
        for name, entry in backends.items():
            if entry.status == "blocked":
                refused.append(f"{name}: {entry.detail}")
                continue
            try:
                backend, reasons = self._backend(kind, name, needed, arguments)
            except SpecdecError as error:
                cause = error.__cause__ or error
                label = KINDS[kind].label.capitalize()
                logger.warning("%s %r is passed over: %s: %s", label, name, type(cause).__name__, error)
                refused.append(f"{name}: {error}")
                continue
            if reasons:
                refused.append(f"{name}: {', '.join(reasons)}")
            else:
                suitable.append(backend)
        return suitable, refused

    def _backend(self, kind: str, name: str, needed: Any, arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
        plugin = self.load(kind, name)
        backend = plugin.build(KINDS[kind].hook, **arguments)
        try:
            return backend, list(backend.supports(needed))
        except Exception as error:
            raise messages.contract(plugin.entry, f"supports() raised {cause_of(error)}") from error

    # --- commands ---------------------------------------------------------------------------------

    def command_names(self) -> tuple[str, ...]:
        """Names of the installed subcommands. Imports none of them."""
        return tuple(entry.name for entry in self._entries if entry.kind == "command" and entry.name)

    def add_command(self, name: str, cli: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Let the plugin of a subcommand add its parser.

        Raises:
            PluginError: the plugin cannot be used.
        """
        self.load("command", name).call("add_command", cli=cli)

    def add_commands(self, cli: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Let every installed subcommand add its parser, for ``--help``; one that fails is logged and left out."""
        for name in dict.fromkeys(self.command_names()):
            try:
                self.add_command(name, cli)
            except PluginError as error:
                logger.warning("The command %r is left out: %s", name, error)
