"""Which installed methods the demonstration shows, and with which settings."""

from __future__ import annotations

import attrs

from specdec.config import EngineConfig, SpeculativeConfig
from specdec.errors import SpecdecError
from specdec.registry import Registry

SHOWN = (
    SpeculativeConfig(
        method="ngram", num_speculative_tokens=8, options={"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    ),
    SpeculativeConfig(method="suffix", num_speculative_tokens=8),
    SpeculativeConfig(method="token_recycling", num_speculative_tokens=2),
    SpeculativeConfig(method="medusa"),
    SpeculativeConfig(method="mlp_speculator"),
    SpeculativeConfig(method="eagle"),
    SpeculativeConfig(method="eagle3"),
)
"""The methods that are shown, with settings that suit the demonstration better than their defaults."""


def installed_methods(config: EngineConfig, k: int | None) -> tuple[list[SpeculativeConfig], dict[str, str]]:
    """The installed methods of `SHOWN`; those that need a head get the one that was trained for the model.

    Args:
        config: of the demonstration's engine; its ``plugins`` section restricts what is used.
        k: draft tokens per step of every method; None: as `SHOWN` says, or else the method's default.

    Returns:
        A configuration for each method, and why the others are left out, by name.
    """
    registry = Registry(config.plugins)
    heads = registry.heads_for(config.model)
    installed = {entry.name for entry in registry.entries() if entry.kind == "proposer"}
    usable: list[SpeculativeConfig] = []
    left_out: dict[str, str] = {}
    for shown in SHOWN:
        name = str(shown.method)
        if name not in installed:
            continue
        head = heads.get(name)
        needed = {} if head is None else {"model": head}
        try:
            registry.plugin_config("proposer", name, {**shown.options, **needed})
        except SpecdecError as error:
            left_out[name] = str(error)
        else:
            usable.append(attrs.evolve(shown, model=head, num_speculative_tokens=k or shown.num_speculative_tokens))
    return usable, left_out
