"""Which installed proposer does a checkpoint belong to?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import (
    ConfigError,
    PluginConflictError,
    PluginNotFoundError,
    SpecdecError,
    UnsupportedModelError,
)
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
    answers, obstacles = _asked(registry, checkpoint, config, _fitting(registry.entries(), config))
    if len(answers) == 1:
        return next(iter(answers.values()))
    raise _several(checkpoint, answers) if answers else _none(registry, checkpoint, config, obstacles)


def check_method(registry: Registry, method: str, checkpoint: Path) -> None:
    """See `specdec.registry.Registry.check_method`."""
    if not shipped_markers(registry.select("proposer", method).found.module):
        return
    if method in _claims(registry, checkpoint, lambda name, _: name == method):
        return  # nobody else need be asked
    answers = _claims(registry, checkpoint, lambda name, _: name != method)
    if not answers or method in answers:
        return
    claimed = " or ".join(f"{answer.method!r} ({answer.reason})" for answer in answers.values())
    raise ConfigError(
        f"speculative.model: {checkpoint} is not made for the method {method!r} but for {claimed}: set "
        f"speculative.method to {next(iter(answers))!r}, or speculative.model to a checkpoint for {method!r}.",
        path="speculative.model",
    )


def check_target(registry: Registry, name: str, checkpoint: Path) -> None:
    """See `specdec.registry.Registry.check_target`."""
    answers = _claims(registry, checkpoint, lambda _, marker: not marker.language_model).values()
    if answers and not any(answer.language_model for answer in answers):
        answer = next(iter(answers))
        raise UnsupportedModelError(
            f"{name!r} is no whole language model but something that the method {answer.method!r} drafts with "
            f"({answer.reason}): set model to the model that it was made for, and speculative.model to {name!r}.",
            reasons=(answer.reason,),
        )


def _claims(
    registry: Registry, checkpoint: Path, wanted: Callable[[str | None, Marker], bool]
) -> dict[str, Identification]:
    """What usable proposers say about a checkpoint, by method; empty where it has no readable ``config.json``.

    Args:
        registry: of the proposers.
        checkpoint: the directory.
        wanted: gets a proposer's name and the marker that fits, and says whether to ask it.
    """
    try:
        config = read_config(checkpoint)
    except SpecdecError:  # whoever loads it says what is wrong
        return {}
    usable = [entry for entry in registry.entries() if entry.status == "ok"]
    fitting = [item for item in _fitting(usable, config) if wanted(item[0].name, item[1])]
    return _asked(registry, checkpoint, config, fitting)[0]


def _asked(
    registry: Registry,
    checkpoint: Path,
    config: Mapping[str, Any],
    fitting: Iterable[tuple[PluginEntry, Marker, str]],
) -> tuple[dict[str, Identification], list[str]]:
    """Answers by method of the proposers whose markers fit, and what keeps others from answering."""
    answers: dict[str, Identification] = {}
    obstacles: list[str] = []
    for entry, marker, reason in fitting:
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
    return answers, obstacles


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
    remedy = "Otherwise set" if obstacles or suggestion else "Set"
    return PluginNotFoundError(
        f"{text} {remedy} speculative.method. {installed_names('proposer', registry.entries())}",
        kind="proposer",
        suggestion=suggestion,
        install=install,
    )


def _suggests(pattern: Mapping[str, object], config: Mapping[str, Any]) -> bool:
    return Marker(method="", config=pattern).fits(config) is not None
