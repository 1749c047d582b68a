"""What ``specdec demo`` does: measure, then show texts and figures."""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from specdec.cli import measuring
from specdec.cli.console import make_console
from specdec.cli.prompts import Prompt, read_file
from specdec.cli.tables import accepted_at
from specdec.config import EngineConfig, from_kwargs
from specdec.sampling.params import SamplingParams
from specdec_demo.methods import installed_methods

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.cli.measuring import Variant


def demonstrate(arguments: argparse.Namespace) -> int:
    """Measure and show; the exit code."""
    console = make_console()
    config = demo_config(arguments.model, arguments.dtype)
    methods, left_out = installed_methods(config, arguments.num_speculative_tokens)
    variants = measuring.variants_of(config, methods)
    prompts = bundled_prompts()[: arguments.num_prompts]
    introduce(console, variants, len(prompts), arguments.model)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    with measuring.progress(arguments.rounds, variants, len(prompts), show=sys.stderr.isatty()) as bar:
        measuring.measure(variants, prompts, params, rounds=arguments.rounds, batch_size=1, advance=bar.advance)
    show_texts(console, prompts, variants)
    console.print(figures(variants))
    explain(console, variants, left_out)
    return 0


def demo_config(model: str, dtype: str) -> EngineConfig:
    """One request at a time, nothing reused between rounds."""
    return from_kwargs(
        model, dtype=dtype, max_model_len=2048, max_num_seqs=1, kv_cache_memory="128MiB", enable_prefix_caching=False
    )


def bundled_prompts() -> list[Prompt]:
    """The prompts that come with this package."""
    with resources.as_file(resources.files("specdec_demo") / "prompts.jsonl") as path:
        return read_file(Path(path))


def introduce(console: Console, variants: list[Variant], num_prompts: int, model: str) -> None:
    """Say what is about to happen, and that the first start takes longer."""
    names = ", ".join(variant.name for variant in variants)
    console.print(f"{model}: {num_prompts} prompts, greedy; {names}. The first start converts the model.", style="dim")


def show_texts(console: Console, prompts: list[Prompt], variants: list[Variant]) -> None:
    """Each prompt's beginning and its answer; answers that differ between methods are all shown."""
    for number, prompt in enumerate(prompts):
        console.print(Text(f"--- {prompt.id} ({prompt.task})", style="bold"))
        question = str((prompt.messages or ({"content": prompt.text},))[0]["content"])
        console.print(Text(shortened(question), style="dim"))
        shown: dict[str, list[str]] = {}
        for variant in variants:
            shown.setdefault(variant.texts[number], []).append(variant.name)
        for text, names in shown.items():
            if len(shown) > 1:
                console.print(Text(", ".join(names), style="italic"))
            console.print(Text(indent(text.strip("\n"), "  ") + "\n"))


def shortened(text: str, lines: int = 6) -> str:
    """The first lines of a text."""
    parts = text.splitlines()
    return "\n".join(parts[:lines] + (["…"] if len(parts) > lines else []))


def figures(variants: list[Variant]) -> Table:
    """Speed and acceptance, one line for each method."""
    table = Table(header_style="bold")
    table.add_column("method", no_wrap=True)
    for column in ("tokens/s", "speed-up", "acceptance length", "accepted at position", "same text as plain"):
        table.add_column(column, justify="right")
    for variant in variants:
        numbers = measuring.summary(variant, variants[0])
        drafted = variant is not variants[0]
        table.add_row(
            variant.name,
            f"{numbers['tokens_per_second']:.1f}",
            f"{numbers['ratio_of_medians']:.2f}x",
            f"{numbers['acceptance_length']:.2f}" if drafted else "-",
            accepted_at(variant.stats.spec),
            f"{numbers['share_identical_to_plain']:.0%}" if drafted else "-",
        )
    return table


def explain(console: Console, variants: list[Variant], left_out: dict[str, str]) -> None:
    """What the figures mean, and what is missing."""
    console.print(
        "Speed-up: ratio of the medians over the rounds. Acceptance length: tokens gained per verify step "
        "with a draft, the model's own token included. Accepted at position: part of all drafts whose token there was "
        "kept; in brackets, where some were shorter, the part that had one. "
        "Where half-precision kernels add in another order for one token than for several (not those for CPUs), two "
        "nearly equal logits can swap; with --dtype float32 the texts are the same.",
        style="dim",
    )
    for name, reason in left_out.items():
        console.print(Text(f"{name} is left out: {reason}", style="dim"))
    if len(variants) == 1:
        console.print("No method is installed. Try: pip install specdec-ngram")
