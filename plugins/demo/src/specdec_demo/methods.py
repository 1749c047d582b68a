"""Which installed methods the demonstration shows, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.config import EngineConfig, SpeculativeConfig
from specdec.errors import SpecdecError
from specdec.registry import Registry

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
"""Options that suit the demonstration better than a method's defaults."""


def installed_methods(config: EngineConfig, k: int) -> tuple[list[SpeculativeConfig], dict[str, str]]:
    """The installed methods that need no checkpoint of their own.

    Args:
        config: of the demonstration's engine; its ``plugins`` section restricts what is used.
        k: draft tokens per step.

    Returns:
        A configuration for each method, and why the others are left out, by name.
    """
    registry = Registry(config.plugins)
    usable: list[SpeculativeConfig] = []
    left_out: dict[str, str] = {}
    for entry in registry.entries():
        if entry.kind != "proposer" or entry.name is None:
            continue
        options = dict(SETTINGS.get(entry.name, {}))
        try:
            registry.plugin_config("proposer", entry.name, options)
        except SpecdecError as error:
            left_out[entry.name] = str(error)
        else:
            usable.append(SpeculativeConfig(method=entry.name, num_speculative_tokens=k, options=options))
    return usable, left_out
