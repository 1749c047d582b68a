"""Blocks are never lost, never shared by accident, and cached prefixes are found."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.kv_cache import BlockPool, KVCacheManager
from specdec.engine.request import Request
from specdec.sampling.params import SamplingParams


def make_request(name: str, tokens: list[int], params: SamplingParams | None = None) -> Request:
    return Request(
        name,
        tokens,
        params or SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        stop_checker=None,  # type: ignore[arg-type]
        max_tokens=64,
    )


def finish_prefill(manager: KVCacheManager, request: Request) -> None:
    request.num_computed_tokens = request.num_tokens
    manager.cache_full_blocks(request)


def test_allocation_is_all_or_nothing() -> None:
    manager = KVCacheManager(4, 4, enable_prefix_caching=True)
    first, second = make_request("a", [1] * 9), make_request("b", [2] * 9)
    assert manager.allocate(first, 9)
    assert len(first.block_ids) == 3
    assert not manager.allocate(second, 9)
    assert second.block_ids == []
    assert manager.num_free_blocks == 1
    manager.free(first)
    assert manager.num_free_blocks == 4


def test_a_prefix_is_shared_and_the_last_token_is_always_computed() -> None:
    manager = KVCacheManager(8, 4, enable_prefix_caching=True)
    first = make_request("a", list(range(8)))
    manager.allocate(first, 8)
    finish_prefill(manager, first)
    again = make_request("b", list(range(8)))
    assert manager.reuse_prefix(again) == 4
    assert again.block_ids == first.block_ids[:1]
    longer = make_request("c", list(range(9)))
    assert manager.reuse_prefix(longer) == 8
    assert longer.block_ids == first.block_ids


def test_a_prefix_outlives_its_request_until_its_block_is_handed_out() -> None:
    manager = KVCacheManager(3, 4, enable_prefix_caching=True)
    first = make_request("a", list(range(9)))
    manager.allocate(first, 9)
    finish_prefill(manager, first)
    manager.free(first)
    assert manager.num_free_blocks == 3
    again = make_request("b", list(range(9)))
    assert manager.reuse_prefix(again) == 8
    manager.free(again)
    other = make_request("c", [7] * 12)
    manager.allocate(other, 12)
    manager.free(other)
    assert manager.reuse_prefix(make_request("d", list(range(9)))) == 0


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    manager = KVCacheManager(8, 2, enable_prefix_caching=True)
    first = make_request("a", [1, 1, 5, 5, 0])
    manager.allocate(first, 5)
    finish_prefill(manager, first)
    assert manager.reuse_prefix(make_request("b", [2, 2, 5, 5, 0])) == 0


def test_only_committed_and_computed_tokens_are_cached() -> None:
    manager = KVCacheManager(8, 2, enable_prefix_caching=True)
    request = make_request("a", [1, 2, 3, 4])
    manager.allocate(request, 8)
    request.num_computed_tokens = 3
    manager.cache_full_blocks(request)
    assert manager.reuse_prefix(make_request("b", [1, 2, 3, 4, 5])) == 2


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    manager = KVCacheManager(8, 2, enable_prefix_caching=True)
    first = make_request("a", [1, 2, 3, 4, 5])
    manager.allocate(first, 5)
    finish_prefill(manager, first)
    assert manager.reuse_prefix(make_request("b", [1, 2, 3, 4, 5], SamplingParams(prompt_logprobs=1))) == 0


def test_caching_can_be_off() -> None:
    manager = KVCacheManager(8, 2, enable_prefix_caching=False)
    first = make_request("a", [1, 2, 3, 4, 5])
    manager.allocate(first, 5)
    finish_prefill(manager, first)
    assert manager.reuse_prefix(make_request("b", [1, 2, 3, 4, 5])) == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_free_and_used_blocks_always_add_up(data: st.DataObject) -> None:
    """Random life of requests over few blocks and few distinct tokens, so that prefixes collide often."""
    num_blocks, block_size = 12, 2
    manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=True)
    live: list[Request] = []
    for step in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["start", "grow", "end"]))
        if action == "start":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
            request = make_request(str(step), tokens)
            request.num_computed_tokens = manager.reuse_prefix(request)
            if manager.allocate(request, request.num_tokens):
                finish_prefill(manager, request)
                live.append(request)
            else:
                manager.free(request)
        elif live:
            request = live[data.draw(st.integers(0, len(live) - 1))]
            if action == "end":
                manager.free(request)
                live.remove(request)
            elif manager.allocate(request, request.num_tokens + 1):
                request.append([data.draw(st.integers(0, 1))])
                request.num_computed_tokens = request.num_tokens - 1
                manager.cache_full_blocks(request)
        check_pool(manager.pool, live)
    for request in live:
        manager.free(request)
    assert manager.num_free_blocks == num_blocks


def check_pool(pool: BlockPool, live: list[Request]) -> None:
    users = np.zeros(pool.num_blocks, dtype=int)
    content: dict[int, bytes] = {}
    for request in live:
        assert len(set(request.block_ids)) == len(request.block_ids)
        for i, block in enumerate(request.block_ids):
            users[block] += 1
            if (i + 1) * 2 <= request.num_computed_tokens:
                prefix = request.token_ids[: (i + 1) * 2].tobytes()
                assert content.setdefault(block, prefix) == prefix, "two requests share a block but not its tokens"
    assert pool.num_free == int((users == 0).sum())


def test_layers_that_depend_on_the_next_token_share_one_block_less() -> None:
    """The last cached block is computed again, because another token may follow it here."""
    manager = KVCacheManager(8, 4, enable_prefix_caching=True, next_token=True)
    first = make_request("a", list(range(13)))
    manager.allocate(first, 13)
    finish_prefill(manager, first)
    again = make_request("b", [*range(12), 99])
    assert manager.reuse_prefix(again) == 8
    assert again.block_ids == first.block_ids[:2]
    assert manager.allocate(again, 13)
    assert not set(again.block_ids[2:]) & set(first.block_ids)
    manager.free(again)
    manager.free(first)
    assert manager.num_free_blocks == 8
    nothing = make_request("c", [50] * 9)
    assert manager.reuse_prefix(nothing) == 0
