"""``specdec generate``: complete prompts, or answer them with ``--chat``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from specdec.cli import engines
from specdec.cli.commands import COMMANDS
from specdec.cli.console import harmless, make_console
from specdec.cli.parser import Subparsers, add_command
from specdec.cli.prompts import Prompt, from_arguments
from specdec.cli.sampling import add_sampling_flags, read_sampling, was_given, with_defaults
from specdec.config.flags import add_config_flags, read_config

if TYPE_CHECKING:
    from specdec.metrics import EngineStats
    from specdec.outputs import RequestOutput

EXAMPLES = """\
  specdec generate --model demo:smollm2 --max-tokens 40 "Once upon a time"
      complete one prompt
  specdec generate --model demo:smollm2 --chat --temperature 0 --max-tokens 200 "What is a monad?"
      answer through the model's chat template, the same every time
  specdec generate --model demo:smollm2 --prompts prompts.jsonl --json > outputs.jsonl
      many prompts at once; one JSON object a line for each
  cat letter.txt | specdec generate --model demo:smollm2 --max-tokens 100
      the prompt on standard input
  specdec generate --model demo:smollm2 --max-tokens 100 --json-schema person.json "A person as JSON:"
      JSON that fits a schema; also --regex, --choice, --grammar, --json-object
  specdec generate --config specdec.toml --stats "The capital of France is"
      settings from a file; statistics on standard error"""


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "generate",
        summary=COMMANDS["generate"].summary,
        description="Generate text for one or many prompts. Text goes to standard output, all else to standard error.",
        examples=EXAMPLES,
        usage="specdec generate [options] [PROMPT ...]",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; - reads one from standard input")
    parser.add_argument(
        "--prompts",
        dest="file",
        metavar="FILE",
        help="a .jsonl file with one prompt a line (a string, or an object with prompt, prompt_token_ids, turns or "
        "messages); any other file is one prompt",
    )
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompts")
    parser.add_argument("--system", metavar="TEXT", help="system message for --chat")
    parser.add_argument("--json", action="store_true", help="write one JSON object a line instead of text")
    parser.add_argument("--stats", action="store_true", help="show speed and acceptance at the end")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    add_config_flags(parser)
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate and write the outputs; 1 when a request failed."""
    config, _ = read_config(arguments)
    params = read_sampling(arguments)
    prompts = read_prompts(arguments)
    show = not arguments.no_progress and sys.stderr.isatty()
    if show:
        print(f"loading {config.model} …", file=sys.stderr)
    with engines.open_llm(config) as llm:
        params = with_defaults(arguments, params, llm.get_default_sampling_params())
        outputs = llm.generate([prompt.for_engine(llm) for prompt in prompts], params, use_tqdm=show)
        stats = llm.stats()
    write = write_json if arguments.json else write_text
    write(prompts, outputs)
    if arguments.stats:
        show_stats(stats)
    if not was_given(arguments, "max_tokens"):
        hint_at_max_tokens(outputs, params.max_tokens)
    return report_failures(outputs)


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts, as conversations when ``--chat`` or ``--system`` asks for it."""
    prompts = from_arguments(arguments.prompts, arguments.file)
    if arguments.chat or arguments.system:
        return [prompt.as_chat(arguments.system) for prompt in prompts]
    return prompts


def write_text(prompts: list[Prompt], outputs: list[RequestOutput]) -> None:
    """The texts; with a headline above each when there is more than one."""
    several = sum(len(output.outputs) for output in outputs) > 1
    for prompt, output in zip(prompts, outputs, strict=True):
        for choice in output.outputs:
            if several:
                number = f", choice {choice.index}" if len(output.outputs) > 1 else ""
                print(f"--- {prompt.id}{number}")
            print(harmless(choice.text) if sys.stdout.isatty() else choice.text)


def write_json(prompts: list[Prompt], outputs: list[RequestOutput]) -> None:
    """One JSON object a line for each prompt."""
    for prompt, output in zip(prompts, outputs, strict=True):
        print(json.dumps(as_json(prompt, output), ensure_ascii=False))


def as_json(prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    """A request's output as plain values."""
    spec = output.spec_stats
    return {
        "id": prompt.id,
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "cumulative_logprob": choice.cumulative_logprob,
                "logprobs": _logprobs_json(choice.logprobs),
            }
            for choice in output.outputs
        ],
        "spec_stats": {
            "num_drafts": spec.num_drafts,
            "num_draft_tokens": spec.num_draft_tokens,
            "num_accepted_tokens": spec.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(spec.num_accepted_tokens_per_pos),
            "num_grammar_forced_tokens": spec.num_grammar_forced_tokens,
            "num_grammar_accepted_tokens": spec.num_grammar_accepted_tokens,
            "acceptance_rate": spec.acceptance_rate,
            "mean_acceptance_length": spec.mean_acceptance_length,
        },
    }


def _logprobs_json(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        {
            str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in step.items()
        }
        for step in logprobs
    ]


def show_stats(stats: EngineStats) -> None:
    """Statistics on standard error."""
    from specdec.cli.tables import stats_table

    make_console(stderr=True).print(stats_table(stats))


def hint_at_max_tokens(outputs: list[RequestOutput], max_tokens: int | None) -> None:
    """Say why the text ends early, when it ends at a limit that the user did not set."""
    cut = sum(choice.finish_reason == "length" for output in outputs for choice in output.outputs)
    if cut and max_tokens is not None:
        print(f"note: {cut} of the outputs end at --max-tokens {max_tokens}, the default.", file=sys.stderr)


def report_failures(outputs: list[RequestOutput]) -> int:
    """Name failed requests on standard error; the exit code."""
    failed = [(output, c) for output in outputs for c in output.outputs if c.finish_reason == "error"]
    for output, choice in failed:
        print(f"error: request {output.request_id}: {choice.error}", file=sys.stderr)
    return 1 if failed else 0
