"""Finding, selecting and loading plugins. Importing this reads no plugin and no heavy library."""

from specdec.registry.policy import PluginEntry
from specdec.registry.registry import Registry

__all__ = ["PluginEntry", "Registry"]
