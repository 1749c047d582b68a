"""Do drafts change a token? Every kind of head, chains and trees, against plain decoding in float32: texts must be
equal, at temperature 0 and, with the same seeds, at temperature 1.

The heads are those that come with the demonstration; with --random also heads of random weights.

The result file grows with every head and shape that is done. A run that was stopped, or that was for some of the
heads, goes on with --resume::

    python benchmarks/identity.py
    python benchmarks/identity.py --resume
    python benchmarks/identity.py --prompts 4 --max-tokens 32 --head medusa --head eagle --out some.json
    python benchmarks/identity.py --prompts 4 --max-tokens 32 --head eagle3 --out some.json --resume
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, add_common, read_conversations, write_result

CHAIN = {"num_speculative_tokens": 4}
STATIC = {
    "num_speculative_tokens": 8,
    "speculative_token_tree": "[(0,),(1,),(0,0),(0,1),(1,0),(0,0,0),(0,0,1),(0,1,0)]",
}
DYNAMIC = {"num_speculative_tokens": 8, "tree_top_k": 2, "tree_depth": 4}
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "eagle": {"chain": CHAIN, "tree": DYNAMIC},
    "eagle3": {"chain": CHAIN, "tree": DYNAMIC},
    "medusa": {"chain": {"num_speculative_tokens": 3}, "tree": STATIC},
    "mlp_speculator": {"chain": {"num_speculative_tokens": 3}, "tree": STATIC},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--head", action="append", choices=SHAPES, help="all when not given")
    parser.add_argument("--prompts", type=int, default=40, help="prompts (default: %(default)s)")
    parser.add_argument("--prompt-set", default="mt_bench")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="also random heads, of which next to nothing is accepted")
    parser.add_argument("--temperature", type=float, action="append", help="0 and 1 when not given")
    parser.add_argument("--resume", action="store_true", help="go on with the result file; its settings must be these")
    arguments = parser.parse_args()
    conversations = read_conversations(arguments.prompt_set, arguments.prompts)
    temperatures = arguments.temperature or [0.0, 1.0]
    names = ("model", "prompts", "prompt_set", "max_tokens", "batch", "threads")
    settings = {name: getattr(arguments, name) for name in names} | {"dtype": "float32", "temperatures": temperatures}
    cells = earlier_cells(arguments, settings) if arguments.resume else list[dict[str, Any]]()
    wanted = [
        (method, made) for method in arguments.head or SHAPES for made in ("trained", "random")[: 1 + arguments.random]
    ]
    done = {(cell["head"], cell["made"], cell["shape"]) for cell in cells}
    left = {which: [shape for shape in SHAPES[which[0]] if (*which, shape) not in done] for which in wanted}
    left = {which: shapes for which, shapes in left.items() if shapes}
    if left:
        plain, _ = decode(arguments, conversations, temperatures, None)
        with tempfile.TemporaryDirectory() as folder:
            heads = make_heads(arguments, list(left), Path(folder))
            for (method, made), shapes in left.items():
                for shape in shapes:
                    speculative = {"method": method, "model": heads[method, made], "speculation": "always"}
                    texts, stats = decode(arguments, conversations, temperatures, speculative | SHAPES[method][shape])
                    for temperature, text, expected, counts in zip(temperatures, texts, plain, stats, strict=True):
                        cell = {"head": method, "made": made, "shape": shape, "temperature": temperature}
                        cells.append(cell | compare(text, expected) | counts)
                        show(cells[-1])
                    write_result("identity", {"settings": settings, "cells": cells}, arguments.out)
    return int(any(cell["different_texts"] or cell["faults"] for cell in cells))


def earlier_cells(arguments: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of the result file; none when there is no file."""
    path = Path(arguments.out) if arguments.out else RESULTS / "identity.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings:
        sys.exit(f"--resume: {path} is of other settings, {found['settings']} instead of {settings}")
    cells: list[dict[str, Any]] = found["cells"]
    return cells


Texts = list[list[int]]


def decode(
    arguments: argparse.Namespace,
    conversations: list[Any],
    temperatures: list[float],
    speculative: dict[str, Any] | None,
) -> tuple[list[Texts], list[dict[str, Any]]]:
    """Token ids of the answers at each temperature, and what was drafted and accepted."""
    from specdec import LLM, SamplingParams

    texts, counts = [], []
    with LLM(
        arguments.model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=arguments.batch,
        kv_cache_memory="1GiB",
        num_threads=arguments.threads,
        stat_loggers=(),
        proposer_time_budget=0,
        speculative_config=speculative,
    ) as llm:
        for temperature in temperatures:
            before, begin = llm.stats(), time.perf_counter()
            params = [
                SamplingParams(temperature=temperature, seed=seed, max_tokens=arguments.max_tokens)
                for seed in range(len(conversations))
            ]
            outputs = llm.chat(conversations, params, use_tqdm=False)
            texts.append([list(output.outputs[0].token_ids) for output in outputs])
            done = llm.stats().since(before)
            counts.append(
                {
                    "drafted": done.num_draft_tokens,
                    "accepted": done.num_accepted_tokens,
                    "acceptance_length": 1 + done.num_accepted_tokens / max(1, done.num_drafts),
                    "faults": done.num_proposer_faults,
                    "seconds": time.perf_counter() - begin,
                }
            )
    return texts, counts


def compare(texts: Texts, expected: Texts) -> dict[str, int]:
    """How many answers differ from plain decoding's."""
    different = sum(text != plain for text, plain in zip(texts, expected, strict=True))
    return {"texts": len(texts), "tokens": sum(map(len, texts)), "different_texts": different}


def show(cell: dict[str, Any]) -> None:
    print(
        f"{cell['head']:14} {cell['made']:13} {cell['shape']:5} temperature {cell['temperature']:g}: "
        f"{cell['texts'] - cell['different_texts']} of {cell['texts']} texts equal, {cell['tokens']} tokens, "
        f"{cell['accepted']} of {cell['drafted']} draft tokens accepted, acceptance length "
        f"{cell['acceptance_length']:.2f}, {cell['seconds']:.0f} s",
        flush=True,
    )


# --- heads ------------------------------------------------------------------------------------------


def make_heads(
    arguments: argparse.Namespace, wanted: list[tuple[str, str]], folder: Path
) -> dict[tuple[str, str], str]:
    """Names or directories of the heads, by method and how they are made."""
    from specdec.target.cache import cache_root
    from specdec.target.gguf import converted
    from specdec.target.resolve import resolve_model
    from specdec.testing.heads import tiny_head

    found = resolve_model(arguments.model, None)
    heads: dict[tuple[str, str], str] = {}
    for method, made in wanted:
        if made == "trained":
            heads[method, made] = f"{arguments.model}-{method}"
        else:
            target = found.path if found.kind != "gguf" else converted(found.path, "float32", cache_root(None))
            heads[method, made] = str(tiny_head(method, target, folder / method))
    return heads


if __name__ == "__main__":
    sys.exit(main())
