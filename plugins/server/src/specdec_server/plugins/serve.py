"""The command ``serve``."""

from __future__ import annotations

import argparse
from typing import Any

from specdec.hookspecs import hookimpl

EXAMPLES = """\
  specdec serve demo:smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
      an OpenAI-compatible server on port 8000, with n-gram speculation
  specdec serve --config specdec.toml --port 9000
      settings from a file, those of the server in its table [server]"""


@hookimpl
def add_command(cli: argparse._SubParsersAction[Any]) -> None:
    """Add ``specdec serve``."""
    from specdec.cli.parser import add_command as add_parser
    from specdec.config.flags import add_config_flags, add_model_argument, add_table_flags
    from specdec_server.config import ServerConfig

    parser = add_parser(
        cli,
        "serve",
        summary="serve a model over HTTP, compatible with OpenAI's API",
        description="Serve a model over HTTP with OpenAI's API. SIGTERM lets running requests finish.",
        examples=EXAMPLES,
        usage="specdec serve [options] [MODEL]",
    )
    add_model_argument(parser)
    add_table_flags(parser, ServerConfig, ServerConfig.SECTION)
    add_config_flags(parser)
    parser.set_defaults(run=run)


@hookimpl
def config_class() -> type:
    """The table ``[server]``."""
    from specdec_server.config import ServerConfig

    return ServerConfig


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    from specdec_server.serve import run as serve

    return serve(arguments)
