"""What a head's drafts cost, as shares of a plain decode step: the first pass, every further token, trees.

After each step of an engine the same proposal is asked for again with 0, 1, … k draft tokens, and with each tree, in
turn with plain decode steps of another engine of the same target: asking twice writes the same K/V twice. Medians of
the calling thread's CPU time are compared, which a busy machine disturbs less than wall time; both are reported.

    python benchmarks/draft_step.py
    python benchmarks/draft_step.py --head /path/to/head --method eagle --tree 4,5,16
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from attrs import evolve
from common import add_common, read_conversations, write_result

Clocks = tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--head", default="demo:smollm2-eagle3")
    parser.add_argument("--k", type=int, default=4, help="draft tokens of the chain (default: %(default)s)")
    parser.add_argument(
        "--tree",
        action="append",
        metavar="TOP_K,DEPTH,NODES",
        help="a dynamic tree; 2,4,8 and 4,5,16 when not given",
    )
    parser.add_argument("--steps", type=int, default=60, help="decode steps measured (default: %(default)s)")
    parser.add_argument("--prompt-set", default="spec_bench")
    arguments = parser.parse_args()
    trees = arguments.tree or ["2,4,8", "4,5,16"]
    times = measure(arguments, trees)
    rows = report(times, arguments.k)
    for row in rows:
        print(f"{row['part']:28} {row['cpu_ms']:7.2f} ms CPU {row['wall_ms']:7.2f} ms wall {row['share']:7.1%}")
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "tree")} | {"trees": trees}
    write_result("draft_step", {"settings": settings, "parts": rows}, arguments.out)
    return 0


def measure(arguments: argparse.Namespace, trees: list[str]) -> dict[str, list[Clocks]]:
    """(CPU, wall) seconds of every call, by what was called."""
    speculative = {"method": arguments.method, "model": arguments.head, "speculation": "always"}
    plain = Engine(arguments, None)
    chain = Engine(arguments, speculative | {"num_speculative_tokens": arguments.k})
    shaped = {}
    for tree in trees:
        top_k, depth, nodes = map(int, tree.split(","))
        options = {"tree_top_k": top_k, "tree_depth": depth, "num_speculative_tokens": nodes}
        shaped[f"tree {tree}"] = Engine(arguments, speculative | options)
    times: dict[str, list[Clocks]] = defaultdict(list)
    warm_up = 5
    for turn in range(arguments.steps + warm_up):
        found = {"plain step": clocked(plain.step)}
        chain.step()
        found |= {f"chain {limit}": clocked(chain.proposal(limit)) for limit in range(arguments.k + 1)}
        for name, engine in shaped.items():
            engine.step()
            found[name] = clocked(engine.proposal(None))
        if turn >= warm_up:
            for name, clocks in found.items():
                times[name].append(clocks)
    return times


class Engine:
    """Decodes one request after another; its last proposal can be asked for again."""

    def __init__(self, arguments: argparse.Namespace, speculative: dict[str, Any] | None) -> None:
        from specdec.config import from_kwargs
        from specdec.engine.frontend import Frontend

        settings = {"max_num_seqs": 1, "max_model_len": 2048, "kv_cache_memory": "128MiB", "stat_loggers": []}
        settings |= {"dtype": arguments.dtype, "num_threads": arguments.threads, "speculative_config": speculative}
        self._frontend = Frontend(from_kwargs(arguments.model, **settings))
        self._conversations = read_conversations(arguments.prompt_set, 40, spread=True)
        drafting = self._frontend.core._drafting
        if drafting is not None:
            self._proposer = drafting.proposer
            self._propose = self._proposer.propose
            self._proposer.propose = self._remember

    def _remember(self, batch: Any) -> Any:
        self._last = batch
        return self._propose(batch)

    def step(self) -> None:
        """A decode step; a new request is brought to decoding first when none runs."""
        while not self._decoding():
            self._frontend.step()
        self._frontend.step()

    def _decoding(self) -> bool:
        from specdec.sampling.params import SamplingParams

        groups = self._frontend.groups
        if not groups:
            prompt = self._frontend.tokenizer.apply_chat_template(
                self._conversations.pop(0), add_generation_prompt=True, return_dict=False
            )
            params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
            self._frontend.submit(self._frontend.prepare({"prompt_token_ids": list(prompt)}, params, None))
        # Far enough from the end that drafts are whole.
        request = next(iter(groups.values())).requests[0]
        if request.num_output_tokens > 150:
            self._frontend.abort(next(iter(groups)))
            return self._decoding()
        return bool(request.num_output_tokens)

    def proposal(self, limit: int | None) -> Callable[[], Any]:
        """The last step's proposal, with another limit of draft tokens."""
        batch = self._last
        if limit is not None:
            batch = evolve(batch, max_draft_tokens=batch.max_draft_tokens * 0 + limit)
        return lambda: self._propose(batch)


def clocked(call: Callable[[], Any]) -> Clocks:
    cpu, wall = time.thread_time(), time.perf_counter()
    call()
    return time.thread_time() - cpu, time.perf_counter() - wall


def report(times: dict[str, list[Clocks]], k: int) -> list[dict[str, Any]]:
    """Medians, and as a share of a plain step; a further token is the median of the differences within a turn."""
    whole = median(cpu for cpu, _ in times["plain step"])

    def row(part: str, clocks: list[Clocks]) -> dict[str, Any]:
        cpu, wall = (1000 * median(clock[i] for clock in clocks) for i in range(2))
        return {"part": part, "cpu_ms": cpu, "wall_ms": wall, "share": cpu / whole / 1000}

    def added(more: str, less: str, count: int) -> list[Clocks]:
        return [((a - c) / count, (b - d) / count) for (a, b), (c, d) in zip(times[more], times[less], strict=True)]

    rows = [row("plain step", times["plain step"]), row("first pass, no token", times["chain 0"])]
    rows.append(row("first token", added("chain 1", "chain 0", 1)))
    rows.append(row("each further token", added(f"chain {k}", "chain 1", k - 1)))
    rows += [row(f"chain of {limit}, whole", times[f"chain {limit}"]) for limit in range(1, k + 1)]
    return rows + [row(f"{name}, whole", clocks) for name, clocks in times.items() if name.startswith("tree")]


if __name__ == "__main__":
    sys.exit(main())
