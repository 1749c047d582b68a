"""``specdec doctor``: does speculation pay for this model, these prompts, on this machine, and with which method?"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.cli import diagnosis, measuring
from specdec.cli.bench import check_writable, fair, given_methods, read_prompts
from specdec.cli.bench import count as positive
from specdec.cli.commands import COMMANDS
from specdec.cli.parser import Subparsers, UsageError, add_command
from specdec.cli.prompts import bundled_sets
from specdec.config.describe import toml_of
from specdec.config.flags import add_config_flags, add_model_argument, read_config
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from specdec.cli.diagnosis import Diagnosis, MethodFacts
    from specdec.config import EngineConfig, SpeculativeConfig
    from specdec.sampling.params import SamplingParams

EXAMPLES = """\
  specdec doctor demo:smollm2
      try every installed method that needs no checkpoint, or has one installed for this model, on code edits
  specdec doctor demo:smollm2 --prompts my.jsonl --batch-sizes 1,8,32 --output-json doctor.json --plot doctor.png
      your prompts, several batch sizes; keep the numbers and draw them
  specdec doctor MODEL --also '{"method": "draft_model", "model": "path/to/small"}'
      try a draft model, too"""


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "doctor",
        summary=COMMANDS["doctor"].summary,
        description="Measure step time by number of rows, draft time and acceptance of each method on your model, "
        "prompts\nand machine; predict the speed-up, measure it, and recommend a method and k, or say why speculation "
        "does not pay.",
        examples=EXAMPLES,
        usage="specdec doctor [options] [MODEL]",
    )
    add_model_argument(parser)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--prompts",
        metavar="FILE|SET",
        default="code_edit",
        help=f"a .jsonl file, or a bundled set: {', '.join(bundled_sets())} (default: %(default)s)",
    )
    counts = (
        ("--num-prompts", 4, "prompts taken from the beginning of the set"),
        ("--max-tokens", 96, "most output tokens of a prompt"),
        ("--rounds", 2, "turns in which step time is measured; prompts are answered once by each method"),
        ("--num-speculative-tokens", 8, "longest draft that is tried"),
    )
    for flag, default, text in counts:
        work.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    work.add_argument(
        "--batch-sizes",
        metavar="A,B",
        type=_batch_sizes,
        default=(1, 8),
        help="requests at once for which step time is measured; the recommendation is for the first (default: 1,8)",
    )
    work.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: %(default)s)")
    work.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    work.add_argument(
        "--also",
        metavar="JSON",
        action="append",
        default=[],
        help="a speculative configuration to try besides, for methods that need a checkpoint; the one of "
        "--speculative-config is tried as well",
    )
    work.add_argument(
        "--only-given", action="store_true", help="try only the methods that were given, not the installed"
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--output-json", metavar="FILE", help="write everything that was measured; - is standard output"
    )
    result.add_argument("--plot", metavar="FILE.png", help="draw the result (needs specdec-core[plot])")
    add_config_flags(parser)
    parser.set_defaults(run=run)


def _batch_sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def run(arguments: argparse.Namespace) -> int:
    """Measure, recommend, check the recommendation, report."""
    from specdec.sampling.params import SamplingParams

    config, sources = read_config(arguments)
    candidates, incomplete = _candidates(arguments, config, sources)
    if arguments.plot:
        from specdec.cli.plot import require_matplotlib

        require_matplotlib(arguments.plot)
    for file in (arguments.output_json, arguments.plot):
        check_writable(file)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=0)
    plain = attrs.evolve(fair(config, sources), speculative=None)
    found = _diagnose(arguments, plain, candidates, incomplete, params)
    best = found.recommended(arguments.batch_sizes[0])
    measured = None if best is None else _check(arguments, plain, best[0], best[1], params)
    result = as_json(arguments, found, best, measured)
    if arguments.output_json == "-":
        print(json.dumps(result, indent=2))
    else:
        show(config.model, found, best, measured)
    if arguments.output_json and arguments.output_json != "-":
        Path(arguments.output_json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        from specdec.cli.plot import draw_diagnosis

        draw_diagnosis(result, Path(arguments.plot), title=f"{config.model}, {arguments.prompts}")
    return 0


def _candidates(
    arguments: argparse.Namespace, config: EngineConfig, sources: Mapping[str, str]
) -> tuple[list[SpeculativeConfig], dict[str, str]]:
    """What to try: the configuration's method, those of ``--also``, and what is installed."""
    k = arguments.num_speculative_tokens
    given = [
        attrs.evolve(one, num_speculative_tokens=k, num_speculative_tokens_per_batch_size=None)
        for one in given_methods(config, sources, arguments.also)
    ]
    if arguments.only_given:
        if not given:
            raise UsageError("--only-given needs a method, with --speculative-config or --also.")
        return given, {}
    installed, incomplete = diagnosis.installed_methods(config, k)
    names = {one.method for one in given}
    return [*given, *(one for one in installed if one.method not in names)], incomplete


def _diagnose(
    arguments: argparse.Namespace,
    plain: EngineConfig,
    candidates: Sequence[SpeculativeConfig],
    incomplete: dict[str, str],
    params: SamplingParams,
) -> Diagnosis:
    prompts = read_prompts(arguments)
    k = arguments.num_speculative_tokens
    work = diagnosis.num_measured_steps(arguments.batch_sizes, k, arguments.rounds)
    work += len(candidates) * (len(prompts) + 2)
    with measuring.progress_bar(work, show=sys.stderr.isatty()) as bar:
        _say(f"measuring steps of {', '.join(map(str, arguments.batch_sizes))} requests with up to {k} draft tokens")
        times = diagnosis.measure_step_times(
            plain,
            prompts,
            params,
            batch_sizes=arguments.batch_sizes,
            k=k,
            rounds=arguments.rounds,
            advance=bar.one,
        )
        methods, refused = list[Any](), dict[str, str]()
        for candidate in candidates:
            name = candidate.method or str(candidate.model)
            _say(f"measuring {name} on {len(prompts)} prompts")
            try:
                methods.append(diagnosis.measure_method(plain, candidate, prompts, params, bar.one))
            except SpecdecError as error:
                refused[name] = str(error).partition("\n")[0]
    return diagnosis.Diagnosis(step_times=times, methods=tuple(methods), incomplete=incomplete, refused=refused)


def _say(text: str) -> None:
    """What is being done, where no progress bar says it."""
    if not sys.stderr.isatty():
        print(f"{text} …", file=sys.stderr, flush=True)


def _check(
    arguments: argparse.Namespace, plain: EngineConfig, facts: MethodFacts, k: int, params: SamplingParams
) -> dict[str, Any]:
    """The recommendation against plain decoding, in turns, each prompt once."""
    speculative = attrs.evolve(facts.speculative, num_speculative_tokens=k, speculation="auto")
    variants = measuring.variants_of(plain, [speculative])
    prompts = read_prompts(arguments)
    _say(f"checking {facts.name} with {facts.named(k)} against plain decoding")
    with measuring.progress(1, variants, len(prompts), show=sys.stderr.isatty()) as bar:
        measuring.measure_once(variants, prompts, params, batch_size=arguments.batch_sizes[0], advance=bar.advance)
    ours, theirs = variants[1].overall, variants[0].overall
    return {
        "speed_up": ours.decode_rate / theirs.decode_rate if theirs.decode_rate else 1.0,
        "speed_up_with_prompts": ours.tokens_per_second / theirs.tokens_per_second,
        **measuring.summary(variants[1], variants[0]),
    }


# --- report -------------------------------------------------------------------------------------


def as_json(
    arguments: argparse.Namespace,
    found: Diagnosis,
    best: tuple[MethodFacts, int, float] | None,
    measured: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything that was measured, as plain values."""
    from specdec.cli.machine import describe_machine

    work = (
        "prompts",
        "num_prompts",
        "max_tokens",
        "rounds",
        "num_speculative_tokens",
        "batch_sizes",
        "temperature",
        "raw",
    )
    return {
        "settings": {name: getattr(arguments, name) for name in work},
        "machine": describe_machine(),
        "step_times": [
            {
                "batch_size": times.batch_size,
                "plain_ms": 1000 * times.at(0),
                "relative": {str(k + 1): seconds / times.at(0) for k, seconds in times.seconds.items()},
            }
            for times in found.step_times
        ],
        "methods": [_method_json(found, facts) for facts in found.methods],
        "skipped": {**found.incomplete, **found.refused},
        "recommended": None
        if best is None
        else {
            "method": best[0].name,
            "num_speculative_tokens": best[1],
            "predicted_speed_up": best[2],
            "measured_speed_up": measured["speed_up"] if measured else None,
            "confirmed": measured is not None and measured["speed_up"] > 1.0,
            "config": snippet(best[0], best[1]),
        },
        "check": measured,
    }


def _method_json(found: Diagnosis, facts: MethodFacts) -> dict[str, Any]:
    ks = facts.lengths
    return {
        "method": facts.name,
        "num_nodes": facts.num_nodes,
        "draft_share": facts.draft_share,
        "drafted_per_pos": list(facts.drafted),
        "acceptance_rate_per_pos": list(facts.acceptance),
        "draft_ms_at_1": 1000 * facts.draft_seconds_first,
        "draft_ms_at_most": 1000 * facts.draft_seconds_last,
        "predicted_speed_up": {
            str(times.batch_size): {str(k): facts.speed_up(k, times) for k in ks} for times in found.step_times
        },
    }


def snippet(facts: MethodFacts, k: int) -> str:
    """The section of a configuration file to copy."""
    return "[speculative]\n" + toml_of(_settings(facts, k))


def _settings(facts: MethodFacts, k: int) -> dict[str, Any]:
    values = {"method": facts.speculative.method, "model": facts.speculative.model, "num_speculative_tokens": k}
    return {key: value for key, value in values.items() if value is not None} | facts.speculative.options


def show(
    model: str,
    found: Diagnosis,
    best: tuple[MethodFacts, int, float] | None,
    measured: dict[str, Any] | None,
) -> None:
    """Tables and the verdict."""
    from specdec.cli.console import make_console

    console = make_console()
    console.print(_step_table(found))
    console.print(_method_table(found))
    if found.incomplete:
        names = ", ".join(found.incomplete)
        console.print(f"not tried: {names}; they need options, such as a checkpoint: see --also", markup=False)
    for name, reason in found.refused.items():
        console.print(f"not tried: {name}: {reason}", markup=False)
    times = found.step_times[0]
    if best is None or measured is None:
        console.print(f"\nSpeculation does not pay here (batch size {times.batch_size}).")
        for facts in found.methods:
            console.print(f"  {facts.name}: {found.why_not(facts, times)}", markup=False)
        return
    facts, k, predicted = best
    ratio, whole = measured["speed_up"], measured["speed_up_with_prompts"]
    numbers = f"predicted {predicted:.2f}x, measured {ratio:.2f}x ({whole:.2f}x with the time for the prompts)"
    if ratio <= 1.0:
        console.print(f"\nSpeculation does not pay here (batch size {times.batch_size}), though it might have:")
        console.print(
            f"  {facts.name} with {facts.named(k)}: {numbers}. Repeat it when the machine is quiet.", markup=False
        )
        return
    console.print(f"\nRecommended: {facts.name} with {facts.named(k)}: {numbers}.")
    console.print("In a configuration file, for --config:\n")
    console.print(toml_of({"model": model}) + "\n" + snippet(facts, k), markup=False, soft_wrap=True)
    options = json.dumps(_settings(facts, k))
    console.print(f"or on the command line: --speculative-config {shlex.quote(options)}", markup=False, soft_wrap=True)


def _step_table(found: Diagnosis) -> Any:
    from rich.table import Table

    table = Table(header_style="bold", title="step time relative to a plain step, by rows per request")
    table.add_column("batch size")
    table.add_column("plain ms", justify="right")
    for k in found.step_times[0].seconds:
        table.add_column(str(k + 1), justify="right")
    for times in found.step_times:
        relative = [f"{seconds / times.at(0):.2f}" for seconds in times.seconds.values()]
        table.add_row(str(times.batch_size), f"{1000 * times.at(0):.2f}", *relative)
    return table


def _method_table(found: Diagnosis) -> Any:
    from rich.table import Table

    from specdec.cli.tables import percentages

    table = Table(header_style="bold", title="methods, one request at a time")
    for column in (
        "method",
        "steps with a draft",
        "accepted at position (of trees, depth), of all drafts",
        "draft ms (k=1, most)",
    ):
        table.add_column(column, no_wrap=column == "method")
    for times in found.step_times:
        table.add_column(f"best k, predicted (batch {times.batch_size})", justify="right")
    for facts in found.methods:
        bests = [facts.best(times) for times in found.step_times] if facts.acceptance else []
        table.add_row(
            facts.name,
            f"{facts.draft_share:.0%}",
            percentages(facts.acceptance),
            f"{1000 * facts.draft_seconds_first:.2f}, {1000 * facts.draft_seconds_last:.2f}",
            *(f"{facts.named(k)}, {speed:.2f}x" for k, speed in bests),
        )
    return table
