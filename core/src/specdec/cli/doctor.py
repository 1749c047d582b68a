"""``specdec doctor``: does speculation pay for this model, these prompts, on this machine, and with which method?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.cli import diagnosis, measuring
from specdec.cli.bench import check_writable, fair, read_prompts
from specdec.cli.bench import count as positive
from specdec.cli.parser import Subparsers, UsageError, add_command
from specdec.cli.prompts import bundled_sets
from specdec.config import SpeculativeConfig, structure
from specdec.config.flags import add_config_flags, add_model_argument, read_config
from specdec.config.text import parse_object
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from specdec.cli.diagnosis import Diagnosis, MethodFacts
    from specdec.config import EngineConfig
    from specdec.sampling.params import SamplingParams

EXAMPLES = """\
  specdec doctor demo:smollm2
      try every installed method that needs no checkpoint, on code edits
  specdec doctor demo:smollm2 --prompts my_prompts.jsonl --batch-sizes 1,8,32 --json doctor.json --plot doctor.png
      your prompts, several batch sizes; keep the numbers and draw them
  specdec doctor MODEL --also '{"method": "draft_model", "model": "path/to/small"}'
      try a draft model, too"""


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "doctor",
        summary="find out whether speculation pays here, and with which method",
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
        ("--rounds", 2, "turns of each measurement"),
        ("--max-draft-tokens", 8, "longest draft that is tried"),
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
    result.add_argument("--json", metavar="FILE", help="write everything that was measured; - is standard output")
    result.add_argument("--plot", metavar="FILE.png", help="draw the result (needs specdec-core[plot])")
    add_config_flags(parser)
    parser.set_defaults(run=run)


def _batch_sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def run(arguments: argparse.Namespace) -> int:
    """Measure, recommend, check the recommendation, report."""
    from specdec.sampling.params import SamplingParams

    config, sources = read_config(arguments)
    candidates, skipped = _candidates(arguments, config)
    if arguments.plot:
        from specdec.cli.plot import require_matplotlib

        require_matplotlib(arguments.plot)
    for file in (arguments.json, arguments.plot):
        check_writable(file)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=0)
    plain = attrs.evolve(fair(config, sources), speculative=None)
    found = _diagnose(arguments, plain, candidates, skipped, params)
    best = found.recommended(arguments.batch_sizes[0])
    measured = None if best is None else _check(arguments, plain, best[0], best[1], params)
    result = as_json(arguments, found, best, measured)
    if arguments.json == "-":
        print(json.dumps(result, indent=2))
    else:
        show(arguments, found, best, measured)
    if arguments.json and arguments.json != "-":
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        from specdec.cli.plot import draw_diagnosis

        draw_diagnosis(result, Path(arguments.plot), title=f"{config.model}, {arguments.prompts}")
    return 0


def _candidates(arguments: argparse.Namespace, config: EngineConfig) -> tuple[list[SpeculativeConfig], dict[str, str]]:
    """What to try: the configuration's method, those of ``--also``, and what is installed."""
    k = arguments.max_draft_tokens
    given = [] if config.speculative is None else [config.speculative]
    for text in arguments.also:
        try:
            given.append(structure(SpeculativeConfig, parse_object(text), "speculative"))
        except ValueError as error:
            raise UsageError(f"--also {text!r}: must be {error}.") from error
    given = [attrs.evolve(one, num_speculative_tokens=k, num_speculative_tokens_per_batch_size=None) for one in given]
    if arguments.only_given:
        if not given:
            raise UsageError("--only-given needs a method, with --speculative-config or --also.")
        return given, {}
    installed, skipped = diagnosis.methods_without_checkpoint(config, k)
    names = {one.method for one in given}
    return [*given, *(one for one in installed if one.method not in names)], skipped


def _diagnose(
    arguments: argparse.Namespace,
    plain: EngineConfig,
    candidates: Sequence[SpeculativeConfig],
    skipped: dict[str, str],
    params: SamplingParams,
) -> Diagnosis:
    prompts = read_prompts(arguments)
    k = arguments.max_draft_tokens
    lengths = sum(length <= k for length in diagnosis.LENGTHS)
    turns = len(arguments.batch_sizes) * lengths * arguments.rounds + len(candidates) * len(prompts)
    with measuring.progress_bar(turns, show=sys.stderr.isatty()) as bar:
        times = diagnosis.measure_step_times(
            plain,
            prompts,
            params,
            batch_sizes=arguments.batch_sizes,
            k=k,
            rounds=arguments.rounds,
            advance=bar.one,
        )
        methods, refused = list[Any](), dict(skipped)
        for candidate in candidates:
            try:
                methods.append(diagnosis.measure_method(plain, candidate, prompts, params, bar.one))
            except SpecdecError as error:
                refused[candidate.method or str(candidate.model)] = str(error).partition("\n")[0]
    return diagnosis.Diagnosis(step_times=times, methods=tuple(methods), skipped=refused)


def _check(
    arguments: argparse.Namespace, plain: EngineConfig, facts: MethodFacts, k: int, params: SamplingParams
) -> dict[str, Any]:
    """The recommendation against plain decoding, in turns."""
    speculative = attrs.evolve(facts.speculative, num_speculative_tokens=k, speculation="auto")
    variants = measuring.variants_of(plain, [speculative])
    prompts = read_prompts(arguments)
    with measuring.progress(arguments.rounds, variants, len(prompts), show=sys.stderr.isatty()) as bar:
        measuring.measure(
            variants,
            prompts,
            params,
            rounds=arguments.rounds,
            batch_size=arguments.batch_sizes[0],
            advance=bar.advance,
        )
    return measuring.summary(variants[1], variants[0])


# --- report -------------------------------------------------------------------------------------


def as_json(
    arguments: argparse.Namespace,
    found: Diagnosis,
    best: tuple[MethodFacts, int, float] | None,
    measured: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything that was measured, as plain values."""
    from specdec.cli.machine import describe_machine

    work = ("prompts", "num_prompts", "max_tokens", "rounds", "max_draft_tokens", "batch_sizes", "temperature", "raw")
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
        "skipped": dict(found.skipped),
        "recommended": None
        if best is None
        else {
            "method": best[0].name,
            "num_speculative_tokens": best[1],
            "predicted_speed_up": best[2],
            "measured_speed_up": measured["ratio_of_medians"] if measured else None,
            "config": snippet(best[0], best[1]),
        },
        "check": measured,
    }


def _method_json(found: Diagnosis, facts: MethodFacts) -> dict[str, Any]:
    ks = range(1, len(facts.acceptance) + 1)
    return {
        "method": facts.name,
        "draft_share": facts.draft_share,
        "acceptance_rate_per_pos": list(facts.acceptance),
        "draft_ms_at_1": 1000 * facts.draft_seconds_first,
        "draft_ms_at_most": 1000 * facts.draft_seconds_last,
        "predicted_speed_up": {
            str(times.batch_size): {str(k): facts.speed_up(k, times) for k in ks} for times in found.step_times
        },
    }


def snippet(facts: MethodFacts, k: int) -> str:
    """The configuration to copy."""
    values = {"method": facts.speculative.method, "model": facts.speculative.model, "num_speculative_tokens": k}
    values |= facts.speculative.options
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    return "\n".join(["[speculative]", *lines])


def show(
    arguments: argparse.Namespace,
    found: Diagnosis,
    best: tuple[MethodFacts, int, float] | None,
    measured: dict[str, Any] | None,
) -> None:
    """Tables and the verdict."""
    from specdec.cli.console import make_console

    console = make_console()
    console.print(_step_table(found))
    console.print(_method_table(found))
    for name, reason in found.skipped.items():
        console.print(f"not tried: {name}: {reason}", markup=False)
    times = found.step_times[0]
    if best is None or measured is None:
        console.print(f"\nSpeculation does not pay here (batch size {times.batch_size}).")
        for facts in found.methods:
            console.print(f"  {facts.name}: {found.why_not(facts, times)}", markup=False)
        return
    facts, k, predicted = best
    ratio = measured["ratio_of_medians"]
    console.print(f"\nRecommended: {facts.name} with k={k}: predicted {predicted:.2f}x, measured {ratio:.2f}x.")
    if ratio < 1.0:
        console.print("The measurement does not confirm the prediction: repeat it when the machine is quiet.")
    console.print(snippet(facts, k), markup=False)


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
    for column in ("method", "steps with a draft", "accepted per position", "draft ms (k=1, most)"):
        table.add_column(column)
    for times in found.step_times:
        table.add_column(f"best k, predicted (batch {times.batch_size})", justify="right")
    for facts in found.methods:
        bests = [facts.best(times) for times in found.step_times] if facts.acceptance else []
        table.add_row(
            facts.name,
            f"{facts.draft_share:.0%}",
            percentages(facts.acceptance),
            f"{1000 * facts.draft_seconds_first:.2f}, {1000 * facts.draft_seconds_last:.2f}",
            *(f"k={k}, {speed:.2f}x" for k, speed in bests),
        )
    return table
