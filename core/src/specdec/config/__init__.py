"""Configuration: the classes that hold it, and where their values come from. Imports nothing heavy."""

from specdec.config.describe import Setting, describe, to_dict, to_toml
from specdec.config.load import from_kwargs, load, load_table
from specdec.config.schema import EngineConfig, PluginsConfig, SpeculativeConfig
from specdec.config.sizes import format_size, parse_size
from specdec.config.structure import structure

__all__ = [
    "EngineConfig",
    "PluginsConfig",
    "Setting",
    "SpeculativeConfig",
    "describe",
    "format_size",
    "from_kwargs",
    "load",
    "load_table",
    "parse_size",
    "structure",
    "to_dict",
    "to_toml",
]
