"""The command ``bench serve``."""

from __future__ import annotations

import argparse
import math
from typing import Any

from specdec.hookspecs import hookimpl

EXAMPLES = """\
  specdec bench serve --prompts code_edit --num-prompts 64 --max-concurrency 16
      sixteen at a time, as fast as the server on port 8000 answers
  specdec bench serve --base-url http://box:9000 --prompts my.jsonl --request-rate 4 --output-json load.json
      four requests a second at random moments; keep the numbers"""


@hookimpl
def add_command(cli: argparse._SubParsersAction[Any]) -> None:
    """Add ``specdec bench serve``."""
    from specdec.cli.parser import add_command as add_parser

    parser = add_parser(
        cli,
        "bench.serve",
        summary="measure a running server",
        description="Send prompts to a running server with OpenAI's API, this one or another; report throughput and\n"
        "latencies. Names of options and numbers are those of vLLM's benchmark.",
        examples=EXAMPLES,
        usage="specdec bench serve [options]",
    )
    target = parser.add_argument_group("server")
    target.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="its address (default: %(default)s)"
    )
    target.add_argument("--model", metavar="NAME", help="name of the model; the first one it serves when not given")
    target.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="(default: %(default)s)")
    target.add_argument("--api-key", metavar="KEY", help="SPECDEC_API_KEY when not given")
    work = parser.add_argument_group("work")
    work.add_argument(
        "--prompts",
        default="code_edit",
        metavar="FILE|SET",
        help="a .jsonl file or a bundled set (default: %(default)s)",
    )
    work.add_argument("--num-prompts", type=_count, default=32, metavar="N", help="requests (default: %(default)s)")
    work.add_argument(
        "--num-warmups", type=_whole, default=1, metavar="N", help="requests before (default: %(default)s)"
    )
    work.add_argument(
        "--request-rate",
        type=_rate,
        default=math.inf,
        metavar="X",
        help="requests a second; inf: all at once (default)",
    )
    work.add_argument(
        "--burstiness", type=_positive, default=1.0, metavar="X", help="1 is a Poisson process, above is more even"
    )
    work.add_argument(
        "--max-concurrency", type=_count, metavar="N", help="most requests at once; no limit when not given"
    )
    work.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="per request (default: %(default)s)")
    work.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: %(default)s)")
    work.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals (default: %(default)s)")
    work.add_argument("--ignore-eos", action="store_true", help="always make --max-tokens tokens")
    work.add_argument("--extra-body", metavar="JSON", help="more fields of every request")
    work.add_argument("--timeout", type=_positive, default=600.0, metavar="SECONDS", help="(default: %(default)s)")
    result = parser.add_argument_group("result")
    result.add_argument(
        "--percentiles", type=_percentiles, default=(50.0, 90.0, 99.0), metavar="A,B", help="(default: 50,90,99)"
    )
    result.add_argument("--output-json", metavar="FILE", help="write settings and numbers; - is standard output")
    result.add_argument("--save-detailed", action="store_true", help="with --output-json: each request too")
    parser.set_defaults(run=run)


def _number(text: str, low: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > low:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _positive(text: str) -> float:
    value = _number(text, 0, "a number above 0")
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _rate(text: str) -> float:
    return _number(text, 0, "a number above 0, or inf")


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _percentiles(text: str) -> tuple[float, ...]:
    values = tuple(_number(part, 0, "a list of percentiles such as 50,90,99") for part in text.split(","))
    if any(value > 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a percentile above 100")
    return values


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from specdec_server.bench.command import run as measure

    return measure(arguments)
