"""Every error specdec raises on purpose: one base class, one subclass per cause.

A message says what was asked, what is there and what to do. The facts it names are also attributes,
so that a program can act on them. The command line prints the message alone and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class SpecdecError(Exception):
    """Base of every error a user of specdec can cause or must act on."""

    path: str | None = None
    """Dotted path of the setting at fault, where one is."""


# --- configuration and requests -----------------------------------------------------------------


class ConfigError(SpecdecError):
    """A setting is unknown, has a bad value or contradicts another one."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class DraftLengthError(ConfigError):
    """More draft tokens are asked for than the method can draft."""

    def __init__(self, path: str, given: int, label: str, most: int) -> None:
        super().__init__(
            f"{path} is {given}, but the {label} drafts at most {most} tokens with what it has loaded: set it to "
            f"{most} or leave it out",
            path=path,
        )
        self.most = most


class InvalidRequestError(SpecdecError):
    """A prompt or its sampling parameters cannot be served; the engine goes on."""

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option
        """The parameter at fault, where it is one."""


class CapacityError(SpecdecError):
    """A limit of the engine is too small for what was asked (KV cache, queue, model length)."""


class RequestFailedError(SpecdecError):
    """A request that had started could not be finished, for example on NaN logits."""


class EngineDeadError(SpecdecError):
    """The engine stopped on an internal fault, or was closed; the cause is chained."""


# --- models -------------------------------------------------------------------------------------


class ModelNameError(SpecdecError):
    """Base of the errors about what a setting names as a model; the message begins with the setting."""

    def __init__(self, problem: str, *, option: str = "model") -> None:
        super().__init__(f"{option}: {problem}")
        self.path = option
        self.problem = problem
        self.option = option
        """Dotted path of the setting."""

    def moved(self, option: str) -> Self:
        """The same fault under another setting."""
        return type(self)(self.problem, option=option)


class ModelNotFoundError(ModelNameError):
    """No model is found under the name or path given."""


class ModelLoadError(SpecdecError):
    """A checkpoint exists but cannot be read: truncated, corrupt, missing or surplus tensors."""


class UnsupportedModelError(ModelNameError):
    """The checkpoint cannot be a target; every reason is listed."""

    def __init__(self, problem: str, *, reasons: Sequence[str] = (), option: str = "model") -> None:
        super().__init__(problem, option=option)
        self.reasons = tuple(reasons)

    def moved(self, option: str) -> Self:
        """See `ModelNameError.moved`."""
        return type(self)(self.problem, reasons=self.reasons, option=option)


# --- plugins ------------------------------------------------------------------------------------


class PluginError(SpecdecError):
    """Base of the errors about finding, loading and running plugins."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        name: str | None = None,
        distribution: str | None = None,
        version: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name
        self.distribution = distribution
        self.version = version
        """Version of ``distribution``."""


class PluginNotFoundError(PluginError):
    """No installed distribution offers the name; the closest match and the `pip install` line are given."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        name: str | None = None,
        suggestion: str | None = None,
        install: str | None = None,
        installed: Sequence[str] = (),
    ) -> None:
        super().__init__(message, kind=kind, name=name)
        self.suggestion = suggestion
        """The closest name that is installed or known."""
        self.install = install
        """The distribution that brings the name, or the suggestion."""
        self.installed = tuple(installed)
        """Installed names of this kind."""


class PluginImportError(PluginError):
    """The plugin is installed but importing it fails; the original exception is chained."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        name: str | None = None,
        distribution: str | None = None,
        version: str | None = None,
        missing_module: str | None = None,
        install: str | None = None,
    ) -> None:
        super().__init__(message, kind=kind, name=name, distribution=distribution, version=version)
        self.missing_module = missing_module
        self.install = install
        """What to `pip install` to bring the missing module, when that is known."""


class PluginVersionError(PluginError):
    """The plugin was built for another version of the core."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        name: str | None = None,
        distribution: str | None = None,
        version: str | None = None,
        required: str | None = None,
        core_version: str | None = None,
    ) -> None:
        super().__init__(message, kind=kind, name=name, distribution=distribution, version=version)
        self.required = required
        """The range of specdec-core that the distribution asks for."""
        self.core_version = core_version


class PluginConflictError(PluginError):
    """Two distributions offer the same name."""

    def __init__(
        self, message: str, *, kind: str | None = None, name: str | None = None, distributions: Sequence[str] = ()
    ) -> None:
        super().__init__(message, kind=kind, name=name)
        self.distributions = tuple(distributions)


class PluginKindError(PluginError):
    """The name belongs to another kind of plugin."""

    def __init__(
        self, message: str, *, kind: str | None = None, name: str | None = None, actual_kind: str | None = None
    ) -> None:
        super().__init__(message, kind=kind, name=name)
        self.actual_kind = actual_kind


class PluginUnsuitableError(PluginError):
    """The plugin cannot serve this model or machine; all reasons at once."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        name: str | None = None,
        reasons: Sequence[str] = (),
    ) -> None:
        super().__init__(message, kind=kind, name=name)
        self.reasons = tuple(reasons)


class PluginBlockedError(PluginError):
    """A setting or an environment variable forbids the plugin."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        name: str | None = None,
        distribution: str | None = None,
        version: str | None = None,
        setting: str | None = None,
    ) -> None:
        super().__init__(message, kind=kind, name=name, distribution=distribution, version=version)
        self.setting = setting
        """The setting or variable that forbids it."""


class PluginContractError(PluginError):
    """The plugin loaded, but what it registers or returns breaks the contract of its hook."""


class ProposerError(PluginError):
    """A proposer raises this to skip speculation for one step; the engine counts it as a fault."""
