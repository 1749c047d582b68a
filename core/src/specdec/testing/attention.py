"""Packed batches over a shuffled paged cache, to run attention backends on without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from specdec.attention.interface import KVCache, LayerKV
from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

STALE = 1000.0
"""Fills slots that nobody wrote: an attention that reads one is far off."""


def attention_layer(**overrides: Any) -> AttentionLayer:
    """A small `AttentionLayer`: 4 query heads over 2 K/V heads of width 16."""
    fields: dict[str, Any] = {"index": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16} | overrides
    fields.setdefault("v_head_dim", fields["head_dim"])
    fields.setdefault("scaling", fields["head_dim"] ** -0.5)
    return AttentionLayer(**fields)


def attention_requirements(
    layers: Sequence[AttentionLayer],
    *,
    block_size: int,
    dtype: str = "float32",
    device: str = "cpu",
    trees: bool = False,
) -> AttentionRequirements:
    """The requirements that a backend is asked about."""
    return AttentionRequirements(layers=tuple(layers), dtype=dtype, device=device, block_size=block_size, trees=trees)


@frozen(eq=False, kw_only=True)
class AttentionCase:
    """A batch, the cache it runs over, and the queries, keys and values of one layer."""

    batch: PackedBatch
    cache: KVCache
    layer: AttentionLayer
    query: torch.Tensor
    """[T, num_heads, head_dim]."""
    key: torch.Tensor
    """[T, num_kv_heads, head_dim]."""
    value: torch.Tensor
    """[T, num_kv_heads, v_head_dim]."""
    sinks: torch.Tensor | None = None
    """[num_heads]."""


def packed_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    block_size: int,
    generator: torch.Generator,
    parents: Sequence[Sequence[int]] | None = None,
    num_cached_nodes: int = 0,
    device: str = "cpu",
) -> tuple[PackedBatch, int]:
    """Requests whose blocks lie anywhere in the cache, in any order.

    Args:
        lengths: for each request, how many tokens are cached and how many the batch adds (at least 1).
        block_size: slots per block.
        generator: decides where the blocks lie.
        parents: for each request, the parent of each of its tokens in this batch, -1 for the first; None for chains.
        num_cached_nodes: how many of a request's nodes, the first in ``parents``, earlier batches have run: they are
            the last of its cached tokens.
        device: where the tensors go.

    Returns:
        The batch and the number of blocks of a cache for it, of which some are nobody's.
    """
    totals = [cached + added for cached, added in lengths]
    needed = [-(-total // block_size) for total in totals]
    num_blocks = sum(needed) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    slots, positions = [], []
    for request, (cached, added) in enumerate(lengths):
        blocks = [shuffled.pop() for _ in range(needed[request])]
        tables[request, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        places = range(cached, cached + added)
        slots += [blocks[place // block_size] * block_size + place % block_size for place in places]
        if parents is None:
            positions += list(places)
        else:
            depths = _depths(parents[request])[num_cached_nodes:]
            positions += [cached - num_cached_nodes + depth for depth in depths]
    added_tokens = torch.tensor([added for _, added in lengths])
    num_tokens = len(slots)

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = PackedBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_start_loc=torch.cat([torch.zeros(1, dtype=torch.int64), added_tokens.cumsum(0)]).int().to(device),
        seq_lens=torch.tensor(totals, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_indices=torch.arange(num_tokens, device=device),
        max_query_len=max(added for _, added in lengths),
        max_seq_len=max(totals),
        parents=None if parents is None else integers([p for row in parents for p in row[num_cached_nodes:]]),
        cached_parents=integers([row[:num_cached_nodes] for row in parents or ()]) if num_cached_nodes else None,
    )
    return batch, num_blocks


def attention_case(
    lengths: Sequence[tuple[int, int]],
    layer: AttentionLayer,
    *,
    block_size: int = 4,
    parents: Sequence[Sequence[int]] | None = None,
    num_cached_nodes: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    num_layers: int = 1,
) -> AttentionCase:
    """Random queries, keys and values for `packed_batch`, with random K/V in the slots cached before.

    Slots that nobody wrote hold `STALE`.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, num_blocks = packed_batch(
        lengths,
        block_size=block_size,
        generator=generator,
        parents=parents,
        num_cached_nodes=num_cached_nodes,
        device=device,
    )

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    num_slots, heads = num_blocks * block_size, layer.num_kv_heads
    cached = cached_slots(batch, block_size)
    layers = []
    for _ in range(num_layers):
        keys = torch.full((num_slots, heads, layer.head_dim), STALE, device=device, dtype=dtype)
        values = torch.full((num_slots, heads, layer.v_head_dim), STALE, device=device, dtype=dtype)
        keys[cached] = noise(len(cached), heads, layer.head_dim)
        values[cached] = noise(len(cached), heads, layer.v_head_dim)
        layers.append(LayerKV(keys, values))
    num_tokens = len(batch.positions)
    return AttentionCase(
        batch=batch,
        cache=KVCache(tuple(layers), num_blocks, block_size),
        layer=layer,
        query=noise(num_tokens, layer.num_heads, layer.head_dim),
        key=noise(num_tokens, heads, layer.head_dim),
        value=noise(num_tokens, heads, layer.v_head_dim),
        sinks=noise(layer.num_heads) if layer.sinks else None,
    )


def cached_slots(batch: PackedBatch, block_size: int) -> list[int]:
    """The slots of what the requests of a batch had cached before it."""
    starts = batch.query_start_loc.tolist()
    slots = []
    for request, length in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_tables[request].tolist()
        places = range(length - (starts[request + 1] - starts[request]))
        slots += [blocks[place // block_size] * block_size + place % block_size for place in places]
    return slots


def only_request(case: AttentionCase, request: int) -> AttentionCase:
    """The same case with one of its requests alone, over a cache of its own."""
    batch = case.batch
    start, end = batch.query_start_loc[request : request + 2].tolist()
    alone = evolve(
        batch,
        input_ids=batch.input_ids[start:end],
        positions=batch.positions[start:end],
        slot_mapping=batch.slot_mapping[start:end],
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=batch.positions.device),
        seq_lens=batch.seq_lens[request : request + 1],
        block_tables=batch.block_tables[request : request + 1],
        logits_indices=torch.arange(end - start, device=batch.positions.device),
        max_query_len=end - start,
        max_seq_len=int(batch.seq_lens[request]),
        parents=None if batch.parents is None else batch.parents[start:end],
        cached_parents=None if batch.cached_parents is None else batch.cached_parents[request : request + 1],
    )
    return evolve(
        case,
        batch=alone,
        cache=copy_cache(case.cache),
        query=case.query[start:end],
        key=case.key[start:end],
        value=case.value[start:end],
    )


def copy_cache(cache: KVCache) -> KVCache:
    """A cache with the same content in memory of its own."""
    layers = tuple(LayerKV(layer.keys.clone(), layer.values.clone()) for layer in cache.layers)
    return KVCache(layers, cache.num_blocks, cache.block_size)


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
