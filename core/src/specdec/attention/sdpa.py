"""The built-in attention backend, over torch's scaled dot-product attention; works on every device torch has.

New K/V are written to their slots, then the requests of a step are served in groups: requests with few queries of about
the same count and context length share one padded call, longer prefill chunks get a call of their own. What depends on
the step alone (which slots a group reads, who sees whom) is computed once per step and kind of layer::

    group of two requests, 2 and 3 queries, contexts of 5 and 7 tokens; columns are positions, x may be seen

    request 0, query 0   x x x x . | . .        the last two columns repeat request 0's last slot and are masked:
               query 1   x x x x x | . .        a request never reads what another one left in a slot
               (pad)     x x x x x | . .        a padded query repeats the last one; its result is dropped
    request 1, query 0   x x x x x . .
               query 1   x x x x x x .
               query 2   x x x x x x x

A layer with a window or chunks starts its columns at the first position its first query sees.
Soft caps and attention sinks take an explicit float32 path.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import define, field, frozen

from specdec.attention.dense import dense_attention, visible
from specdec.attention.interface import AttentionBackend, KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch

MAX_SHARED_QUERIES = 64
"""Requests with more queries than this get a call of their own."""

MAX_SCORES = 1 << 25
"""Queries of one call are split so that queries x heads x keys stays below this; bounds the memory of scores."""


HOST_READS_ARE_FREE = frozenset({"cpu"})
"""Device types whose tensors the host reads without waiting."""


@define(eq=False)
class _Columns:
    """Which slots a group reads for one kind of layer, and who sees whom."""

    slots: Tensor | slice
    """int64 [n * L]; a slice when the one request's blocks lie in a row."""
    num_keys: int
    """L."""
    allowed: Tensor | None
    """bool [n, Q, L]; None when every query sees every column."""
    _masks: dict[tuple[int, torch.dtype], Tensor] = field(init=False, factory=dict)

    def mask(self, shared: int, dtype: torch.dtype) -> Tensor | None:
        """The additive mask [n, 1, shared * Q, L] for ``shared`` query heads to a K/V head; made once."""
        if self.allowed is None:
            return None
        if (shared, dtype) not in self._masks:
            self._masks[shared, dtype] = _additive(self.allowed, shared, dtype)
        return self._masks[shared, dtype]


class SdpaBackend(AttentionBackend):
    """Attention through `torch.nn.functional.scaled_dot_product_attention` over gathered K/V."""

    name = "sdpa"
    priority = 0

    def supports(self, requirements: AttentionRequirements) -> list[str]:
        """Serves every layer whose query heads divide evenly over its K/V heads."""
        return [
            f"layer {layer.index} has {layer.num_heads} query heads for {layer.num_kv_heads} K/V heads"
            for layer in requirements.layers
            if layer.num_heads % layer.num_kv_heads
        ]

    def plan(self, batch: PackedBatch, cache: KVCache) -> StepPlan:
        """Group the requests of the step."""
        return StepPlan(batch, cache)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: AttentionLayer,
        plan: StepPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        kv = plan.cache.layers[layer.index]
        dtype = kv.keys.dtype
        key, value = key.to(dtype), value.to(dtype)
        kv.keys.index_copy_(0, plan.slot_mapping, key)
        kv.values.index_copy_(0, plan.slot_mapping, value)
        queries = query.to(dtype)
        if plan.single is not None:
            return plan.single.attend(queries, key, value, layer, plan.cache, sinks).to(query.dtype)
        out = query.new_empty(query.shape[0], layer.num_heads, layer.v_head_dim)
        for group in plan.groups:
            group.store(out, group.attend(queries, key, value, layer, plan.cache, sinks))
        return out


class StepPlan:
    """The groups of one step."""

    def __init__(self, batch: PackedBatch, cache: KVCache) -> None:
        self.cache = cache
        self.slot_mapping = batch.slot_mapping
        self.groups = [_Group(batch, cache.block_size, requests) for requests in _grouped(batch)]
        whole = len(self.groups) == 1 and self.groups[0].covers(batch.input_ids.shape[0])
        self.single = self.groups[0] if whole else None


@frozen
class _Requests:
    """Requests that share a call, in batch order, with what the host knows of their lengths."""

    indices: Sequence[int]
    query_len: int
    """The most queries of one request."""
    kv_len: int
    """The longest context."""
    even: bool
    """All have ``query_len`` queries, contexts of ``kv_len``, and are neighbours in the batch."""
    first_token: int | None = None
    """Packed index of the first query, when the group's tokens are one run without padding."""
    fresh: bool = False
    """Nothing of these requests was cached before this step."""


def _grouped(batch: PackedBatch) -> list[_Requests]:
    """Split the batch: by number of queries (powers of two) and by context length (within a factor of 2)."""
    count = batch.seq_lens.shape[0]
    if batch.input_ids.device.type not in HOST_READS_ARE_FREE and batch.max_query_len <= MAX_SHARED_QUERIES:
        # One padded group: reading the lengths would make the host wait for the device.
        even = count == 1
        return [_Requests(range(count), batch.max_query_len, batch.max_seq_len, even, 0 if even else None)]
    starts, contexts = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    queries = [end - begin for begin, end in itertools.pairwise(starts)]
    groups: list[list[int]] = []
    shared: dict[int, list[int]] = {}
    for request, length in enumerate(queries):
        if length > MAX_SHARED_QUERIES:
            groups.append([request])
        else:
            shared.setdefault((length - 1).bit_length(), []).append(request)
    for members in shared.values():
        groups += _split_by_context(members, contexts)
    return [_describe(sorted(members), starts, queries, contexts) for members in groups]


def _split_by_context(members: list[int], contexts: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    longest = 0
    for request in sorted(members, key=lambda r: contexts[r], reverse=True):
        if not groups or 2 * contexts[request] + 256 < longest:
            groups.append([])
            longest = contexts[request]
        groups[-1].append(request)
    return groups


def _describe(members: list[int], starts: list[int], queries: list[int], contexts: list[int]) -> _Requests:
    query_len, kv_len = max(queries[r] for r in members), max(contexts[r] for r in members)
    run = members[-1] - members[0] + 1 == len(members) and all(queries[r] == query_len for r in members)
    even = run and all(contexts[r] == kv_len for r in members)
    fresh = len(members) == 1 and query_len == kv_len
    return _Requests(members, query_len, kv_len, even, starts[members[0]] if run else None, fresh)


class _Group:
    """Attention for the queries of a few requests, padded to Q queries and L keys each."""

    def __init__(self, batch: PackedBatch, block_size: int, requests: _Requests) -> None:
        self._requests = requests
        self._count = len(requests.indices)
        self._block_size = block_size
        self._columns: dict[tuple[int | None, int | None], _Columns] = {}
        device = batch.input_ids.device
        chosen = torch.tensor(requests.indices, device=device)
        self._tables = batch.block_tables[chosen]
        self._kv_lens = batch.seq_lens[chosen].long()
        starts = batch.query_start_loc[chosen].long()
        self._query_lens = batch.query_start_loc[chosen + 1].long() - starts
        steps = torch.arange(requests.query_len, device=device)
        self._own = torch.minimum(steps, (self._query_lens - 1)[:, None])  # [n, Q]; padding repeats the last query
        rows = starts[:, None] + self._own
        self._positions = batch.positions[rows]
        self._parents = None if batch.parents is None else batch.parents[rows].long()
        self._num_nodes = 0
        if batch.cached_parents is not None and self._parents is not None:
            self._num_nodes = batch.cached_parents.shape[1]
            self._parents = torch.cat([batch.cached_parents[chosen].long(), self._parents], dim=1)
        self._is_run = requests.first_token is not None
        if not self._is_run:
            self._rows = rows.flatten()
            real = (steps < self._query_lens[:, None]).flatten()
            # Padded results go where the result they repeat goes, so that no index list of uneven size is needed.
            self._real = real.nonzero().flatten() if device.type in HOST_READS_ARE_FREE else None

    def covers(self, num_tokens: int) -> bool:
        """Whether the group is the whole batch in order."""
        return self._is_run and self._count * self._requests.query_len == num_tokens

    def store(self, out: Tensor, result: Tensor) -> None:
        """Write the group's result [n * Q, heads, v_head_dim] to its tokens of ``out`` [T, heads, v_head_dim]."""
        if self._requests.first_token is not None:
            out[self._requests.first_token : self._requests.first_token + result.shape[0]] = result
        elif self._real is not None:
            out.index_copy_(0, self._rows[self._real], result[self._real].to(out.dtype))
        else:
            out[self._rows] = result.to(out.dtype)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer, cache: KVCache, sinks: Tensor | None
    ) -> Tensor:
        """Packed query, key, value of the step -> [n * Q, num_heads, v_head_dim]."""
        first, size = self._requests.first_token, self._count * self._requests.query_len
        queries = query[first : first + size] if first is not None else query.index_select(0, self._rows)
        queries = queries.view(self._count, -1, *queries.shape[1:])
        explicit = layer.softcap is not None or sinks is not None
        if first is not None and not explicit and self._is_plain_prefill(layer):
            return _causal(queries, key[None, first : first + size], value[None, first : first + size], layer.scaling)
        columns = self._columns_of(layer.sliding_window, layer.chunk_size)
        keys, values = self._gather(cache, layer.index, columns)
        rows = max(1, MAX_SCORES // (self._count * layer.num_heads * columns.num_keys))
        if not explicit and rows >= queries.shape[1]:
            mask = columns.mask(layer.num_heads // layer.num_kv_heads, queries.dtype)
            return _masked(queries, keys, values, mask, layer.scaling).flatten(0, 1)
        attend = _explicit if explicit else _masked_part
        results = []
        for begin in range(0, queries.shape[1], rows):
            allowed = None if columns.allowed is None else columns.allowed[:, begin : begin + rows]
            results.append(attend(queries[:, begin : begin + rows], keys, values, allowed, layer, sinks))
        return (results[0] if len(results) == 1 else torch.cat(results, dim=1)).flatten(0, 1)

    def _is_plain_prefill(self, layer: AttentionLayer) -> bool:
        """Whether the group is one whole prompt whose tokens all see all earlier ones."""
        length = self._requests.kv_len
        return (
            self._requests.fresh
            and self._parents is None
            and (layer.sliding_window is None or layer.sliding_window >= length)
            and (layer.chunk_size is None or layer.chunk_size >= length)
        )

    def _gather(self, cache: KVCache, layer_index: int, columns: _Columns) -> tuple[Tensor, Tensor]:
        """[n, L, num_kv_heads, head_dim] and [n, L, num_kv_heads, v_head_dim]."""
        kv, slots = cache.layers[layer_index], columns.slots
        if isinstance(slots, slice):
            return kv.keys[slots].unsqueeze(0), kv.values[slots].unsqueeze(0)
        keys, values = kv.keys.index_select(0, slots), kv.values.index_select(0, slots)
        shape = (self._count, columns.num_keys)
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    def _columns_of(self, window: int | None, chunk: int | None) -> _Columns:
        columns = self._columns.get((window, chunk))
        if columns is None:
            columns = self._columns[window, chunk] = self._make_columns(window, chunk)
        return columns

    def _make_columns(self, window: int | None, chunk: int | None) -> _Columns:
        query_len, kv_len = self._requests.query_len, self._requests.kv_len
        begin = torch.zeros_like(self._kv_lens)
        num_keys = kv_len
        first = self._positions.amin(dim=1)
        for size, first_seen in ((window, first + 1 - (window or 0)), (chunk, first - first % (chunk or 1))):
            if size is not None:
                begin = torch.maximum(begin, first_seen)
                num_keys = min(num_keys, size + self._num_nodes + query_len - 1)
        exact = chunk is None
        if self._count == 1 and begin.device.type in HOST_READS_ARE_FREE:
            num_keys, exact = kv_len - int(begin), True
        places = begin[:, None] + torch.arange(num_keys, device=begin.device)
        inside = torch.minimum(places, (self._kv_lens - 1)[:, None])
        blocks = self._tables.gather(1, inside // self._block_size).long()
        slots = (blocks * self._block_size + inside % self._block_size).flatten()
        allowed = None
        if not (query_len == 1 and self._requests.even and exact and not self._num_nodes):
            allowed = self._visible(places, inside, window, chunk)
        return _Columns(self._as_slice(slots), num_keys, allowed)

    def _as_slice(self, slots: Tensor) -> Tensor | slice:
        if self._count > 1 or slots.device.type not in HOST_READS_ARE_FREE:
            return slots
        first, last = int(slots[0]), int(slots[-1])
        in_a_row = last - first + 1 == slots.shape[0] and bool((slots.diff() == 1).all())
        return slice(first, last + 1) if in_a_row else slots

    def _visible(self, places: Tensor, inside: Tensor, window: int | None, chunk: int | None) -> Tensor:
        """bool [n, Q, L] for columns at ``places`` [n, L] of each request; ``inside`` is clamped to its context."""
        in_context = (places < self._kv_lens[:, None])[:, None]
        if self._parents is None:
            return visible(self._positions, inside, window, chunk) & in_context
        # Cached nodes and the batch's own tokens, [n, S]; a node's position is that of its depth.
        size, first_node = self._parents.shape[1], (self._kv_lens - self._query_lens - self._num_nodes)[:, None]
        node = (inside - first_node).clamp(0, size - 1)  # [n, L]
        is_node = inside >= first_node
        related = _ancestors(self._parents)
        positions = torch.where(is_node, first_node + related.sum(dim=2).gather(1, node) - 1, inside)
        related = related.gather(1, (self._num_nodes + self._own)[:, :, None].expand(-1, -1, size))
        related = related.gather(2, node[:, None].expand(-1, related.shape[1], -1))
        return visible(self._positions, positions, window, chunk) & in_context & (related | ~is_node[:, None])


def _ancestors(parents: Tensor) -> Tensor:
    """bool [n, Q, Q]: whether column j is row i itself or above it, from parents int64 [n, Q] (-1 at the root).

    Each round doubles the distance covered: what I and my 2^r-th ancestor see after r rounds reaches 2^(r+1) steps up.
    """
    size = parents.shape[1]
    seen = torch.eye(size, dtype=torch.bool, device=parents.device).expand(parents.shape[0], -1, -1)
    jump = parents
    for _ in range(max(1, (size - 1).bit_length())):
        index = jump.clamp(min=0)
        above = seen.gather(1, index[:, :, None].expand(-1, -1, size)) & (jump >= 0)[:, :, None]
        seen = seen | above
        jump = torch.where(jump < 0, jump, jump.gather(1, index))
    return seen


def _additive(allowed: Tensor, shared: int, dtype: torch.dtype) -> Tensor:
    """bool [n, Q, L] -> 0 or -inf [n, 1, shared * Q, L], for folded queries (see `_masked`)."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    return mask.repeat(1, shared, 1).unsqueeze(1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """One prompt from its start, [1, Q, heads, dim] each -> [Q, num_heads, v_head_dim]."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        _widened(value, key).transpose(1, 2),
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out[0].transpose(0, 1)[..., : value.shape[-1]].contiguous()


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[n, Q, num_heads, head_dim] over [n, L, num_kv_heads, …] -> [n, Q, num_heads, v_head_dim].

    The query heads that share a K/V head become further queries of it, so that each K/V row is read once.
    """
    count, query_len, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    shared = num_heads // num_kv_heads
    folded = query.reshape(count, query_len, num_kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    out = F.scaled_dot_product_attention(
        folded.reshape(count, num_kv_heads, shared * query_len, head_dim),
        key.transpose(1, 2),
        _widened(value, key).transpose(1, 2),
        attn_mask=mask,
        scale=scaling,
    )
    unfolded = out.view(count, num_kv_heads, shared, query_len, -1)[..., : value.shape[-1]].permute(0, 3, 1, 2, 4)
    return unfolded.contiguous().view(count, query_len, num_heads, -1)


def _widened(value: Tensor, key: Tensor) -> Tensor:
    """Values padded with zeros to the keys' width, as torch's fused kernels want (multi-head latent attention)."""
    missing = key.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing > 0 else value


def _masked_part(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, layer: AttentionLayer, sinks: Tensor | None
) -> Tensor:
    mask = None if allowed is None else _additive(allowed, layer.num_heads // layer.num_kv_heads, query.dtype)
    return _masked(query, key, value, mask, layer.scaling)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, layer: AttentionLayer, sinks: Tensor | None
) -> Tensor:
    if allowed is None:
        allowed = torch.ones(1, 1, 1, dtype=torch.bool, device=query.device)
    return dense_attention(query, key, value, allowed, layer.scaling, layer.softcap, sinks)
