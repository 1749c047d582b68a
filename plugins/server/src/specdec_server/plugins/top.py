"""The command ``top``."""

from __future__ import annotations

import argparse
import math
from typing import Any

from specdec.hookspecs import hookimpl

EXAMPLES = """\
  specdec top
      watch the server on this machine's port 8000
  specdec top http://gpu-box:9000 --interval 5
      another server, looked at every five seconds
  specdec top --once
      print the present state and return"""


@hookimpl
def add_command(cli: argparse._SubParsersAction[Any]) -> None:
    """Add ``specdec top``."""
    from specdec.cli.parser import add_command as add_parser

    parser = add_parser(
        cli,
        "top",
        summary="watch a running server",
        description="Show a running server's requests, speeds and speculation, read from its /metrics.",
        examples=EXAMPLES,
    )
    url = "http://127.0.0.1:8000"
    parser.add_argument("url", nargs="?", default=url, metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="look twice, an interval apart, print and return")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Watch until Ctrl-C."""
    from specdec_server.top import watch

    return watch(arguments.url, arguments.interval, once=arguments.once)
