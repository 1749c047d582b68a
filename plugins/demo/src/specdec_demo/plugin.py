"""The command ``demo`` as a plugin. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from specdec.hookspecs import hookimpl

MODEL = "demo:smollm2"


@hookimpl
def add_command(cli: argparse._SubParsersAction[Any]) -> None:
    """Add ``specdec demo``."""
    from specdec.cli.parser import add_model

    parser = cli.add_parser(
        "demo",
        help="decode real prompts with a small model, plainly and with each installed method",
        description="Decode a few real prompts with SmolLM2-135M-Instruct, plainly and with every installed method\n"
        "that needs no model of its own, in turns. Prints texts, speed-up and acceptance; writes no files.",
    )
    for flag, default, text in (
        ("--num-prompts", 4, "prompts, at most 8"),
        ("--max-tokens", 96, "most output tokens of a prompt"),
        ("--rounds", 2, "turns of each method"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(flag, type=_positive, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--num-speculative-tokens",
        type=_positive,
        metavar="N",
        help="draft tokens per step of every method (default: what suits the method)",
    )
    add_model(parser, MODEL, "another model (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="type of weights and activations (default: %(default)s)")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration."""
    from specdec_demo.demo import demonstrate

    return demonstrate(arguments)
