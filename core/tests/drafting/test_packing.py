"""Batches over the target's block tables."""

import types

import numpy as np
import torch

from specdec.drafting.packing import SlotTable, Span

SIZE = 4
TABLES = torch.tensor([[7, 3, 5], [2, 9, 0]], dtype=torch.int32)  # the second request has two blocks


def tables() -> SlotTable:
    computed = types.SimpleNamespace(batch=types.SimpleNamespace(block_tables=TABLES))
    return SlotTable(computed, SIZE, torch.device("cpu"))


def test_steps_of_a_chain_are_batches_of_single_tokens():
    """Each step is the batch that a span of one token for each request makes."""
    rows, starts = np.array([0, 1]), np.array([6, 2])
    steps = tables().chain_steps(rows, starts, 4)
    for step in range(4):
        ids = torch.tensor([10 + step, 20 + step])
        batch = steps.batch(step, ids)
        spans = [
            Span(row, start + step, np.array([token]), 1) for row, start, token in zip(rows, starts, ids, strict=True)
        ]
        expected = tables().batch_of_spans(spans)
        for name in ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name
            assert getattr(batch, name).dtype == getattr(expected, name).dtype, name
        assert torch.equal(batch.block_tables[:, :2], TABLES[:, :2])
        assert (batch.max_query_len, batch.max_seq_len) == (1, expected.max_seq_len)


def test_steps_beyond_the_blocks_of_a_request_do_not_stop_the_others():
    """A request near its limit drafts less than its neighbours; what its further steps hold is never used."""
    steps = tables().chain_steps(np.array([0, 1]), np.array([0, 10]), 6)
    slots = [int(steps.batch(step, torch.tensor([1, 1])).slot_mapping[0]) for step in range(6)]
    assert slots == [28, 29, 30, 31, 12, 13]


def test_one_token_for_each_request():
    batch = tables().batch_of_tokens(torch.tensor([5]), np.array([1]), np.array([5]))
    assert batch.slot_mapping.tolist() == [9 * SIZE + 1]
    assert batch.seq_lens.tolist() == [6]
