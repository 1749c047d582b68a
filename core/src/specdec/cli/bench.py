"""``specdec bench``: the same prompts with and without speculation, in turns."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.cli import measuring
from specdec.cli.commands import COMMANDS
from specdec.cli.config import check_plugins
from specdec.cli.parser import Subparsers, UsageError, add_command
from specdec.cli.prompts import Prompt, bundled_sets, read_set
from specdec.config import SpeculativeConfig, structure, to_dict
from specdec.config.flags import add_config_flags, add_model_argument, read_config
from specdec.config.text import parse_object

if TYPE_CHECKING:
    from specdec.cli.measuring import Variant
    from specdec.config import EngineConfig
    from specdec.types import SpecStats

EXAMPLES = """\
  specdec bench demo:smollm2 --speculative.method ngram
      does n-gram speculation pay on code edits, on this machine?
  specdec bench demo:smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 8}' \\
          --also '{"method": "ngram", "num_speculative_tokens": 3}' --plot bench.png
      compare draft lengths, and draw the result
  specdec bench --config specdec.toml --prompts my_prompts.jsonl --batch-size 16 --output-json bench.json
      your prompts, many at once; keep the numbers
  specdec bench serve --max-concurrency 16
      measure a running server instead (comes with specdec-server)"""


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "bench",
        summary=COMMANDS["bench"].summary,
        description="Run the same prompts with and without speculation, taking turns in one process, and compare the "
        "medians.\nPrefix caching is off unless it is set, because later rounds would find all prompts in the cache.",
        examples=EXAMPLES,
        usage="specdec bench [options] [MODEL]",
    )
    add_model_argument(parser)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--prompts",
        metavar="FILE|SET",
        default="code_edit",
        help=f"a .jsonl file, or a bundled set: {', '.join(bundled_sets())} (default: %(default)s)",
    )
    _add_count(work, "--num-prompts", 8, "prompts taken from the beginning of the set")
    _add_count(work, "--max-tokens", 128, "most output tokens of a prompt")
    _add_count(work, "--rounds", 3, "turns of each configuration")
    _add_count(work, "--batch-size", 1, "prompts given to the engine at once")
    work.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: %(default)s)")
    work.add_argument("--ignore-eos", action="store_true", help="always make --max-tokens tokens")
    work.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    work.add_argument(
        "--also", metavar="JSON", action="append", default=[], help="one more speculative configuration to compare"
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--output-json", metavar="FILE", help="write settings, machine and numbers; - is standard output"
    )
    result.add_argument("--plot", metavar="FILE.png", help="draw the result (needs specdec-core[plot])")
    add_config_flags(parser)
    parser.set_defaults(run=run)


def _add_count(group: Any, flag: str, default: int, text: str) -> None:
    group.add_argument(flag, type=count, default=default, metavar="N", help=f"{text} (default: %(default)s)")


def count(text: str) -> int:
    """Parse a positive integer, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from specdec.sampling.params import SamplingParams

    config, sources = read_config(arguments)
    variants = measuring.variants_of(fair(config, sources), speculative_configs(config, sources, arguments.also))
    prompts = read_prompts(arguments)
    params = SamplingParams(
        temperature=arguments.temperature, max_tokens=arguments.max_tokens, ignore_eos=arguments.ignore_eos
    )
    if arguments.plot:
        from specdec.cli.plot import require_matplotlib

        require_matplotlib(arguments.plot)
    for file in (arguments.output_json, arguments.plot):
        check_writable(file)
    with measuring.progress(arguments.rounds, variants, len(prompts), show=sys.stderr.isatty()) as bar:
        measuring.measure(
            variants, prompts, params, rounds=arguments.rounds, batch_size=arguments.batch_size, advance=bar.advance
        )
    summaries = [measuring.summary(variant, variants[0]) for variant in variants]
    report(arguments, variants, summaries)
    return 0


def fair(config: EngineConfig, sources: Mapping[str, str]) -> EngineConfig:
    """Without prefix caching, unless somebody asked for it: repeated prompts would not be computed again."""
    if sources["enable_prefix_caching"] != "default":
        return config
    return attrs.evolve(config, enable_prefix_caching=False)


def speculative_configs(
    config: EngineConfig, sources: Mapping[str, str], also: Sequence[str]
) -> list[SpeculativeConfig]:
    """The speculative configurations to compare with plain decoding.

    Raises:
        UsageError: there is none, or one is not a JSON object.
        SpecdecError: one has a bad value, or names a method that cannot be used.
    """
    configs = given_methods(config, sources, also)
    if not configs:
        raise UsageError(
            "bench compares plain decoding with speculation, and no method is set. "
            "Add for example --speculative.method ngram."
        )
    return configs


def given_methods(config: EngineConfig, sources: Mapping[str, str], also: Sequence[str]) -> list[SpeculativeConfig]:
    """The configuration's method and those of ``--also``; each plugin has checked its options.

    Args:
        config: the engine's.
        sources: origins of its settings, by dotted path.
        also: JSON objects.

    Raises:
        UsageError: one is not a JSON object.
        SpecdecError: one has a bad value, or names a method that cannot be used.
    """
    check_plugins(config, sources)
    configs = [] if config.speculative is None else [config.speculative]
    for text in also:
        origins = {SpeculativeConfig.SECTION: "--also"}
        try:
            one = structure(SpeculativeConfig, parse_object(text), SpeculativeConfig.SECTION, origins)
        except ValueError as error:
            raise UsageError(f"--also {text!r}: must be {error}.") from error
        check_plugins(attrs.evolve(config, speculative=one), origins)
        configs.append(one)
    return configs


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The first prompts of the set."""
    prompts = read_set(arguments.prompts)[: arguments.num_prompts]
    return [prompt.as_text() for prompt in prompts] if arguments.raw else prompts


def check_writable(file: str | None) -> None:
    """Refuse a result file before the measurement, not after it.

    Raises:
        UsageError: the folder does not exist, or the file is a folder.
    """
    if not file or file == "-":
        return
    if not Path(file).absolute().parent.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {Path(file).parent}.")
    if Path(file).is_dir():
        raise UsageError(f"cannot write {file}: it is a folder.")


# --- report -------------------------------------------------------------------------------------


def report(arguments: argparse.Namespace, variants: list[Variant], summaries: list[dict[str, Any]]) -> None:
    """The table, and the files that were asked for."""
    result = as_json(arguments, variants, summaries) if arguments.output_json else {}
    if arguments.output_json == "-":
        print(json.dumps(result, indent=2))
    else:
        show(settings_line(arguments, variants), summaries)
    if arguments.output_json and arguments.output_json != "-":
        Path(arguments.output_json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        from specdec.cli.plot import draw

        draw(summaries, Path(arguments.plot), title=f"{variants[0].config.model}, {arguments.prompts}")


def as_json(arguments: argparse.Namespace, variants: list[Variant], summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is needed to repeat the measurement, and its numbers."""
    from specdec.cli.machine import describe_machine

    work = ("prompts", "num_prompts", "max_tokens", "rounds", "batch_size", "temperature", "ignore_eos", "raw")
    return {
        "settings": {name: getattr(arguments, name) for name in work},
        "machine": describe_machine(),
        "variants": [
            {"config": to_dict(variant.config), **numbers} for variant, numbers in zip(variants, summaries, strict=True)
        ],
    }


def settings_line(arguments: argparse.Namespace, variants: list[Variant]) -> str:
    """What was measured, in one line."""
    import torch

    plain, *others = variants
    return (
        f"{plain.config.model}, {plain.runs_in}, {_number(torch.get_num_threads(), 'thread')}: "
        f"{_number(len(plain.token_ids), 'prompt')} of {arguments.prompts}, at most "
        f"{_number(arguments.max_tokens, 'token')} each, batch size {arguments.batch_size}, "
        f"temperature {arguments.temperature:g}, {_number(arguments.rounds, 'round')}; "
        f"plain against {', '.join(map(_described, others))}"
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _described(variant: Variant) -> str:
    """A variant's name, and the most tokens of its drafts where that was set."""
    speculative = variant.config.speculative
    k = speculative.num_speculative_tokens if speculative else None
    return variant.name if k is None or f"k={k}" in variant.name else f"{variant.name} k={k}"


def show(settings: str, summaries: list[dict[str, Any]]) -> None:
    """What was measured, and one column for each variant."""
    from rich.table import Table

    from specdec.cli.console import make_console

    table = Table(header_style="bold")
    table.add_column("")
    for numbers in summaries:
        table.add_column(numbers["name"], justify="right")
    for label, cells in rows(summaries):
        table.add_row(label, *cells)
    console = make_console()
    console.print(settings, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for numbers in summaries:
        if members := numbers["stats"]["proposer"].get("members"):
            console.print(_members_table(numbers["name"], members))


def _members_table(name: str, members: Mapping[str, Mapping[str, Any]]) -> Any:
    """What each proposer within a variant's proposer did, since the engine started."""
    from rich.table import Table

    from specdec.cli.tables import accepted_at

    table = Table(header_style="bold", title=f"members of {name}")
    table.add_column("", no_wrap=True)
    for column in ("drafts", "draft tokens", "accepted", "at position, of its drafts", "draft seconds"):
        table.add_column(column, justify="right")
    for member, counts in members.items():
        table.add_row(
            member if counts.get("is_on", True) else f"{member} (switched off)",
            str(counts["num_drafts"]),
            str(counts["num_draft_tokens"]),
            str(counts["num_accepted_tokens"]),
            accepted_at(_spec_stats(counts)),
            f"{counts['propose_seconds']:.3f}",
        )
    return table


def _spec_stats(counts: Mapping[str, Any]) -> SpecStats:
    """The counts of drafts among others."""
    from specdec.types import SpecStats

    return SpecStats(
        num_drafts=counts["num_drafts"],
        num_accepted_tokens_per_pos=tuple(counts["num_accepted_tokens_per_pos"]),
        num_draft_tokens_per_pos=tuple(counts.get("num_draft_tokens_per_pos", ())),
    )


def rows(summaries: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Label and cells of each line of the table."""
    from specdec.cli.tables import accepted_at

    def line(label: str, key: str, form: str) -> tuple[str, list[str]]:
        return label, [format(numbers[key], form) for numbers in summaries]

    at_position = [accepted_at(_spec_stats(numbers["stats"])) for numbers in summaries]
    return [
        line("tokens/s (median of rounds)", "tokens_per_second", ".1f"),
        line("ratio of medians", "ratio_of_medians", ".2f"),
        line("tokens/s after the first token", "decode_tokens_per_second", ".1f"),
        line("ratio of medians", "decode_ratio_of_medians", ".2f"),
        line("acceptance length", "acceptance_length", ".2f"),
        ("accepted at position, of all drafts", at_position),
        line("target ms/step", "target_ms_per_step", ".2f"),
        line("verify ms/step", "verify_ms_per_step", ".2f"),
        line("propose ms/step", "propose_ms_per_step", ".2f"),
        line("rest ms/step", "rest_ms_per_step", ".2f"),
        line("outputs identical to plain", "share_identical_to_plain", ".0%"),
        line("output tokens", "num_output_tokens", "d"),
    ]
