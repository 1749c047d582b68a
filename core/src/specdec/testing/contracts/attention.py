"""The contract of `specdec.attention.AttentionBackend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from attrs import asdict, evolve

from specdec.testing.attention import (
    AttentionCase,
    attention_case,
    attention_layer,
    attention_requirements,
    cached_slots,
    copy_cache,
    only_request,
)
from specdec.testing.contracts.base import PluginContract
from specdec.testing.reference import attention_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.attention.interface import AttentionBackend
    from specdec.types import AttentionLayer

MIXED = [(9, 1), (0, 6), (4, 5), (13, 3), (0, 1), (7, 1), (5, 11)]
"""Decode, prefill, a chunk of a prefill, a verify run, a prompt of one token: (cached, added) by request."""

BATCHES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 1), (3, 1), (4, 1), (17, 1), (8, 1)],
    "one request decodes": [(11, 1)],
    "prefill": [(0, 3), (0, 4), (0, 9), (0, 1)],
    "one long prefill": [(0, 70)],
    "chunks of prefills": [(4, 4), (3, 6), (30, 7)],
    "verify": [(6, 4), (7, 4), (15, 4)],
    "ragged verify": [(6, 2), (8, 5), (3, 1), (12, 3)],
    "blocks just filled": [(3, 1), (0, 4), (4, 4), (7, 1)],
    "long and short contexts": [(120, 1), (2, 1), (90, 4), (0, 2)],
    "mixed": MIXED,
}

LAYERS: dict[str, dict[str, Any]] = {
    "as many K/V heads as heads": {"num_kv_heads": 4},
    "grouped heads": {"num_heads": 6, "num_kv_heads": 2},
    "one K/V head": {"num_kv_heads": 1},
    "scaling": {"scaling": 0.5},
    "head width 64": {"head_dim": 64},
    "head width 80": {"head_dim": 80},
    "head width 96": {"head_dim": 96},
    "head width 128": {"head_dim": 128},
    "head width 256": {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1},
    "narrower values": {"head_dim": 24, "v_head_dim": 16},
    "wider values": {"head_dim": 16, "v_head_dim": 32},
    "window": {"sliding_window": 5},
    "window of one block": {"sliding_window": 4},
    "window of one token": {"sliding_window": 1},
    "window wider than the text": {"sliding_window": 500},
    "chunks": {"chunk_size": 6},
    "soft cap": {"softcap": 2.0, "scaling": 1.0},
    "window and soft cap": {"sliding_window": 5, "softcap": 2.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "sliding_window": 5},
}

TREES: list[list[int]] = [[-1, 0, 0, 1, 1, 2, 3], [-1], [-1, 0, 1, 2], [-1, 0, 0, 0, 0]]
"""Parents of each request's tokens; the third is a chain."""

FORESTS: list[list[int]] = [[-1, -1, 0, 1, 1, -1, 2], [-1, 0, 1], [-1, -1, -1], [-1, 0, -1, 2, 2]]
"""The same with several roots, which come late as well; the second is a chain."""


GROWN = 4
"""How many of the first nodes of `GROWING` earlier batches have run."""

GROWING: list[list[int]] = [[-1, -1, 0, 1, 2, 3, 3], [-1, 0, 1, 2, 3], [-1, -1, -1, -1, 2, 0, 4, -1], [-1, 0, 0, 1, 2]]
"""Trees in which new nodes follow cached ones, each other, and the context; the second is a chain."""

TREE_LAYERS: list[dict[str, Any]] = [{}, {"sliding_window": 3}, {"chunk_size": 4}]


class AttentionBackendContract(PluginContract):
    """What every attention backend must hold to. A subclass gives the fixture `backend`.

    A case that `AttentionBackend.supports` refuses is skipped; plain causal attention must be supported.
    """

    block_size: ClassVar[int] = 4
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    tolerance: ClassVar[float] = 2e-5
    """Largest absolute and relative difference from the reference, which is computed in float64."""

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        """The backend to check."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'backend'")

    # --- running ----------------------------------------------------------------------------------

    def case(
        self,
        lengths: Sequence[tuple[int, int]],
        layer: AttentionLayer | None = None,
        *,
        parents: Sequence[Sequence[int]] | None = None,
        num_cached_nodes: int = 0,
        num_layers: int = 1,
    ) -> AttentionCase:
        """A random case in this contract's dtype, device and block size."""
        return attention_case(
            lengths,
            layer or attention_layer(),
            block_size=self.block_size,
            parents=parents,
            num_cached_nodes=num_cached_nodes,
            dtype=self.dtype,
            device=self.device,
            num_layers=num_layers,
        )

    def require(self, backend: AttentionBackend, *layers: AttentionLayer, trees: bool = False) -> None:
        """Skip the test when the backend refuses these layers."""
        reasons = backend.supports(self._requirements(*layers, trees=trees))
        if reasons:
            pytest.skip("; ".join(reasons))

    def _requirements(self, *layers: AttentionLayer, trees: bool = False) -> Any:
        dtype = str(self.dtype).removeprefix("torch.")
        return attention_requirements(layers, block_size=self.block_size, dtype=dtype, device=self.device, trees=trees)

    def attend(self, backend: AttentionBackend, case: AttentionCase) -> torch.Tensor:
        """One layer of one step."""
        plan = backend.plan(case.batch, case.cache)
        return backend.attend(case.query, case.key, case.value, case.layer, plan, case.sinks)

    def expect(self, case: AttentionCase, got: torch.Tensor) -> None:
        """Assert that an output is the reference's, given the cache after the step."""
        kv = case.cache.layers[case.layer.index]
        want = attention_reference(case.batch, kv, self.block_size, case.query, case.layer, case.sinks)
        self.close(got, want)

    def close(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Assert equality within the tolerance."""
        torch.testing.assert_close(got.double().cpu(), want.double().cpu(), rtol=self.tolerance, atol=self.tolerance)

    # --- checks -----------------------------------------------------------------------------------

    def test_supports_plain_attention(self, backend: AttentionBackend) -> None:
        """Causal attention with grouped heads is the least a backend must do."""
        assert backend.supports(self._requirements(attention_layer())) == []

    def test_supports_gives_reasons(self, backend: AttentionBackend) -> None:
        """Whatever is asked for, the answer is a list of sentences."""
        odd = attention_layer(head_dim=7, v_head_dim=9, sliding_window=3, chunk_size=5, softcap=1.0, sinks=True)
        reasons = backend.supports(self._requirements(odd, trees=True))
        assert isinstance(reasons, list)
        assert all(isinstance(reason, str) and reason for reason in reasons)

    def test_has_a_name(self, backend: AttentionBackend) -> None:
        """The name is what users and logs call it by."""
        assert backend.name
        assert isinstance(backend.priority, int)

    @pytest.mark.parametrize("name", BATCHES)
    def test_batches(self, backend: AttentionBackend, name: str) -> None:
        """Every mix of prefill, decode and verify, over blocks anywhere in the cache, equals the reference."""
        case = self.case(BATCHES[name])
        self.expect(case, self.attend(backend, case))

    @pytest.mark.parametrize("name", LAYERS)
    def test_layers(self, backend: AttentionBackend, name: str) -> None:
        """Every kind of layer equals the reference."""
        layer = attention_layer(**LAYERS[name])
        self.require(backend, layer)
        case = self.case(MIXED, layer)
        self.expect(case, self.attend(backend, case))

    def test_trees(self, backend: AttentionBackend) -> None:
        """In a draft tree a token sees the context, its ancestors and itself."""
        for layer in (attention_layer(), attention_layer(sliding_window=3)):
            self.require(backend, layer, trees=True)
            lengths = [(cached, len(row)) for cached, row in zip((5, 9, 0, 3), TREES, strict=True)]
            case = self.case(lengths, layer, parents=TREES)
            self.expect(case, self.attend(backend, case))

    def test_trees_with_several_roots(self, backend: AttentionBackend) -> None:
        """Tokens without a parent follow the context, and do not see one another; draft heads grow such trees."""
        for layer in (attention_layer(), attention_layer(sliding_window=3)):
            self.require(backend, layer, trees=True)
            lengths = [(cached, len(row)) for cached, row in zip((9, 5, 0, 3), FORESTS, strict=True)]
            case = self.case(lengths, layer, parents=FORESTS)
            self.expect(case, self.attend(backend, case))

    @pytest.mark.parametrize("fields", TREE_LAYERS, ids=str)
    def test_trees_grow_in_the_cache(self, backend: AttentionBackend, fields: dict[str, Any]) -> None:
        """A level of a tree runs alone: its nodes see their ancestors among the nodes that earlier batches have run."""
        layer = attention_layer(**fields)
        self.require(backend, layer, trees=True)
        lengths = [(context + GROWN, len(row) - GROWN) for context, row in zip((9, 5, 0, 3), GROWING, strict=True)]
        case = self.case(lengths, layer, parents=GROWING, num_cached_nodes=GROWN)
        self.expect(case, self.attend(backend, case))

    def test_a_node_at_a_time(self, backend: AttentionBackend) -> None:
        """A tree whose nodes run one after another gives what it gives at once."""
        layer = attention_layer(sliding_window=3)
        self.require(backend, layer, trees=True)
        tree = FORESTS[0]
        whole = self.case([(9, len(tree))], layer, parents=[tree])
        want, got = self.attend(backend, evolve(whole, cache=copy_cache(whole.cache))), list[torch.Tensor]()
        parents = torch.tensor(tree, dtype=torch.int32, device=self.device)
        for node in range(len(tree)):
            part = _part(whole, 9 + node, 10 + node, first=9)
            nodes = parents[None, :node] if node else None
            batch = evolve(part.batch, parents=parents[node : node + 1], cached_parents=nodes)
            got.append(self.attend(backend, evolve(part, batch=batch)))
        self.close(torch.cat(got), want)

    def test_windows_count_depth(self, backend: AttentionBackend) -> None:
        """Nodes of a tree take slots, but their positions go by depth: the eighth child of the anchor still sees the
        last tokens of the context, where a window by slots would have passed them."""
        layer = attention_layer(sliding_window=4)
        self.require(backend, layer, trees=True)
        star, fork = [-1, *[0] * 8], [-1, 0, 0, 0, 3, 3, 5]
        case = self.case([(20, len(star)), (9, len(fork))], layer, parents=[star, fork])
        assert case.batch.positions.tolist() == [20, *[21] * 8, 9, 10, 10, 10, 11, 11, 12]
        self.expect(case, self.attend(backend, case))

    def test_chains_as_trees(self, backend: AttentionBackend) -> None:
        """A tree without branches is a chain."""
        self.require(backend, attention_layer(), trees=True)
        chains = [list(range(-1, added - 1)) for _, added in MIXED]
        tree, chain = self.case(MIXED, parents=chains), self.case(MIXED)
        self.close(self.attend(backend, tree), self.attend(backend, chain))

    def test_output_form(self, backend: AttentionBackend) -> None:
        """The output is contiguous, in the queries' dtype and as wide as the values."""
        layer = attention_layer()
        case = self.case(MIXED, layer)
        got = self.attend(backend, case)
        assert got.shape == (len(case.query), layer.num_heads, layer.v_head_dim)
        assert got.dtype == case.query.dtype
        assert got.is_contiguous()

    def test_writes_new_kv_and_nothing_else(self, backend: AttentionBackend) -> None:
        """The batch's keys and values are in their slots afterwards; every other slot is as it was."""
        case = self.case(MIXED)
        before = copy_cache(case.cache).layers[0]
        self.attend(backend, case)
        after, slots = case.cache.layers[0], case.batch.slot_mapping
        for new, old, given in (
            (after.keys, before.keys, case.key),
            (after.values, before.values, case.value),
        ):
            old[slots] = given.to(old.dtype)
            assert torch.equal(new, old)

    def test_inputs_unchanged(self, backend: AttentionBackend) -> None:
        """Queries, keys, values and the batch are only read."""
        case = self.case(MIXED)
        given = {"query": case.query, "key": case.key, "value": case.value, **asdict(case.batch, recurse=False)}
        given = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        before = {name: value.clone() for name, value in given.items()}
        self.attend(backend, case)
        assert [name for name, value in given.items() if not torch.equal(value, before[name])] == []

    def test_strided_inputs(self, backend: AttentionBackend) -> None:
        """Queries, keys and values may be slices of one fused projection."""
        case = self.case(MIXED)
        fused = torch.cat([part.flatten(1) for part in (case.query, case.key, case.value)], dim=1)
        widths = [part.flatten(1).shape[1] for part in (case.query, case.key, case.value)]
        query, key, value = (
            view.view(part.shape)
            for view, part in zip(torch.split(fused, widths, dim=1), (case.query, case.key, case.value), strict=True)
        )
        sliced = evolve(case, query=query, key=key, value=value)
        self.expect(case, self.attend(backend, sliced))

    def test_batch_equals_singles(self, backend: AttentionBackend) -> None:
        """A request's output does not depend on the others in the batch."""
        case = self.case(MIXED)
        alone = [only_request(case, request) for request in range(len(MIXED))]
        self.close(torch.cat([self.attend(backend, one) for one in alone]), self.attend(backend, case))

    def test_layers_share_a_plan(self, backend: AttentionBackend) -> None:
        """One plan serves all layers of a step, with and without windows, each over its own cache."""
        layers = [attention_layer(index=i, sliding_window=window) for i, window in enumerate((None, 3, None, 6))]
        self.require(backend, *layers)
        case = self.case(MIXED, num_layers=len(layers))
        plan = backend.plan(case.batch, case.cache)
        for layer in layers:
            got = backend.attend(case.query, case.key, case.value, layer, plan)
            self.expect(evolve(case, layer=layer), got)

    def test_steps_continue_each_other(self, backend: AttentionBackend) -> None:
        """A text in one prefill gives what it gives in chunks and single tokens over the same blocks."""
        whole = self.case([(0, 20)])
        want = self.attend(backend, whole)
        cache = copy_cache(self.case([(0, 20)]).cache)
        got = []
        for start, end in ((0, 7), (7, 8), (8, 12), (12, 13), (13, 20)):
            part = _part(evolve(whole, cache=cache), start, end)
            got.append(self.attend(backend, part))
        self.close(torch.cat(got), want)

    def test_rejected_drafts_are_overwritten(self, backend: AttentionBackend) -> None:
        """K/V of tokens that a verifier rejected stay in their slots unseen until the next step writes there."""
        whole = self.case([(0, 12)])
        self.attend(backend, whole)  # positions 8 to 11 are then rejected and decoded anew with other keys and values
        again = evolve(whole, key=whole.key.flip(0), value=whole.value.flip(0))
        for start, end in ((8, 9), (9, 12)):
            part = _part(again, start, end)
            self.expect(part, self.attend(backend, part))

    def test_cached_slots_alone_are_read(self, backend: AttentionBackend) -> None:
        """Slots of other requests and free slots do not matter, whatever number is in them."""
        case = self.case(MIXED)
        other = evolve(case, cache=copy_cache(case.cache))
        mine = set(cached_slots(case.batch, self.block_size)) | set(case.batch.slot_mapping.tolist())
        num_slots = case.cache.num_blocks * self.block_size
        rest = [slot for slot in range(num_slots) if slot not in mine]
        other.cache.layers[0].keys[rest] = -7.0
        other.cache.layers[0].values[rest] = 3.0
        assert torch.equal(self.attend(backend, case), self.attend(backend, other))


def _part(case: AttentionCase, start: int, end: int, first: int = 0) -> AttentionCase:
    """Tokens ``start`` to ``end - 1`` of a case of one request that was to run from ``first`` on at once."""
    rows = slice(start - first, end - first)
    batch = evolve(
        case.batch,
        input_ids=case.batch.input_ids[rows],
        positions=case.batch.positions[rows],
        slot_mapping=case.batch.slot_mapping[rows],
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=case.query.device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=case.query.device),
        logits_indices=torch.arange(end - start, device=case.query.device),
        max_query_len=end - start,
        max_seq_len=end,
    )
    return evolve(case, batch=batch, query=case.query[rows], key=case.key[rows], value=case.value[rows])
