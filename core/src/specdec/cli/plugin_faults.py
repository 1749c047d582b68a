"""What `specdec plugins check` says of a plugin's method that raises, or takes longer than an engine waits."""

from __future__ import annotations

import importlib
import linecache
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs

from specdec.config import EngineConfig
from specdec.registry.catalogue import KINDS
from specdec.wording import LIBRARIES, frame_at_fault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_CHECKS = ("specdec.testing", "specdec.cli", "specdec.registry", "test_installed")
"""Modules that call the plugin when it is checked; pytest and its plugins call these."""


@attrs.frozen
class ProposeTimes:
    """How long the calls of `propose` took."""

    seconds: tuple[float, ...]
    budget: float
    """``proposer_time_budget`` of an engine that sets none."""
    follows_target: bool
    """As `specdec.types.Needs` says; the target's own time is then added to the budget."""

    @classmethod
    def of(cls, seconds: Sequence[float], needs: Any) -> ProposeTimes:
        """The times of a proposer with these `needs`."""
        return cls(tuple(seconds), engine_default("proposer_time_budget"), needs.follows_target)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {"calls": len(self.seconds), "time_budget": self.budget}
        return {**found, "median": median(self.seconds), "slowest": max(self.seconds)}

    def line(self) -> str:
        """What was measured, beside the budget."""
        more = ", and the target's own time on top, since it follows the target" if self.follows_target else ""
        return (
            f"propose() took {_seconds(median(self.seconds))} at the median of {len(self.seconds)} steps, "
            f"{_seconds(max(self.seconds))} at most; an engine allows {_seconds(self.budget)} a step "
            f"(proposer_time_budget){more}"
        )

    def warning(self) -> str | None:
        """What the engine does when steps are as slow as the measured ones; None where all are in the budget."""
        slow = sum(seconds > self.budget for seconds in self.seconds)
        if not slow:
            return None
        faults = engine_default("max_proposer_faults")
        return (
            f"{slow} of {len(self.seconds)} calls of propose() took longer than the {_seconds(self.budget)} of "
            "proposer_time_budget. The engine throws such a draft away, so that the step costs the time and gains "
            f"nothing, and switches the proposer off after {faults} in a row (max_proposer_faults). Move work into "
            "load(), start() or record(); a method that runs a model declares it in `needs`, which adds the target's "
            "own time to the budget."
        )


def engine_default(name: str) -> Any:
    """What an engine has for a setting that nobody gives."""
    return attrs.fields_dict(EngineConfig)[name].default


def explained(error: BaseException, kind: str) -> str | None:
    """What a method of a plugin raised and where, what comes of it, and what to do.

    Args:
        error: raised while the plugin was checked.
        kind: the plugin's, a key of `KINDS`.

    Returns:
        None when no method of the plugin was running: then a check was not met, and its own text says more.
    """
    entered = _entered(error.__traceback__)
    at = None if entered is None else frame_at_fault(entered)
    if entered is None or at is None:
        return None
    code = entered.tb_frame.f_code
    frame, line = at
    file = frame.f_code.co_filename
    source = linecache.getline(file, line).strip()
    parts = [
        f"{code.co_qualname}() raised {type(error).__name__}: {error}",
        f"in {file}, line {line}, in {frame.f_code.co_name}" + (f": {source}" if source else ""),
        _consequence(kind, code.co_name),
        _purpose(kind, code.co_name),
    ]
    return "\n".join(part for part in parts if part)


def _entered(traceback: TracebackType | None) -> TracebackType | None:
    """From the first frame on that a check has called and that is in no large library."""
    checking = False
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        checks = any(name == module or name.startswith(f"{module}.") for module in _CHECKS)
        checking = checking or checks
        if checking and not checks and name.partition(".")[0] not in LIBRARIES:
            return traceback
        traceback = traceback.tb_next
    return None


def _consequence(kind: str, method: str) -> str:
    if kind != "proposer":
        return ""
    if method == "load":
        return (
            "An engine with this proposer does not start. Correct that line; if something is missing that a user must "
            "give, raise a specdec.errors.ConfigError that says what, and check again with --options."
        )
    effect = "runs that step without speculation" if method == "propose" else "goes on"
    faults = engine_default("max_proposer_faults")
    return (
        f"The engine counts it as a fault, {effect}, and switches the proposer off after {faults} in a row "
        "(max_proposer_faults). Correct that line."
    )


def _purpose(kind: str, method: str) -> str:
    """What the contract says about a method, in the first words of its docstring."""
    module, _, name = KINDS[kind].returns.partition(":")
    base = getattr(importlib.import_module(module), name, None) if module else None
    docs = (getattr(base, method, None).__doc__ or "").strip().partition("\n\n")[0]
    return f"{method}() in the contract: {' '.join(docs.split())}" if docs else ""


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.2f} ms"
