"""Straight-line reference computations: slow, short and independent of the engine."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specdec.attention.interface import LayerKV
    from specdec.types import AttentionLayer, PackedBatch


def ngram_reference(tokens: Sequence[int], shortest: int, longest: int, wanted: int) -> list[int]:
    """The n-gram draft by trying every length and every place.

    Args:
        tokens: prompt and output so far.
        shortest: length of the shortest suffix that counts as a match.
        longest: length of the longest suffix looked up.
        wanted: the most draft tokens.

    Returns:
        What follows the latest occurrence of the longest suffix that has ``wanted`` tokens after it; of the earliest
        occurrence when none has that many; nothing without an occurrence.
    """
    text = [int(token) for token in tokens]
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if ends and wanted > 0:
            full = [end for end in ends if len(text) - end >= wanted]
            end = max(full) if full else min(ends)
            return text[end : end + wanted]
    return []


def attention_reference(
    batch: PackedBatch,
    kv: LayerKV,
    block_size: int,
    query: Tensor,
    layer: AttentionLayer,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every token of a batch, one token and one head at a time, in float64.

    Args:
        batch: the packed batch, its K/V already in the cache.
        kv: the layer's slots.
        block_size: slots per block.
        query: [T, num_heads, head_dim].
        layer: scaling, window, chunk, soft cap.
        sinks: [num_heads], when ``layer.sinks``.

    Returns:
        float64 [T, num_heads, v_head_dim].
    """
    shared = layer.num_heads // layer.num_kv_heads
    out = torch.zeros(query.shape[0], layer.num_heads, layer.v_head_dim, dtype=torch.float64)
    for token, slots in enumerate(visible_slots(batch, block_size, layer)):
        for head in range(layer.num_heads):
            keys = kv.keys[slots, head // shared].double()
            values = kv.values[slots, head // shared].double()
            scores = keys @ query[token, head].double() * layer.scaling
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().reshape(1)])
            weights = torch.softmax(scores, dim=0)[: len(slots)]
            out[token, head] = weights @ values
    return out


def visible_slots(batch: PackedBatch, block_size: int, layer: AttentionLayer) -> list[list[int]]:
    """The slots each token of a batch attends to, in order of their place in the cache.

    A token sees what its request had cached before the batch and, of the batch, itself and the tokens it follows (its
    ancestors, when there are ``parents``; of ``cached_parents`` too), as far as window and chunk let it, by position.
    """
    starts = batch.query_start_loc.tolist()
    positions = batch.positions.tolist()
    slots_of_token = []
    for request, (start, end) in enumerate(pairwise(starts)):
        length = int(batch.seq_lens[request])
        blocks = batch.block_tables[request].tolist()
        slot = [blocks[place // block_size] * block_size + place % block_size for place in range(length)]
        nodes = [] if batch.cached_parents is None else batch.cached_parents[request].tolist()
        first = length - (end - start) - len(nodes)
        own = range(len(nodes) - 1, length) if batch.parents is None else batch.parents[start:end].tolist()
        parents = [*nodes, *own]
        for token in range(start, end):
            path = _path_to(len(nodes) + token - start, parents)
            seen = [(place, place) for place in range(first)]
            seen += [(first + node, first + depth) for depth, node in enumerate(path)]
            slots_of_token.append([slot[place] for place, other in seen if _in_reach(positions[token], other, layer)])
    return slots_of_token


def _path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from a root to this one."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def _in_reach(position: int, other: int, layer: AttentionLayer) -> bool:
    if layer.sliding_window is not None and position - other >= layer.sliding_window:
        return False
    return layer.chunk_size is None or position // layer.chunk_size == other // layer.chunk_size


@torch.inference_mode()
def greedy_reference(model: Any, prompt_token_ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Plain greedy decoding of a transformers model, without a cache.

    Args:
        model: a transformers causal language model, for example from `specdec.testing.tiny_module`.
        prompt_token_ids: the prompt.
        num_tokens: how many tokens to decode; end tokens do not stop it.

    Returns:
        The tokens, and at each of them how far the best logit was above the second: where that is tiny, another
        order of summation may rightly choose otherwise.
    """
    tokens = list(prompt_token_ids)
    gaps = []
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        tokens.append(int(logits.argmax()))
        gaps.append(best - second)
    return tokens[len(prompt_token_ids) :], gaps


def match_reference(samples: Sequence[int], draft: Sequence[int], parents: Sequence[int] | None = None) -> list[int]:
    """The nodes of a draft that the samples of the target confirm.

    Args:
        samples: what the target chose after the last committed token and after each node, so one more than nodes.
        draft: the drafted tokens.
        parents: for trees, the parent of each node, -1 for the last committed token.

    Returns:
        The accepted path as node indices; the step emits its tokens and then ``samples[last node + 1]``.
    """
    above = range(-1, len(draft) - 1) if parents is None else parents
    path: list[int] = []
    for node, (token, parent) in enumerate(zip(draft, above, strict=True)):
        if parent == (path[-1] if path else -1) and token == samples[parent + 1]:
            path.append(node)
    return path
