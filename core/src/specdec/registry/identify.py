"""Which installed proposer does a checkpoint belong to?"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import PluginConflictError, PluginNotFoundError, SpecdecError
from specdec.registry.catalogue import CHECKPOINTS, DISTRIBUTIONS
from specdec.registry.markers import Marker, model_types, read_config, shipped_markers
from specdec.registry.messages import contract, installed_names
from specdec.types import Identification

if TYPE_CHECKING:
    from specdec.registry.policy import PluginEntry
    from specdec.registry.registry import Registry

logger = logging.getLogger("specdec.registry")


def identify(registry: Registry, checkpoint: Path) -> Identification:
    """See `specdec.registry.Registry.identify`."""
    config = read_config(checkpoint)
    answers: dict[str, Identification] = {}
    obstacles: list[str] = []
    for entry, marker, reason in _fitting(registry.entries(), config):
        needed = _missing_head(registry.entries(), marker, config)
        if needed:
            obstacles.append(f"{reason}, which fits {marker.method!r}, but {needed}")
            continue
        try:
            answer = _ask(registry, entry, checkpoint, reason)
        except SpecdecError as error:
            logger.warning("Proposer %r could not be asked about %s: %s", entry.name, checkpoint, error)
            obstacles.append(f"{reason}, which fits {marker.method!r}, but: {error}")
            continue
        if answer is not None:
            answers.setdefault(answer.method, answer)
    if len(answers) == 1:
        return next(iter(answers.values()))
    raise _several(checkpoint, answers) if answers else _none(registry, checkpoint, config, obstacles)


def _fitting(entries: Sequence[PluginEntry], config: Mapping[str, Any]) -> Iterable[tuple[PluginEntry, Marker, str]]:
    """Each proposer with the first of its markers that fits, and what fits; also one that cannot be used, to say so."""
    for entry in entries:
        if entry.kind != "proposer" or entry.status == "broken":
            continue
        try:
            markers = shipped_markers(entry.found.module)
        except ValueError as error:
            logger.warning("%s %s: %s", entry.distribution, entry.version, error)
            continue
        for marker in markers:
            reason = marker.fits(config) if marker.method == entry.name else None
            if reason:
                yield entry, marker, reason
                break


def _ask(registry: Registry, entry: PluginEntry, checkpoint: Path, reason: str) -> Identification | None:
    """The proposer's own answer; its markers alone decide when it has no `identify` hook."""
    plugin = registry.load("proposer", str(entry.name))
    if not plugin.implements("identify"):
        return Identification(method=str(entry.name), reason=reason)
    answer = plugin.call("identify", checkpoint=checkpoint)
    if answer is not None and not isinstance(answer, Identification):
        raise contract(
            entry, f"identify returned {answer!r}, where a specdec.types.Identification or None is required."
        )
    return answer


def _missing_head(entries: Sequence[PluginEntry], marker: Marker, config: Mapping[str, Any]) -> str | None:
    """Which head a marker asks for in vain, in words; None when it needs none or has one."""
    if not marker.head:
        return None
    wanted = [f"{marker.method}.{model_type}" for model_type in model_types(config)]
    installed = {entry.name for entry in entries if entry.kind == "head"}
    if installed.intersection(wanted):
        return None
    if not wanted:
        return "config.json has no model_type to find a head by"
    known = next((DISTRIBUTIONS["head"][name] for name in wanted if name in DISTRIBUTIONS["head"]), None)
    return f"no head {wanted[0]!r} is installed" + (f": pip install {known}" if known else "")


def _several(checkpoint: Path, answers: Mapping[str, Identification]) -> PluginConflictError:
    listed = "; ".join(f"{answer.method} ({answer.reason})" for answer in answers.values())
    return PluginConflictError(
        f"{len(answers)} proposers claim the checkpoint {checkpoint}: {listed}. Set speculative.method to one of them.",
        kind="proposer",
        distributions=tuple(answers),
    )


def _none(
    registry: Registry, checkpoint: Path, config: Mapping[str, Any], obstacles: Sequence[str]
) -> PluginNotFoundError:
    described = ", ".join(model_types(config)) or "not given"
    text = f"No installed proposer recognises the checkpoint {checkpoint} (model_type: {described})."
    suggestion = next((name for pattern, name in CHECKPOINTS if _suggests(pattern, config)), None)
    install = DISTRIBUTIONS["proposer"][suggestion] if suggestion else None
    if obstacles:
        text += " " + "; ".join(obstacles).rstrip(".") + "."
    elif suggestion:
        text += f" It looks like one for {suggestion!r}: pip install {install}."
    return PluginNotFoundError(
        f"{text} Otherwise set speculative.method. {installed_names('proposer', registry.entries())}",
        kind="proposer",
        suggestion=suggestion,
        install=install,
    )


def _suggests(pattern: Mapping[str, object], config: Mapping[str, Any]) -> bool:
    return Marker(method="", config=pattern).fits(config) is not None
