"""The Triton attention backend on a GPU: correctness against the reference, and times beside torch's own attention.

    python benchmarks/gpu_attention.py

Cases are decode (one token), a verify step of a chain of 4 draft tokens and of a tree of 16, at contexts of 1k to 32k
tokens, for 1 and 16 requests: 32 query heads over 8 K/V heads of width 128, bfloat16, blocks of 16. In microseconds:

    triton   specdec-attention-triton over the paged cache, K/V writes included
    sdpa     the core's built-in backend over the same cache (gathers K/V, then torch's SDPA)
    dense    torch's SDPA alone over K/V already contiguous and padded: no paging, no writes
    flex     torch.compile(FlexAttention) over the same contiguous K/V

GB/s is K/V read once for all tokens of a request, divided by the first column. It takes under five minutes.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from common import write_result
from gpu_common import device_or_exit, gpu, microseconds, parse, show

CHAIN, TREE = 4, 16
HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16


def main() -> int:
    arguments = parse(__doc__)
    device = device_or_exit(arguments)
    begin = time.monotonic()
    checks = check(device, arguments.dry_run)
    show("correctness (largest error against float64)", ("case", "error", "limit"), checks)
    wrong = [name for name, error, limit in checks if not float(error) <= float(limit)]
    if wrong:
        print(f"\nWRONG: {', '.join(wrong)}", file=sys.stderr)
    contexts = (1024, 4096, 16_384, 32_768) if not arguments.dry_run else (40,)
    rows = []
    for kind in ("decode", "chain", "tree"):
        for requests in (1, 16) if not arguments.dry_run else (2,):
            for context in contexts:
                left = arguments.seconds - (time.monotonic() - begin)
                if left <= 0:
                    print(f"out of time: {kind}, {requests} requests, {context} tokens and what follows are left out")
                    break
                flex = context in (contexts[0], contexts[-1]) and left > 60 and not arguments.dry_run
                rows.append(measure(kind, requests, context, device, flex))
    header = ("step", "requests", "context", "triton", "sdpa", "dense", "flex", "GB/s")
    show("time of one layer, microseconds", header, rows)
    result = {"settings": gpu(), "wrong": wrong, "checks": checks, "columns": header, "rows": rows}
    result["seconds"] = time.monotonic() - begin
    write_result("gpu_attention", result, arguments.out)
    return 1 if wrong else 0


def tree_parents(nodes: int) -> list[int]:
    """The anchor and a tree of ``nodes`` below it, two children to a node."""
    return [-1, *((node - 1) // 2 for node in range(1, nodes + 1))]


def check(device: str, dry: bool) -> list[tuple[str, float, float]]:
    """Every kind of layer and batch against the reference, one token and one head at a time."""
    import torch

    from specdec.testing.attention import attention_case, attention_layer
    from specdec.testing.reference import attention_reference
    from specdec_attention_triton.backend import TritonBackend

    trees = [tree_parents(12), [-1], list(range(-1, 4)), tree_parents(69)]
    lengths = [(70, 13), (33, 1), (0, 5), (129, 70)]
    layers: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"sliding_window": 24},
        "chunk": {"chunk_size": 32},
        "soft cap": {"softcap": 20.0},
        "sinks": {"sinks": True},
        "width 64": {"head_dim": 64, "num_heads": 8, "num_kv_heads": 2},
        "width 96": {"head_dim": 96},
        "width 128": {"head_dim": 128, "num_heads": 8, "num_kv_heads": 1},
        "width 192/128": {"head_dim": 192, "v_head_dim": 128},
        "width 256": {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1},
    }
    found = []
    for dtype, limit in ((torch.bfloat16, 3e-2), (torch.float16, 5e-3), (torch.float32, 2e-5)):
        for name, fields in list(layers.items())[: 1 if dry else None]:
            for part in (64, 1024):
                size = slice(0, 3) if part == 64 else slice(None)
                case = attention_case(
                    lengths[size],
                    attention_layer(**fields),
                    block_size=BLOCK,
                    parents=trees[size],
                    dtype=dtype,
                    device=device,
                )
                backend = TritonBackend(part=part)
                plan = backend.plan(case.batch, case.cache)
                got = backend.attend(case.query, case.key, case.value, case.layer, plan, case.sinks)
                kv = case.cache.layers[0]
                want = attention_reference(case.batch, kv, BLOCK, case.query, case.layer, case.sinks)
                error = (got.double().cpu() - want.cpu()).abs().max().item()
                found.append((f"{name}, {str(dtype)[6:]}, parts of {part}", error, limit))
    return found


def measure(kind: str, requests: int, context: int, device: str, flex: bool) -> tuple[Any, ...]:
    """One row of the table."""
    import torch
    import torch.nn.functional as F

    from specdec.attention import KVCache, LayerKV
    from specdec.attention.sdpa import SdpaBackend
    from specdec.testing.attention import attention_layer, packed_batch
    from specdec_attention_triton.backend import TritonBackend

    parents = {"decode": [-1], "chain": list(range(-1, CHAIN)), "tree": tree_parents(TREE)}[kind]
    queries = len(parents)
    heads, kv_heads, width = (HEADS, KV_HEADS, WIDTH) if device != "cpu" else (4, 2, 16)
    layer = attention_layer(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    batch, num_blocks = packed_batch(
        [(context - queries, queries)] * requests,
        block_size=BLOCK,
        generator=torch.Generator().manual_seed(0),
        parents=[parents] * requests if kind == "tree" else None,
        device=device,
    )

    def random(count: int, num_heads: int) -> torch.Tensor:
        return torch.randn(count, num_heads, width, device=device, dtype=dtype)

    slots = num_blocks * BLOCK
    cache = KVCache((LayerKV(random(slots, kv_heads), random(slots, kv_heads)),), num_blocks, BLOCK)
    new = [random(requests * queries, count) for count in (heads, kv_heads, kv_heads)]
    times = []
    for backend in (TritonBackend(), SdpaBackend()):
        plan = backend.plan(batch, cache)
        times.append(microseconds(lambda b=backend, p=plan: b.attend(*new, layer, p), device))
    shape = (requests, kv_heads, context, width)
    key = torch.randn(shape, device=device, dtype=dtype)
    value = torch.randn_like(key)
    query = new[0].view(requests, queries, heads, width).transpose(1, 2).contiguous()
    seen = torch.ones(queries, context, dtype=torch.bool, device=device)
    seen[:, context - queries :] = ancestors(parents).to(device)
    mask = None if kind == "decode" else seen

    def dense() -> Any:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    times.append(microseconds(dense, device))
    times.append(flex_time(query, key, value, seen, device) if flex else None)
    bandwidth = 2 * key.numel() * key.element_size() / times[0] / 1e3
    return (kind, requests, context, *times, bandwidth)


def ancestors(parents: list[int]) -> Any:
    """bool [n, n]: whether column j is row i or above it."""
    import torch

    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def flex_time(query: Any, key: Any, value: Any, seen: Any, device: str) -> float | None:
    """FlexAttention with the same mask; None when it does not compile."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
        return seen[row, column]

    try:
        block_mask = create_block_mask(visible, None, None, seen.shape[0], seen.shape[1], device=device)
        compiled = torch.compile(flex_attention, dynamic=False)
        compiled(query, key, value, block_mask=block_mask, enable_gqa=True)
    except Exception as error:
        print(f"FlexAttention: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None
    return microseconds(lambda: compiled(query, key, value, block_mask=block_mask, enable_gqa=True), device)


if __name__ == "__main__":
    sys.exit(main())
