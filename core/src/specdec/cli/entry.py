"""The console script ``specdec``: imports the command line where Ctrl-C is already answered."""

from __future__ import annotations


def main() -> int:
    """Run the command line; see `specdec.cli.main.main`."""
    try:
        from specdec.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while modules are imported
        return 130
