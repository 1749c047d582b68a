"""The contract of `specdec.drafting.DraftHead`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from attrs import evolve

from specdec.attention.interface import KVGeometry
from specdec.attention.paged import allocate_kv_cache
from specdec.attention.sdpa import SdpaBackend
from specdec.target import bridge
from specdec.testing.attention import packed_batch
from specdec.testing.contracts.base import PluginContract
from specdec.testing.contracts.target import TinyTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.attention.interface import KVCache
    from specdec.drafting.base import DraftHead
    from specdec.types import PackedBatch

TEXTS = (9, 1, 6, 13)
"""Rows of each text."""


class DraftHeadContract(PluginContract, TinyTarget):
    """What every draft head must hold to. A subclass gives the fixture `head`, a head with its weights, in float32; it
    may load it for the fixture `tiny_target`, a random Llama with the sizes below.

    A head is run over texts of random tokens and random hidden states, without a cache and over a paged one.
    """

    vocab_size: ClassVar[int] = 64
    """Of the target: token ids lie below it."""
    hidden_size: ClassVar[int] = 32
    """Of the target: the width of its hidden states."""
    num_target_layers: ClassVar[int] = 2
    """Of the target: `DraftHead.taps` lie below it."""
    block_size: ClassVar[int] = 4
    tolerance: ClassVar[float] = 1e-4
    """Largest absolute and relative difference between ways to compute the same."""

    @pytest.fixture
    def head(self) -> DraftHead:
        """The head to check."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'head'")

    # --- running ----------------------------------------------------------------------------------

    def token_ids(self, count: int, seed: int = 0) -> torch.Tensor:
        """Random ids of the target, int64 [count]."""
        return torch.randint(self.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))

    def hidden_states(self, head: DraftHead, count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """What the head reads of the target, each [count, H]: one for each tap, or the final one."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return tuple(torch.randn(count, self.hidden_size, generator=generator) for _ in head.taps or (0,))

    def run(
        self, head: DraftHead, token_ids: torch.Tensor, fused: torch.Tensor, first: int = 0, step: int = 0
    ) -> torch.Tensor:
        """One text without a cache, its rows at positions from ``first`` on -> [T, h]."""
        positions = torch.arange(len(token_ids)) + first
        context = bridge.ReferenceContext(head.attention_layers, {}, head.query_scales, positions)
        with bridge.using(context), torch.inference_mode():
            return head.forward(token_ids, fused, positions, step)

    def run_paged(
        self, head: DraftHead, batch: PackedBatch, cache: KVCache, token_ids: torch.Tensor, fused: torch.Tensor
    ) -> torch.Tensor:
        """Packed rows of several texts over a cache -> [T, h]."""
        backend = SdpaBackend()
        plan = backend.plan(batch, cache)
        layers = head.attention_layers
        context = bridge.StepContext(backend, plan, layers, {}, head.query_scales, batch.positions)
        with bridge.using(context), torch.inference_mode():
            return head.forward(token_ids, fused, batch.positions, 0)

    def fuse(self, head: DraftHead, hidden_states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """`DraftHead.fuse`, without gradients."""
        with torch.inference_mode():
            return head.fuse(hidden_states)

    def texts(self, head: DraftHead) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Token ids and fused hidden states of some texts."""
        return [
            (self.token_ids(count, seed), self.fuse(head, self.hidden_states(head, count, seed)))
            for seed, count in enumerate(TEXTS)
        ]

    def close(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Assert equality within the tolerance."""
        torch.testing.assert_close(got, want, rtol=self.tolerance, atol=self.tolerance)

    # --- checks -----------------------------------------------------------------------------------

    def test_declares_what_it_is(self, head: DraftHead) -> None:
        """Taps are layers of the target; attention layers are counted from 0; the draft vocabulary has a size."""
        assert isinstance(head.taps, tuple)
        assert all(0 <= tap < self.num_target_layers for tap in head.taps), (
            f"taps {head.taps} of a target with {self.num_target_layers} layers"
        )
        indices = [layer.index for layer in head.attention_layers]
        assert indices == list(range(len(indices))), f"attention_layers have the indices {indices}"
        assert set(head.query_scales) <= set(indices)
        assert isinstance(head.draft_vocab_size, int)
        assert 0 < head.draft_vocab_size <= self.vocab_size

    def test_maps_to_target_ids(self, head: DraftHead) -> None:
        """Every id of the draft vocabulary is another one of the target's."""
        draft_ids = torch.arange(head.draft_vocab_size)
        if head.target_ids is not None:
            assert head.target_ids.dtype == torch.int64
            assert head.target_ids.shape == (head.draft_vocab_size,)
        mapped = head.to_target_ids(draft_ids)
        assert mapped.dtype == torch.int64
        assert mapped.shape == draft_ids.shape
        assert bool(((mapped >= 0) & (mapped < self.vocab_size)).all()), "target ids leave the vocabulary"
        assert bool((mapped.diff() > 0).all()), "target ids are not ascending"

    @pytest.mark.parametrize("count", [1, 7])
    def test_form(self, head: DraftHead, count: int) -> None:
        """Rows in, rows of the same width out, and for each row logits over the draft vocabulary; all finite."""
        states = self.hidden_states(head, count)
        fused = self.fuse(head, states)
        assert fused.dim() == 2
        assert fused.shape[0] == count
        out = self.run(head, self.token_ids(count), fused)
        assert out.shape == fused.shape, "forward() must return rows that it takes again"
        assert out.dtype == fused.dtype
        with torch.inference_mode():
            logits = head.logits(out)
        assert logits.shape == (count, head.draft_vocab_size)
        assert bool(logits.isfinite().all()), "logits are not finite"

    def test_runs_on_its_own_output(self, head: DraftHead) -> None:
        """Where the target has not been yet, a row takes the output of the row before."""
        out = self.run(head, self.token_ids(3), self.fuse(head, self.hidden_states(head, 3)))
        for step in (1, 2, 3):
            out = self.run(head, self.token_ids(1, step), out[-1:], first=2 + step, step=step)
            assert out.shape[0] == 1
            assert bool(out.isfinite().all())

    def test_mask_row_is_what_fuse_takes(self, head: DraftHead) -> None:
        """A mask row has a token of the target and as many hidden states as other rows have."""
        if head.mask_row is None:
            return
        token_id, states = head.mask_row.token_id, head.mask_row.hidden_states
        assert 0 <= token_id < self.vocab_size, f"the mask token {token_id} lies outside the vocabulary"
        assert [tuple(state.shape) for state in states] == [(1, self.hidden_size)] * max(1, len(head.taps))
        assert self.fuse(head, states).shape == self.fuse(head, self.hidden_states(head, 1)).shape

    def test_sees_the_past_alone(self, head: DraftHead) -> None:
        """What stands in later rows changes nothing in earlier ones."""
        tokens, fused = self.texts(head)[0]
        want = self.run(head, tokens, fused)
        tokens, fused = tokens.clone(), fused.clone()
        tokens[5:] = (tokens[5:] + 1) % self.vocab_size
        fused[5:] += 1.0
        self.close(self.run(head, tokens, fused)[:5], want[:5])

    def test_reads_tokens_and_hidden_states(self, head: DraftHead) -> None:
        """Another token or another hidden state in a row makes another row."""
        tokens, states = self.token_ids(5), self.hidden_states(head, 5)
        want = self.run(head, tokens, self.fuse(head, states))[-1]
        other = torch.cat([tokens[:-1], (tokens[-1:] + 1) % self.vocab_size])
        assert not torch.equal(self.run(head, other, self.fuse(head, states))[-1], want), "the token is not read"
        for i, state in enumerate(states):
            changed = state.clone()
            changed[-1] += 1.0
            read = self.fuse(head, (*states[:i], changed, *states[i + 1 :]))
            assert not torch.equal(self.run(head, tokens, read)[-1], want), f"hidden state {i} is not read"

    def test_same_input_same_output(self, head: DraftHead) -> None:
        """A head keeps nothing from one call to the next: K/V go through the attention call."""
        tokens, fused = self.texts(head)[0]
        want = self.run(head, tokens, fused)
        self.run(head, *self.texts(head)[3])
        assert torch.equal(self.run(head, tokens, fused), want)

    def test_inputs_unchanged(self, head: DraftHead) -> None:
        """Tokens and hidden states are only read."""
        tokens, states = self.token_ids(6), self.hidden_states(head, 6)
        given = [tokens, *states]
        before = [tensor.clone() for tensor in given]
        fused = self.fuse(head, states)
        given.append(fused)
        before.append(fused.clone())
        out = self.run(head, tokens, fused)
        kept = out.clone()
        with torch.inference_mode():
            head.logits(out)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip([*given, out], [*before, kept], strict=True))

    def test_batch_equals_singles(self, head: DraftHead) -> None:
        """Rows of several texts, packed and over a paged cache, are what each text gives alone."""
        texts = self.texts(head)
        batch, cache = self._paged(head, [(0, len(tokens)) for tokens, _ in texts])
        tokens, fused = (torch.cat(parts) for parts in zip(*texts, strict=True))
        got = self.run_paged(head, batch, cache, tokens, fused)
        self.close(got, torch.cat([self.run(head, *text) for text in texts]))

    def test_steps_continue_each_other(self, head: DraftHead) -> None:
        """A text in several steps over the same blocks is what it is at once."""
        tokens, fused = self.texts(head)[3]
        whole, cache = self._paged(head, [(0, len(tokens))])
        got = [
            self.run_paged(head, _part(whole, start, end), cache, tokens[start:end], fused[start:end])
            for start, end in ((0, 5), (5, 6), (6, 11), (11, 13))
        ]
        self.close(torch.cat(got), self.run(head, tokens, fused))

    def test_memory_is_reported(self, head: DraftHead) -> None:
        """`memory` maps purposes to bytes."""
        for purpose, size in head.memory().items():
            assert isinstance(purpose, str)
            assert isinstance(size, int)
            assert size >= 0

    def _paged(self, head: DraftHead, lengths: Sequence[tuple[int, int]]) -> tuple[PackedBatch, KVCache]:
        generator = torch.Generator().manual_seed(3)
        batch, num_blocks = packed_batch(lengths, block_size=self.block_size, generator=generator)
        geometry = KVGeometry(num_blocks, self.block_size)
        return batch, allocate_kv_cache(head.attention_layers, torch.float32, torch.device("cpu"), geometry)


def _part(batch: PackedBatch, start: int, end: int) -> PackedBatch:
    """Tokens ``start`` to ``end - 1`` of a batch of one request that begins at position 0."""
    return evolve(
        batch,
        input_ids=batch.input_ids[start:end],
        positions=batch.positions[start:end],
        slot_mapping=batch.slot_mapping[start:end],
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        logits_indices=torch.arange(end - start),
        max_query_len=end - start,
        max_seq_len=end,
    )
