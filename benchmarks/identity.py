"""Do drafts change a token? Every kind of head, chains and trees, against plain decoding in float32: texts must be
equal, at temperature 0 and, with the same seeds, at temperature 1.

The heads are those that come with the demonstration. It has no MLP speculator: that is made here, by least squares from
hidden states of the very texts, so that a good part of its drafts is accepted.

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
MADE = {"eagle": "trained", "eagle3": "trained", "medusa": "trained", "mlp_speculator": "least squares"}
STEPS = 3
"""Steps of the MLP speculator."""


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
        (method, made)
        for method in arguments.head or SHAPES
        for made in (MADE[method], "random")[: 1 + arguments.random]
    ]
    done = {(cell["head"], cell["made"], cell["shape"]) for cell in cells}
    left = {which: [shape for shape in SHAPES[which[0]] if (*which, shape) not in done] for which in wanted}
    left = {which: shapes for which, shapes in left.items() if shapes}
    if left:
        prompts, plain, _ = decode(arguments, conversations, temperatures, None)
        with tempfile.TemporaryDirectory() as folder:
            heads = make_heads(arguments, list(left), Path(folder), prompts, plain[0])
            for (method, made), shapes in left.items():
                for shape in shapes:
                    speculative = {"method": method, "model": heads[method, made], "speculation": "always"}
                    _, texts, stats = decode(
                        arguments, conversations, temperatures, speculative | SHAPES[method][shape]
                    )
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
) -> tuple[Texts, list[Texts], list[dict[str, Any]]]:
    """Token ids of the prompts and of the answers at each temperature, and what was drafted and accepted."""
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
    return [list(output.prompt_token_ids) for output in outputs], texts, counts


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
    arguments: argparse.Namespace, wanted: list[tuple[str, str]], folder: Path, prompts: Texts, answers: Texts
) -> dict[tuple[str, str], str]:
    """Directories of the heads, by method and how they are made."""
    from specdec.testing.heads import tiny_head

    heads = {which: f"{arguments.model}-{which[0]}" for which in wanted if which[1] == "trained"}
    if len(heads) == len(wanted):
        return heads
    model, states, tokens = hidden_states(arguments, prompts, answers)
    model.config.save_pretrained(folder / "target")
    for method, made in wanted:
        path = folder / f"{method}-{made}"
        if made == "least squares":
            heads[method, made] = str(fitted_mlp_speculator(model, states, tokens, path))
        elif made == "random":
            heads[method, made] = str(tiny_head(method, folder / "target", path))
    return heads


def hidden_states(arguments: argparse.Namespace, prompts: Texts, answers: Texts) -> tuple[Any, list[Any], list[Any]]:
    """The target in float32; of each text, its final hidden states [T, H] and its tokens, int64 [T]."""
    import torch

    from specdec.target.cache import cache_root
    from specdec.target.gguf import converted
    from specdec.target.loading import load_config, load_model
    from specdec.target.resolve import resolve_model

    found = resolve_model(arguments.model, None)
    path = found.path if found.kind != "gguf" else converted(found.path, "float32", cache_root(None))
    config = load_config(arguments.model, path, trust_remote_code=False)
    cpu = torch.device("cpu")
    model = load_model(arguments.model, path, config, dtype="float32", device=cpu, trust_remote_code=False)
    states, tokens = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([*prompt[-256:], *answer])
        with torch.inference_mode():
            states.append(model.model(text[None]).last_hidden_state[0])
        tokens.append(text)
    return model, states, tokens


def least_squares(inputs: Any, outputs: Any) -> Any:
    """[out, in]: the linear that maps inputs [N, in] to outputs [N, out] best, slightly damped."""
    import torch

    gram = inputs.T @ inputs
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(gram.shape[0])
    return torch.linalg.solve(gram, inputs.T @ outputs).T.contiguous()


def pairs(model: Any, states: list[Any], tokens: list[Any]) -> tuple[Any, Any, Any]:
    """Of all rows i of all texts: E(x_{i+1}), f_i and f_{i+1}, [N, H] each."""
    import torch

    table = model.get_input_embeddings().weight.detach()
    embedded = torch.cat([table[text[1:]] for text in tokens])
    return embedded, torch.cat([f[:-1] for f in states]), torch.cat([f[1:] for f in states])


def fitted_mlp_speculator(model: Any, states: list[Any], tokens: list[Any], folder: Path) -> Path:
    """Linear in spite of its activation: of a state z it keeps gelu(z) and gelu(-z), whose difference is z."""
    import torch

    from specdec.testing.heads import write_head

    width, inner = model.config.hidden_size, 2 * model.config.hidden_size
    output, table = (part.weight.detach() for part in (model.get_output_embeddings(), model.get_input_embeddings()))
    state_factor = 0.5 ** (0.5 / STEPS)
    token_factor = ((1 - state_factor**2) * inner / 2) ** 0.5
    both = torch.cat([torch.eye(width), -torch.eye(width)])
    embedded, before, after = pairs(model, states, tokens)
    predict = least_squares(torch.cat([embedded, before], dim=1), after)
    from_token, from_state = predict.split(width, dim=1)
    size = after.square().mean().sqrt()  # states leave the norm with a root mean square of 1
    tensors = {
        "emb.0.weight": table @ from_token.T @ both.T / token_factor,
        "proj.0.weight": both @ from_state / state_factor,
        "proj.1.weight": size * both @ from_state @ both.T / state_factor,
        "head.0.weight": output @ both.T,
        "ln.0.weight": torch.ones(inner),
        "ln.0.bias": torch.zeros(inner),
    }
    config = {"model_type": "mlp_speculator", "emb_dim": width, "inner_dim": inner, "n_predict": STEPS}
    return write_head(folder, config | {"vocab_size": len(table), "tie_weights": True}, tensors)


if __name__ == "__main__":
    sys.exit(main())
