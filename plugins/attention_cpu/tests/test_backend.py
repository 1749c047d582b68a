"""Past one chunk of the kernels: equality with dense attention, and results that do not depend on how work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve

from specdec.attention.dense import dense_attention, visible
from specdec.testing.attention import (
    AttentionCase,
    attention_case,
    attention_layer,
    attention_requirements,
    copy_cache,
    only_request,
)
from specdec.testing.reference import attention_reference
from specdec_attention_cpu import planning
from specdec_attention_cpu.backend import CpuBackend
from specdec_attention_cpu.layout import CHUNK, MAX_VECTORS

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attend(case: AttentionCase) -> torch.Tensor:
    backend = CpuBackend()
    return backend.attend(
        case.query, case.key, case.value, case.layer, backend.plan(case.batch, case.cache), case.sinks
    )


def expected(case: AttentionCase) -> torch.Tensor:
    """Dense attention per request over the cached slots and the batch's own keys and values."""
    batch, layer, kv = case.batch, case.layer, case.cache.layers[case.layer.index]
    outputs = []
    for request, (start, end) in enumerate(pairwise(batch.query_start_loc.tolist())):
        new = end - start
        cached = int(batch.seq_lens[request]) - new
        places = torch.arange(cached)
        size = case.cache.block_size
        slots = batch.block_tables[request].long()[places // size] * size + places % size
        keys = torch.cat([kv.keys[slots], case.key[start:end]])
        values = torch.cat([kv.values[slots], case.value[start:end]])
        positions = batch.positions[start:end]
        allowed = visible(positions, torch.cat([places, positions]), layer.sliding_window, layer.chunk_size)
        allowed[:, cached:] &= _ancestors(None if batch.parents is None else batch.parents[start:end].tolist(), new)
        outputs.append(
            dense_attention(case.query[start:end], keys, values, allowed, layer.scaling, layer.softcap, case.sinks)
        )
    return torch.cat(outputs)


def _ancestors(parents: list[int] | None, count: int) -> torch.Tensor:
    rows = torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(parents or range(-1, count - 1)):
        if parent >= 0:
            rows[node] |= rows[parent]
    return rows


def assert_right(case: AttentionCase) -> None:
    want = expected(case)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(attend(case), want, rtol=tolerance, atol=tolerance)


LONG = [(CHUNK - 1, 1), (CHUNK, 1), (2 * CHUNK - 3, 6), (3 * CHUNK, 5), (0, 40), (3, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 24, "v_head_dim": 40},
        {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256},
        {"sliding_window": CHUNK + 7},
        {"sliding_window": 3},
        {"chunk_size": 100},
        {"softcap": 15.0, "scaling": 1.0},
        {"sinks": True, "sliding_window": 300},
    ],
    ids=lambda fields: ", ".join(f"{k}={v}" for k, v in fields.items()) or "plain",
)
def test_contexts_of_several_chunks(fields: dict[str, Any], dtype: torch.dtype) -> None:
    """Contexts that end before, at and after a chunk's boundary."""
    assert_right(attention_case(LONG, attention_layer(**fields), block_size=16, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 8, 2 * MAX_VECTORS])
def test_prefill_of_several_items(group: int) -> None:
    """A prompt with more rows than one item holds; more query heads per K/V head than an item usually holds."""
    layer = attention_layer(num_heads=group, num_kv_heads=1)
    rows = 3 * max(1, MAX_VECTORS // group) + 2
    assert_right(attention_case([(0, rows), (CHUNK - 5, rows)], layer, block_size=16))


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 4}, {"sliding_window": 300}], ids=str)
@pytest.mark.parametrize("cached", [CHUNK - 5, CHUNK, 4 * CHUNK])
def test_trees_across_chunks(cached: int, fields: dict[str, Any]) -> None:
    """Draft trees whose nodes lie on both sides of a chunk's boundary, windows by depth."""
    tree, chain = [-1, 0, 0, 1, 1, 2, 2, 3, 5], [-1, 0, 1]
    case = attention_case([(cached, 9), (7, 3)], attention_layer(**fields), block_size=16, parents=[tree, chain])
    assert_right(case)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5}, {"chunk_size": 100}], ids=str)
@pytest.mark.parametrize("cached", range(CHUNK - 6, CHUNK + 2))
def test_trees_grow_across_chunks(cached: int, fields: dict[str, Any]) -> None:
    """Nodes that are cached lie in one chunk or two, and their rows in this batch or the next."""
    tree, chain = [-1, -1, 0, 1, 1, 2, 4, 2, 5], [-1, 0, 1, 2, 3]
    case = attention_case(
        [(cached + 4, 5), (11, 1)],
        attention_layer(**fields),
        block_size=16,
        parents=[tree, chain],
        num_cached_nodes=4,
    )
    kv = case.cache.layers[0]
    got = attend(case)
    want = attention_reference(case.batch, kv, 16, case.query, case.layer).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_large_tree_spans_items() -> None:
    """A tree of more rows than an item holds."""
    rows = MAX_VECTORS + 9
    tree = [-1, *((node - 1) // 2 for node in range(1, rows))]
    assert_right(attention_case([(50, rows)], attention_layer(sliding_window=40), block_size=16, parents=[tree]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_however_the_work_is_cut(dtype: torch.dtype) -> None:
    """A token's output is the same alone, in a batch, on one thread or two, and whatever is verified with it."""
    layer = attention_layer(num_heads=6, num_kv_heads=2, head_dim=32)
    case = attention_case([(4 * CHUNK + 9, 6), (20, 1), (CHUNK, 3)], layer, block_size=16, dtype=dtype)
    together = attend(evolve(case, cache=copy_cache(case.cache)))
    torch.set_num_threads(2)
    assert torch.equal(attend(evolve(case, cache=copy_cache(case.cache))), together)
    alone = only_request(case, 0)
    assert torch.equal(attend(alone), together[:6])
    one_by_one = [attend(_one_row(alone, row)) for row in range(6)]
    assert torch.equal(torch.cat(one_by_one), together[:6])


def _one_row(case: AttentionCase, row: int) -> AttentionCase:
    """Only one token of a case of one request, the earlier ones being in the cache."""
    first = int(case.batch.seq_lens[0]) - len(case.query)
    batch = evolve(
        case.batch,
        input_ids=case.batch.input_ids[row : row + 1],
        positions=case.batch.positions[row : row + 1],
        slot_mapping=case.batch.slot_mapping[row : row + 1],
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([first + row + 1], dtype=torch.int32),
    )
    return evolve(
        case, batch=batch, query=case.query[row : row + 1], key=case.key[row : row + 1], value=case.value[row : row + 1]
    )


def test_a_lone_long_context_is_split_and_a_batch_is_not() -> None:
    """One request is spread over threads by chunks; many requests are not cut."""
    starts, lengths = torch.arange(17, dtype=torch.int32).numpy(), torch.full((16,), 2000, dtype=torch.int32).numpy()
    whole = planning.cut(starts, lengths, planning.trees_of(starts, None, None), 3, 2, 2)
    assert (len(whole.tasks), len(whole.merges), whole.num_partials) == (16, 0, 0)
    split = planning.cut(starts[:2], lengths[:1], planning.trees_of(starts[:2], None, None), 3, 2, 2)
    assert (len(split.tasks), len(split.merges), split.num_partials) == (8, 1, 8)
    assert whole.vectors == split.vectors == 3


def test_slots_below_zero_are_not_written() -> None:
    """Padding tokens carry slot -1; their K/V go nowhere."""
    case = attention_case([(3, 2)], attention_layer())
    case.batch.slot_mapping.fill_(-1)
    before = copy_cache(case.cache)
    attend(case)
    assert torch.equal(case.cache.layers[0].keys, before.layers[0].keys)
    assert torch.equal(case.cache.layers[0].values, before.layers[0].values)


def test_reasons_name_what_is_not_served() -> None:
    """float16, other devices and odd head sizes are refused, all reasons at once."""
    layer = attention_layer(head_dim=7, v_head_dim=8)
    reasons = CpuBackend().supports(attention_requirements([layer], block_size=16, dtype="float16", device="cuda"))
    assert [word in reason for word, reason in zip(("cuda", "float16", "head_dim 7"), reasons, strict=True)] == [
        True
    ] * 3


def test_plain_sdpa_is_the_fallback_of_lower_priority() -> None:
    """Installed, this backend is what "auto" takes on a CPU."""
    from specdec.attention.sdpa import SdpaBackend

    assert CpuBackend().priority > SdpaBackend().priority
