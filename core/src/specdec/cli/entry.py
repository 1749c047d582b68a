"""The console script ``specdec``: imports the command line where Ctrl-C is already answered."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; see `specdec.cli.main.main`."""
    if sys.argv[1:2] == ["--version"] and _tell_version():
        return 0
    try:
        from specdec.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while modules are imported
        return 130


def _tell_version() -> bool:
    """Print the version, which needs no parser; False when it cannot be written, for `specdec.cli.main` to say why."""
    from specdec.version import __version__

    try:
        print(f"specdec {__version__}", flush=True)
    except OSError:
        return False
    return True
