"""What a plugin needs of the machine, told without importing it.

A distribution may ship ``specdec_machine.toml`` beside the module its entry point names::

    [[needs]]
    plugin = "abacus"                          # the entry point's name
    any_path = ["/dev/abacus0", "/dev/abacus"] # one of these must exist
    otherwise = "needs an abacus, and this machine has none"

`specdec plugins` shows it. It decides nothing: whether a plugin can serve an engine it says itself when it is asked.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from specdec.registry.sources import package_folders

FILE_NAME = "specdec_machine.toml"
_KEYS = {"plugin", "any_path", "otherwise"}


def obstacle(module: str, name: str) -> str:
    """Why a plugin cannot run on this machine, as far as its distribution tells; empty when nothing speaks against it.

    Args:
        module: what the entry point names; it is not imported.
        name: the entry point's name.
    """
    for folder in package_folders(module):
        path = folder / FILE_NAME
        if path.is_file():
            return _obstacle(path, name)
    return ""


def _obstacle(path: Path, name: str) -> str:
    try:
        tables: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["needs"]
        for table in tables:
            if set(table) != _KEYS:
                raise ValueError(f"a table must have exactly the keys {', '.join(sorted(_KEYS))}")
            if table["plugin"] == name and not any(Path(file).exists() for file in table["any_path"]):
                return str(table["otherwise"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} is malformed: {error}"
    return ""
