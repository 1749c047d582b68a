"""Drives a `TargetModel` step by step over shuffled blocks, with nothing of the engine involved."""

from __future__ import annotations

import random

import torch

from specdec.attention.sdpa import SdpaBackend
from specdec.target.model import TargetModel
from specdec.types import Needs, PackedBatch

BLOCK_SIZE = 4


class Request:
    """A request's blocks and how many of its tokens are in the cache."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.cached = 0


class PagedRunner:
    """Runs packed steps; the cache's unused slots hold NaN, so that reading one shows."""

    def __init__(self, target: TargetModel, needs: Needs | None = None, num_blocks: int = 150) -> None:
        self.target = target
        self.cache = target.allocate_kv_cache(num_blocks, BLOCK_SIZE)
        for layer in self.cache.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        target.bind(SdpaBackend(), self.cache, needs or Needs())
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)

    def step(self, work, parents=None, rows=None):
        """One forward of [(request, token ids), …]; returns the target's output with logits of all tokens (or of
        `rows`).

        Requests advance by all their tokens; set `request.cached` back to reject some. `parents`: per request a list or
        None.
        """
        ids, positions, slots, lengths, packed = [], [], [], [], []
        for i, (request, tokens) in enumerate(work):
            tree = (parents[i] if parents else None) or list(range(-1, len(tokens) - 1))
            depth = []
            for parent in tree:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            total = request.cached + len(tokens)
            while len(request.blocks) * BLOCK_SIZE < total:
                request.blocks.append(self.free.pop())
            places = range(request.cached, total)
            slots += [request.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]
            positions += [request.cached + d for d in depth]
            ids += list(tokens)
            packed += tree
            lengths.append(len(tokens))
        seq_lens = [request.cached + n for (request, _), n in zip(work, lengths, strict=True)]
        tables = torch.zeros(len(work), max(len(r.blocks) for r, _ in work), dtype=torch.int32)
        for i, (request, _) in enumerate(work):
            tables[i, : len(request.blocks)] = torch.tensor(request.blocks)
        output = self.target.forward(
            PackedBatch(
                input_ids=torch.tensor(ids),
                positions=torch.tensor(positions),
                slot_mapping=torch.tensor(slots),
                query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
                block_tables=tables,
                logits_indices=torch.arange(len(ids)) if rows is None else torch.tensor(rows, dtype=torch.int64),
                max_query_len=max(lengths),
                max_seq_len=max(seq_lens),
                parents=torch.tensor(packed, dtype=torch.int32) if parents else None,
            )
        )
        for (request, _), total in zip(work, seq_lens, strict=True):
            request.cached = total
        return output

    def logits(self, work, parents=None):
        """`step`, with the logits split per request."""
        return self.step(work, parents).logits.split([len(tokens) for _, tokens in work])
