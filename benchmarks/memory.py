"""Resident memory of a process that decodes, against the model's weights and the KV cache.

    python benchmarks/memory.py

Runs one engine in a fresh process, generates for a batch of prompts, and reports what is resident beyond weights and KV
cache: Python, the libraries and their buffers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from common import PeerProcess, add_common, read_conversations, write_result

KV_CACHE = 64 * 2**20
"""Small, so that memory reserved for the cache but never touched cannot hide anything."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--limit-mb", type=float, default=400.0, help="what may be resident beyond weights and cache")
    arguments = parser.parse_args()
    peer = PeerProcess("specdec", "specdec_peer.py", sys.executable)
    facts = peer.ask(
        "load",
        model=arguments.model,
        dtype=arguments.dtype,
        max_model_len=1024,
        threads=arguments.threads,
        concurrency=arguments.num_prompts,
        engine={"kv_cache_memory": KV_CACHE},
    )
    loaded = peer.ask("memory")
    prompts = peer.ask("tokenise", conversations=read_conversations("mt_bench", arguments.num_prompts))["prompts"]
    work = {"max_tokens": arguments.max_tokens, "temperature": 0.0, "ignore_eos": True}
    peer.ask("generate", prompts=prompts, **work)
    used = peer.ask("memory")
    peer.close()
    weights = weight_bytes(Path(facts["checkpoint"]))
    beyond = used["resident_bytes"] - weights - KV_CACHE
    megabytes = {
        "weights": weights,
        "KV cache": KV_CACHE,
        "resident": used["resident_bytes"],
        "resident after loading": loaded["resident_bytes"],
        "peak": used["peak_bytes"],
        "beyond weights and cache": beyond,
    }
    print(", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in megabytes.items()))
    result = {
        "settings": {"model": arguments.model, "dtype": arguments.dtype, "max_tokens": arguments.max_tokens},
        "versions": facts["versions"],
        "weight_bytes": weights,
        "kv_cache_bytes": KV_CACHE,
        "after_loading": loaded,
        "after_generating": used,
        "beyond_bytes": beyond,
    }
    write_result("memory", result, arguments.out)
    return 0 if beyond <= arguments.limit_mb * 1e6 else 1


def weight_bytes(checkpoint: Path) -> int:
    """Bytes of the tensors in a checkpoint's safetensors files, tied ones once."""
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        spans = (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        total += sum(end - begin for begin, end in spans)
    return total


if __name__ == "__main__":
    sys.exit(main())
