"""Which blocks of the paged KV cache belong to whom, and which of them can be shared as cached prefixes.

A block is free, used by one or more requests, or both free and cached: a cached block keeps its content after its
last user ends, until it is handed out again. Free blocks are handed out in the order in which they were freed, so that
cached content lives as long as it can. Invariant: free + used = total at all times.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.engine.request import Request


class BlockPool:
    """Reference counts, the free list and the index of cached blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._users = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request uses (some of them may hold cached content)."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with undefined content; the caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget_content(block)
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more request uses a cached block."""
        if self._users[block] == 0:
            del self._free[block]
        self._users[block] += 1

    def release(self, block: int) -> None:
        """One request less uses the block; its content stays cached until it is handed out again."""
        self._users[block] -= 1
        if self._users[block] == 0:
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds the content, if any does."""
        return self._cached.get(block_hash)

    def remember(self, block: int, block_hash: bytes) -> None:
        """The block now holds the content; the first block with a content is the one that is found."""
        if self._hash_of[block] is None and block_hash not in self._cached:
            self._cached[block_hash] = block
            self._hash_of[block] = block_hash

    def forget_all(self) -> None:
        """Drop the index of cached blocks; blocks in use stay in use."""
        self._cached.clear()
        self._hash_of = [None] * self.num_blocks

    def _forget_content(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hash_of[block] = None


class KVCacheManager:
    """Blocks of requests: allocation, prefix reuse, release."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, next_token: bool = False
    ) -> None:
        """Manage ``num_blocks`` free blocks.

        Args:
            num_blocks: blocks in total.
            block_size: positions per block.
            enable_prefix_caching: share blocks of equal content.
            next_token: some layer's K/V of a position also depends on the next token, so that a cached block is shared
                only when the next block is cached as well.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._next_token = next_token

    @property
    def num_blocks(self) -> int:
        """Blocks in total."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request uses."""
        return self.pool.num_free

    def reuse_prefix(self, request: Request) -> int:
        """Give a request without blocks the cached blocks of its prefix; return the number of tokens they cover.

        At least the last token is left to compute, because its logits are needed. Requests that ask for prompt
        logprobs compute the whole prompt.
        """
        if not self._caching or request.prompt_logprobs is not None:
            return 0
        self._extend_hashes(request, (request.num_tokens - 1) // self.block_size)
        hits = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        if self._next_token and hits:
            hits.pop()
        for block in hits:
            self.pool.share(block)
        request.block_ids.extend(hits)
        request.num_indexed_blocks = len(hits)
        return len(hits) * self.block_size

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` positions; False, and nothing changed, when there are too few free blocks."""
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        request.block_ids.extend(self.pool.take(missing))
        return True

    def most_positions(self, request: Request) -> int:
        """How many positions a request would have room for with all free blocks."""
        return (len(request.block_ids) + self.pool.num_free) * self.block_size

    def cache_full_blocks(self, request: Request) -> None:
        """Index the blocks that are full of committed, computed tokens, so that other requests can share them."""
        if not self._caching:
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_indexed_blocks:
            return
        self._extend_hashes(request, num_full)
        for i in range(request.num_indexed_blocks, num_full):
            self.pool.remember(request.block_ids[i], request.block_hashes[i])
        request.num_indexed_blocks = num_full

    def free(self, request: Request) -> None:
        """Release all blocks of a request, the tail first so that prefixes stay cached longest."""
        for block in reversed(request.block_ids):
            self.pool.release(block)
        request.block_ids.clear()
        request.num_indexed_blocks = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached content."""
        self.pool.forget_all()

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        """A block's hash covers its tokens and, through its parent's hash, everything before it."""
        tokens = request.token_ids
        for i in range(len(request.block_hashes), num_blocks):
            parent = request.block_hashes[-1] if request.block_hashes else b""
            content = tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()
            request.block_hashes.append(blake2b(parent + content, digest_size=16).digest())
