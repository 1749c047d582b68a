"""The kernels against contract and reference: in Triton's interpreter, or compiled on a GPU (`pytest -m gpu`)."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve

from specdec.testing.attention import AttentionCase, attention_case, attention_layer, copy_cache
from specdec.testing.contracts import AttentionBackendContract
from specdec.testing.reference import attention_reference
from specdec_attention_triton.backend import INTERPRETED, TritonBackend

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


class TestFloat32(AttentionBackendContract):
    device: ClassVar[str] = DEVICE

    @pytest.fixture
    def backend(self) -> TritonBackend:
        return TritonBackend()


@pytest.mark.slow
class TestBfloat16(TestFloat32):
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    tolerance: ClassVar[float] = 2e-2


@pytest.mark.slow
class TestBlocksOf16(TestFloat32):
    block_size: ClassVar[int] = 16


@pytest.mark.slow
class TestOddBlocks(TestFloat32):
    block_size: ClassVar[int] = 5


def assert_right(case: AttentionCase, backend: TritonBackend | None = None, tolerance: float = 2e-5) -> torch.Tensor:
    backend = backend or TritonBackend()
    plan = backend.plan(case.batch, case.cache)
    found = backend.attend(case.query, case.key, case.value, case.layer, plan, case.sinks)
    kv = case.cache.layers[case.layer.index]
    expected = attention_reference(case.batch, kv, case.cache.block_size, case.query, case.layer, case.sinks)
    torch.testing.assert_close(found.double().cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)
    return found


def case_of(lengths: list[tuple[int, int]], parents: list[list[int]] | None = None, **options: Any) -> AttentionCase:
    dtype, block_size = options.pop("dtype", torch.float32), options.pop("block_size", 16)
    num_cached_nodes = options.pop("num_cached_nodes", 0)
    return attention_case(
        lengths,
        attention_layer(**options),
        block_size=block_size,
        parents=parents,
        num_cached_nodes=num_cached_nodes,
        dtype=dtype,
        device=DEVICE,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    trees = [[-1, 0, 0, 1, 2], [-1], [-1, 0, 1]]
    assert_right(case_of([(30, 5), (9, 1), (0, 3)], trees, dtype=dtype, sliding_window=20), tolerance=2e-2)


@pytest.mark.parametrize(
    "fields", [{}, {"sliding_window": 70}, {"chunk_size": 48}, {"sinks": True, "sliding_window": 40}], ids=str
)
def test_long_contexts_are_cut_into_parts(fields: dict[str, Any]) -> None:
    """Contexts that end before, at and after a part's end, some parts wholly outside the window."""
    lengths = [(63, 1), (64, 1), (190, 4), (3, 2)]
    case = case_of(lengths, **fields)
    whole = assert_right(evolve(case, cache=copy_cache(case.cache)))
    cut = assert_right(case, TritonBackend(part=64))
    torch.testing.assert_close(cut, whole, rtol=2e-5, atol=2e-5)


def test_trees_across_parts_and_words() -> None:
    """A tree of more than 64 nodes beside a chain and a small tree; windows by depth; nodes on both sides of a cut."""
    rng = random.Random(3)
    large = [-1, *(rng.randrange(max(0, i - 9), i) for i in range(1, 70))]
    small = [-1, 0, 0, 1, 1, 2]
    lengths = [(37, 70), (60, 6), (5, 3)]
    assert_right(case_of(lengths, [large, small, [-1, 0, 1]], sliding_window=12))
    assert_right(case_of([(60, 6), (5, 3)], [small, [-1, 0, 1]]), TritonBackend(part=64))


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 12}, {"chunk_size": 24}], ids=str)
def test_trees_grow_across_parts_and_words(fields: dict[str, Any]) -> None:
    """More than 64 cached nodes, new nodes in the first word and the second; nodes on both sides of a cut."""
    rng = random.Random(4)
    trees = [[-1, -1, *(rng.randrange(max(-1, i - 9), i) for i in range(2, count))] for count in (74, 70)]
    lengths = [(37 + 66, 8), (5 + 66, 4)]
    case = case_of(lengths, trees, num_cached_nodes=66, **fields)
    assert_right(evolve(case, cache=copy_cache(case.cache)))
    assert_right(case, TritonBackend(part=64))


def test_a_tree_behind_a_prefill_chunk() -> None:
    """A chunk of a prompt, given as a chain of parents, in one batch with trees."""
    chain = list(range(-1, 79))
    assert_right(case_of([(10, 80), (20, 4)], [chain, [-1, 0, 0, 0]]))


def test_a_window_counts_depth_not_slots() -> None:
    """Siblings take slots but no positions: far right in the tree a node still sees its window of the context."""
    star = [-1] + [0] * 7
    case = case_of([(20, 8)], [star], sliding_window=4)
    assert case.batch.positions.tolist() == [20] + [21] * 7
    found = assert_right(case)
    by_slot = evolve(case.batch, positions=torch.arange(20, 28, device=DEVICE))
    backend = TritonBackend()
    wrong = backend.attend(case.query, case.key, case.value, case.layer, backend.plan(by_slot, case.cache))
    assert not torch.allclose(found, wrong, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_wide_heads(head_dim: int) -> None:
    assert_right(case_of([(33, 3)], num_heads=2, num_kv_heads=1, head_dim=head_dim))


def test_slots_below_zero_are_not_written() -> None:
    case = case_of([(3, 2)])
    case.batch.slot_mapping.fill_(-1)
    before = copy_cache(case.cache)
    backend = TritonBackend()
    backend.attend(case.query, case.key, case.value, case.layer, backend.plan(case.batch, case.cache))
    assert torch.equal(case.cache.layers[0].keys, before.layers[0].keys)
    assert torch.equal(case.cache.layers[0].values, before.layers[0].values)
