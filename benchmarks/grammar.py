"""What structured output costs, and what speculation gains under it.

Two parts. "cost": a batch of requests that write JSON for a schema of many fields; the share of the steps' time that
grammars take (drafts cut and added, masks filled and applied, states advanced), without speculation and with n-gram
lookup. "speed": tokens per second on the JSON-schema prompts, without and with n-gram lookup, in turns, and how many of
the outputs that ended fit their schema.

    python benchmarks/grammar.py
    python benchmarks/grammar.py --part cost --fields 30 --batches 1,8
    python benchmarks/grammar.py --part speed --num-prompts 20 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, write_result

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
ENGINES: dict[str, dict[str, Any] | None] = {"plain": None, "ngram": NGRAM}
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 20},
    {"type": "integer", "minimum": 0, "maximum": 100000},
    {"type": "number"},
    {"enum": ["low", "medium", "high"]},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--part", action="append", choices=("cost", "speed"), help="both when not given")
    parser.add_argument("--fields", type=int, default=30)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    parts = arguments.part or ["cost", "speed"]
    result: dict[str, Any] = {"settings": {k: v for k, v in vars(arguments).items() if k != "out"}}
    if "cost" in parts:
        result["cost"] = [
            measure_cost(arguments, name, batch) for name in ENGINES for batch in map(int, arguments.batches.split(","))
        ]
    if "speed" in parts:
        result["speed"] = measure_speed(arguments)
    write_result("grammar", result, arguments.out)
    return 0


def open_engine(arguments: argparse.Namespace, name: str, **settings: Any) -> Any:
    from specdec import LLM

    return LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=4096,
        num_threads=arguments.threads,
        stat_loggers=(),
        speculative_config=ENGINES[name],
        **settings,
    )


def schema_of(num_fields: int) -> dict[str, Any]:
    """An object with that many required fields of six kinds."""
    properties = {f"field_{i}": KINDS[i % len(KINDS)] for i in range(num_fields)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def measure_cost(arguments: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """Share of the steps' time that grammars take; prefill is not counted."""
    from specdec import SamplingParams

    schema = schema_of(arguments.fields)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, structured_outputs={"json": schema})
    with open_engine(arguments, name, max_num_seqs=batch) as llm:
        begin = time.perf_counter()
        llm.generate([1], SamplingParams(max_tokens=1, structured_outputs={"json": schema}), use_tqdm=False)
        compile_seconds = time.perf_counter() - begin
        prompt = "A record as JSON, with all fields filled in: "
        llm.generate([prompt] * batch, params, use_tqdm=False)  # the timed run finds its prompt in the prefix cache
        before = llm.stats()
        llm.generate([prompt] * batch, params, use_tqdm=False)
        spent = llm.stats().since(before)
    cell = {
        "engine": name,
        "batch": batch,
        "first_request_seconds": compile_seconds,
        "num_steps": spent.num_steps,
        "num_tokens": spent.num_generated_tokens,
        "step_ms": 1000 * spent.step_seconds / spent.num_steps,
        "grammar_ms_per_step": 1000 * spent.grammar_seconds / spent.num_steps,
        "grammar_share": spent.grammar_seconds / spent.step_seconds,
    }
    print(
        f"cost {name} batch {batch}: {cell['grammar_share']:.1%} of {cell['step_ms']:.2f} ms per step", file=sys.stderr
    )
    return cell


def measure_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second on the prompts, engines in turns; outputs of the last round are checked."""
    cases = usable_cases(arguments)
    rates: dict[str, list[float]] = {name: [] for name in ENGINES}
    report: dict[str, Any] = {"num_prompts": len(cases)}
    engines = {name: open_engine(arguments, name, max_num_seqs=1) for name in ENGINES}
    for round_index in range(arguments.rounds):
        for name, llm in engines.items():
            before = llm.stats()
            begin = time.perf_counter()
            texts = [run(llm, case, arguments.max_tokens) for case in cases]
            spent = llm.stats().since(before)
            rates[name].append(spent.num_generated_tokens / (time.perf_counter() - begin))
            llm.reset_prefix_cache()
            if round_index == arguments.rounds - 1:
                report[name] = summary(cases, texts, rates[name], spent)
                print(f"speed {name}: {report[name]}", file=sys.stderr)
    for llm in engines.values():
        llm.close()
    return report


def usable_cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The prompts whose schema the backend takes."""
    from specdec import SamplingParams
    from specdec.errors import InvalidRequestError

    path = Path(HERE) / "prompts" / "json_schema.jsonl"
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][: arguments.num_prompts]
    found = []
    with open_engine(arguments, "plain") as llm:
        for case in cases:
            try:
                one = SamplingParams(max_tokens=1, structured_outputs={"json": case["schema"]})
                llm.generate([1], one, use_tqdm=False)
                found.append(case)
            except InvalidRequestError as error:
                print(f"left out: {case['id']}: {error}", file=sys.stderr)
    return found


def run(llm: Any, case: dict[str, Any], max_tokens: int) -> tuple[str, str]:
    from specdec import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs={"json": case["schema"]})
    chat = [{"role": "user", "content": case["turns"][0]}]
    choice = llm.chat(chat, params, use_tqdm=False)[0].outputs[0]
    return choice.text, choice.finish_reason


def summary(
    cases: list[dict[str, Any]], texts: list[tuple[str, str]], rates: list[float], spent: Any
) -> dict[str, Any]:
    ended = [(case, text) for case, (text, reason) in zip(cases, texts, strict=True) if reason == "stop"]
    return {
        "tokens_per_second": median(rates),
        "tokens_per_second_per_round": rates,
        "num_ended": len(ended),
        "num_valid": sum(is_valid(case, text) for case, text in ended),
        "grammar_share": spent.grammar_seconds / spent.step_seconds,
        "acceptance_length": spent.mean_acceptance_length,
        "acceptance_rate": spent.acceptance_rate,
        "num_grammar_cut_tokens": spent.num_grammar_cut_tokens,
        "num_grammar_forced_tokens": spent.num_grammar_forced_tokens,
    }


def is_valid(case: dict[str, Any], text: str) -> bool:
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), case["schema"])
        return True
    except (ValueError, jsonschema.ValidationError):
        return False


if __name__ == "__main__":
    sys.exit(main())
