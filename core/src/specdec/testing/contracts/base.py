"""What the contract test classes share: known failures, and the checks of a plugin's packaging."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping


class PluginContract:
    """Checks that hold for a plugin of any kind. Subclass the contract of your kind instead."""

    plugin: ClassVar[str | None] = None
    """Module of the plugin's hooks, as its entry point names it; None leaves out the checks of packaging."""
    distribution: ClassVar[str | None] = None
    """Name of the distribution; None leaves out the check of its core version range."""
    known_failures: ClassVar[Mapping[str, str]] = {}
    """Checks that this plugin does not pass yet, with the reason. Strict: one that passes must be removed here."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Mark the known failures of a contract's subclass."""
        super().__init_subclass__(**arguments)
        for name, reason in cls.known_failures.items():
            check = getattr(cls, name, None)
            if not name.startswith("test_") or check is None:
                raise TypeError(f"{cls.__name__}.known_failures names {name!r}, which is no check of this contract")
            setattr(cls, name, pytest.mark.xfail(reason=reason, strict=True)(_copy(check)))

    def test_plugin_imports_without_torch(self) -> None:
        """Listing plugins must stay fast, so the module with the hooks imports nothing heavy."""
        if self.plugin is None:
            pytest.skip("no plugin module named")
        heavy = "torch", "transformers", "numba", "triton"
        code = (
            f"import sys, {self.plugin}; "
            f"from specdec.hookspecs import PROJECT; "
            f"print(*[name for name in {heavy} if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [], f"importing {self.plugin} imports {done.stdout.strip()}"

    def test_hooks_are_declared(self) -> None:
        """Every hook the plugin implements exists, with arguments that exist."""
        if self.plugin is None:
            pytest.skip("no plugin module named")
        import pluggy

        from specdec import hookspecs

        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(importlib.import_module(self.plugin))
        manager.check_pending()
        assert any(caller.get_hookimpls() for caller in vars(manager.hook).values()), "the module implements no hook"

    def test_core_version_range(self) -> None:
        """The distribution requires a range of specdec-core, bounded on both sides, which the installed core is in."""
        if self.distribution is None or self.distribution == "specdec-core":
            pytest.skip("no distribution of its own named")
        from importlib.metadata import requires

        from packaging.requirements import Requirement

        from specdec.version import __version__

        found = [Requirement(text) for text in requires(self.distribution) or ()]
        core = [requirement for requirement in found if requirement.name == "specdec-core"]
        assert core, f"{self.distribution} does not require specdec-core"
        operators = {part.operator for part in core[0].specifier}
        assert operators & {">=", ">", "~="}, f"no lower bound in {core[0]}"
        assert operators & {"<", "<=", "~="}, f"no upper bound in {core[0]}"
        assert core[0].specifier.contains(__version__, prereleases=True), f"{core[0]} leaves out {__version__}"


def _copy(function: Any) -> Any:
    """A function of its own with the same behaviour, so that a mark on it does not reach the base class."""
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__doc__ = function.__doc__
    copied.__dict__.update(function.__dict__)
    if hasattr(function, "pytestmark"):
        copied.pytestmark = list(function.pytestmark)  # type: ignore[attr-defined]
    return copied
