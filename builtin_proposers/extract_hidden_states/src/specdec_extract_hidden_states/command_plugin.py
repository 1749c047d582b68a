"""The command ``extract`` as a plugin; imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from specdec.hookspecs import hookimpl


@hookimpl
def add_command(cli: argparse._SubParsersAction[Any]) -> None:
    """Add ``specdec extract``."""
    from specdec.cli.parser import add_model

    parser = cli.add_parser(
        "extract",
        help="write a model's hidden states to safetensors files",
        description="Run a model over prompts and write the hidden states of chosen layers, and the tokens, to\n"
        "safetensors shards. Run again with the same settings, it goes on with the prompts that are not written yet.",
    )
    add_model(parser, None, "a directory, a model id, a .gguf file or a bundled name such as demo:smollm2")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompts, one JSON object a line (.jsonl)")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompts")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of the shards")
    parser.add_argument("--layers", type=_layers, default=(), metavar="N,N", help="decoder layers, counted from 0")
    parser.add_argument("--no-final", action="store_true", help="leave out the final hidden states")
    parser.add_argument(
        "--hidden-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="type in which hidden states are written (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-size", default="256MiB", metavar="SIZE", help="size at which a file is full (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        type=_count,
        default=1,
        metavar="N",
        help="most output tokens of a prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="type of weights and activations (default: %(default)s)")
    parser.add_argument("--max-model-len", type=_count, metavar="N", help="most tokens of prompt and output together")
    parser.add_argument("--batch-size", type=_count, default=16, metavar="N", help="prompts at a time (default: 16)")
    parser.set_defaults(run=run)


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer numbers such as 2,5,8")
    return tuple(map(int, parts))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Extract."""
    from specdec.cli.parser import UsageError

    if arguments.model is None:
        raise UsageError("no model: give MODEL or --model. See: specdec extract --help")
    from specdec_extract_hidden_states.command import extract

    return extract(arguments)
