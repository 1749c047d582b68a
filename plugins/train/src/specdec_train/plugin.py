"""The command ``train`` as a plugin. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from specdec.hookspecs import hookimpl
from specdec_train.options import DEFAULTS, DRAFT_VOCAB_SIZE, HEADS

EXAMPLES = """\
examples:
  specdec train eagle3 --model demo:smollm2 --chat --prompts prompts.jsonl --output heads/eagle3
      let the model answer the prompts, and train a head on the answers
  specdec train medusa --model my-model --prompts prompts.jsonl --output heads/medusa --num-steps 4 --epochs 1
      the same command again goes on where it stopped
  specdec train eagle3 --model demo:smollm2 --chat --prompts more.jsonl --output heads/2 --init heads/eagle3/checkpoint
      train a head further, on other prompts
  specdec bench my-model --speculative-config '{"model": "heads/eagle3/checkpoint"}' --prompts other.jsonl
      measure what came out"""

FLAGS = {
    "--num-prompts": "prompts used, from the beginning of the file; all when not given",
    "--max-tokens": "most tokens of an answer",
    "--temperature": "of the answers; 0 is greedy",
    "--num-steps": "draft steps to train (heads of Medusa)",
    "--draft-vocab-size": "most frequent tokens the head can draft; 0 for all, "
    f"{DRAFT_VOCAB_SIZE} when neither this nor --init is given",
    "--epochs": "passes over the answers",
    "--learning-rate": "at its highest",
    "--tokens-per-update": "tokens in a training batch",
    "--held-out": "share of the answers kept for measuring",
    "--inner-dim": "width of an MLP speculator's state; 0 for the target's",
    "--seed": "of answers, weights and order",
}


@hookimpl
def add_command(cli: argparse._SubParsersAction[Any]) -> None:
    """Add ``specdec train``."""
    parser = cli.add_parser(
        "train",
        help="train a draft head for a model on the model's own answers",
        description="Let the target answer prompts with the engine, keep its hidden states, and train a draft head on\n"
        "them. Interrupted runs go on where they stopped. Writes a checkpoint that specdec and vLLM load.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("head", choices=HEADS, help="kind of head")
    parser.add_argument("--model", required=True, help="target model: a directory, a model id or a bundled name")
    parser.add_argument("--prompts", required=True, metavar="FILE", help=".jsonl file, one prompt a line")
    parser.add_argument(
        "--output",
        dest="out",
        required=True,
        metavar="DIR",
        help="folder for progress, the checkpoint and, unless --answers names another, the answers",
    )
    parser.add_argument(
        "--init",
        metavar="CHECKPOINT",
        help="a head of this kind and size to start from: a directory, a model id or a bundled name; its draft\n"
        "vocabulary is kept unless another is asked for. Without it training starts from the target's own weights",
    )
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompts")
    parser.add_argument(
        "--answers",
        metavar="DIR",
        help="folder of the answers, when several heads learn from the same ones (default: answers in --output)",
    )
    for flag, text in FLAGS.items():
        default = DEFAULTS[flag.removeprefix("--").replace("-", "_")]
        kind = float if isinstance(default, float) else int
        shown = f"{text}" if default is None else f"{text} (default: {default:g})"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=shown)
    parser.add_argument("--dtype", default="auto", help="type of the target while it answers (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the training."""
    from specdec_train.options import options_from
    from specdec_train.training import train

    train(options_from(arguments))
    return 0
