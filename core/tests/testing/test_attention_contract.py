"""The contract of attention backends passes the reference itself and catches every planted fault."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from specdec.attention.interface import AttentionBackend, KVCache
from specdec.testing.contracts import AttentionBackendContract
from specdec.testing.reference import attention_reference
from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch

torch.set_num_threads(1)


@frozen
class Plan:
    batch: PackedBatch
    cache: KVCache


class Sound(AttentionBackend):
    """The reference as a backend."""

    name = "sound"

    def supports(self, requirements: AttentionRequirements) -> list[str]:
        return []

    def plan(self, batch: PackedBatch, cache: KVCache) -> Plan:
        return Plan(batch, cache)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        plan: Plan,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv = plan.cache.layers[layer.index]
        kv.keys[plan.batch.slot_mapping] = key
        kv.values[plan.batch.slot_mapping] = value
        out = attention_reference(plan.batch, kv, plan.cache.block_size, query, layer, sinks)
        return out.to(query.dtype)


class SoundContract(AttentionBackendContract):
    @pytest.fixture
    def backend(self) -> Sound:
        return Sound()


class TestSound(SoundContract):
    pass


class TestSoundWithLargerBlocks(SoundContract):
    block_size = 16


# --- faults ------------------------------------------------------------------------------------


def changed(**changes: Any) -> Callable[[], AttentionBackend]:
    """A backend that takes the layer's or the batch's facts for others; values are functions of the true ones."""

    class Changed(Sound):
        def plan(self, batch: PackedBatch, cache: KVCache) -> Plan:
            names = [name for name in changes if hasattr(batch, name)]
            return Plan(evolve(batch, **{name: changes[name](getattr(batch, name)) for name in names}), cache)

        def attend(  # type: ignore[override]
            self, query: Any, key: Any, value: Any, layer: AttentionLayer, plan: Plan, sinks: Any = None
        ) -> torch.Tensor:
            names = [name for name in changes if hasattr(layer, name)]
            other = evolve(layer, **{name: changes[name](getattr(layer, name)) for name in names})
            if "sinks" in changes:
                sinks = None
            return super().attend(query, key, value, other, plan, sinks)

    Changed.__name__ = "changes " + " and ".join(changes)
    return Changed


def spoilt(name: str, spoil: Callable[..., Any]) -> Callable[[], AttentionBackend]:
    """A backend whose output, or whose arguments on the way, something is done to."""

    class Spoilt(Sound):
        def attend(  # type: ignore[override]
            self, query: Any, key: Any, value: Any, layer: AttentionLayer, plan: Plan, sinks: Any = None
        ) -> torch.Tensor:
            out = super().attend(query, key, value, layer, plan, sinks)
            result: torch.Tensor = spoil(out=out, query=query, key=key, value=value, layer=layer, plan=plan)
            return result

    Spoilt.__name__ = name
    return Spoilt


class Refuses(Sound):
    def supports(self, requirements: AttentionRequirements) -> list[str]:
        return ["not today"]


class AnswersInText(Sound):
    def supports(self, requirements: AttentionRequirements) -> list[str]:
        return "trees" if requirements.trees else []  # type: ignore[return-value]


class Nameless(Sound):
    name = ""


class DoesNotWrite(Sound):
    def attend(  # type: ignore[override]
        self, query: Any, key: Any, value: Any, layer: AttentionLayer, plan: Plan, sinks: Any = None
    ) -> torch.Tensor:
        from specdec.testing.attention import copy_cache

        return super().attend(query, key, value, layer, Plan(plan.batch, copy_cache(plan.cache)), sinks)


class ReadsWholeBlocks(Sound):
    """Sees every slot of a request's last block, written or not."""

    def attend(  # type: ignore[override]
        self, query: Any, key: Any, value: Any, layer: AttentionLayer, plan: Plan, sinks: Any = None
    ) -> torch.Tensor:
        out = super().attend(query, key, value, layer, plan, sinks)
        size = plan.cache.block_size
        for request, length in enumerate(plan.batch.seq_lens.tolist()):
            if length % size:
                block = int(plan.batch.block_tables[request, length // size])
                last = int(plan.batch.query_start_loc[request + 1]) - 1
                out[last] += plan.cache.layers[layer.index].values[block * size + size - 1].mean() * 1e-6
        return out


class PlansForOneLayer(Sound):
    """Keeps the mask of the first layer it sees."""

    def __init__(self) -> None:
        self.seen: dict[int, AttentionLayer] = {}

    def attend(  # type: ignore[override]
        self, query: Any, key: Any, value: Any, layer: AttentionLayer, plan: Plan, sinks: Any = None
    ) -> torch.Tensor:
        first = self.seen.setdefault(id(plan), layer)
        return super().attend(query, key, value, evolve(first, index=layer.index), plan, sinks)


class NeedsContiguousInputs(Sound):
    def attend(  # type: ignore[override]
        self, query: Any, key: Any, value: Any, layer: AttentionLayer, plan: Plan, sinks: Any = None
    ) -> torch.Tensor:
        flat = torch.as_strided(query, query.shape, (query.shape[1] * query.shape[2], query.shape[2], 1))
        return super().attend(flat, key, value, layer, plan, sinks)


class LooksAtTheLongest(Sound):
    """Lets the batch's longest context into every request's softmax."""

    def attend(  # type: ignore[override]
        self, query: Any, key: Any, value: Any, layer: AttentionLayer, plan: Plan, sinks: Any = None
    ) -> torch.Tensor:
        return super().attend(query, key, value, layer, plan, sinks) * (1 + plan.batch.max_seq_len / 1000)


class ForgetsOldTokens(Sound):
    """Sees only what the batch brings."""

    def plan(self, batch: PackedBatch, cache: KVCache) -> Plan:
        added = batch.query_start_loc.diff()
        return Plan(evolve(batch, seq_lens=added.int()), cache)


class CountsSlots(Sound):
    """Takes places in the cache for positions, which trees tell apart."""

    def plan(self, batch: PackedBatch, cache: KVCache) -> Plan:
        places = [
            torch.arange(length - added, length)
            for length, added in zip(batch.seq_lens.tolist(), batch.query_start_loc.diff().tolist(), strict=True)
        ]
        return Plan(evolve(batch, positions=torch.cat(places)), cache)


class SeesTheWholeCache(Sound):
    """Knows ancestors in the batch alone, and lets a node see all that was cached before."""

    def plan(self, batch: PackedBatch, cache: KVCache) -> Plan:
        if batch.parents is None or batch.cached_parents is None:
            return Plan(batch, cache)
        parents = (batch.parents - batch.cached_parents.shape[1]).clamp(min=-1)
        return Plan(evolve(batch, parents=parents, cached_parents=None), cache)


def no_ancestors(cached_parents: torch.Tensor | None) -> torch.Tensor | None:
    return None if cached_parents is None else torch.full_like(cached_parents, -1)


class TakesOneRoot(Sound):
    """Lets every token of a tree see the first one that its request adds."""

    def plan(self, batch: PackedBatch, cache: KVCache) -> Plan:
        if batch.parents is None:
            return Plan(batch, cache)
        parents = batch.parents.clamp(min=0)
        parents[batch.query_start_loc[:-1].long()] = -1
        return Plan(evolve(batch, parents=parents), cache)


def write_too_much(plan: Plan, layer: AttentionLayer, out: torch.Tensor, **_: Any) -> torch.Tensor:
    plan.cache.layers[layer.index].values[(plan.batch.slot_mapping + 1) % (plan.cache.num_blocks * 4)] *= 1.5
    return out


def scale_query(query: torch.Tensor, out: torch.Tensor, **_: Any) -> torch.Tensor:
    query.mul_(0.5)
    return out


def read_free_slot(plan: Plan, layer: AttentionLayer, out: torch.Tensor, **_: Any) -> torch.Tensor:
    return out + plan.cache.layers[layer.index].values.mean() * 1e-3


def to_double(out: torch.Tensor, **_: Any) -> torch.Tensor:
    return out.double()


def strided(out: torch.Tensor, **_: Any) -> torch.Tensor:
    return out.transpose(0, 1).contiguous().transpose(0, 1)


def swap_heads(out: torch.Tensor, **_: Any) -> torch.Tensor:
    return out.flip(1)


def none(_: Any) -> None:
    return None


FAULTS: list[tuple[Callable[[], AttentionBackend], str]] = [
    (Refuses, "test_supports_plain_attention"),
    (AnswersInText, "test_supports_gives_reasons"),
    (Nameless, "test_has_a_name"),
    (ForgetsOldTokens, "test_batches"),
    (ReadsWholeBlocks, "test_batches"),
    (spoilt("swaps heads", swap_heads), "test_batches"),
    (changed(block_tables=lambda tables: tables.flip(0)), "test_batches"),
    (changed(num_kv_heads=lambda heads: 1), "test_layers"),
    (changed(scaling=lambda scaling: 0.25), "test_layers"),
    (changed(sliding_window=none), "test_layers"),
    (changed(sliding_window=lambda window: window and window + 1), "test_layers"),
    (changed(chunk_size=none), "test_layers"),
    (changed(softcap=none), "test_layers"),
    (changed(sinks=bool), "test_layers"),
    (changed(parents=none), "test_trees"),
    (TakesOneRoot, "test_trees_with_several_roots"),
    (SeesTheWholeCache, "test_trees_grow_in_the_cache"),
    (changed(cached_parents=no_ancestors), "test_a_node_at_a_time"),
    (CountsSlots, "test_windows_count_depth"),
    (changed(parents=lambda parents: None if parents is None else parents.clamp(max=0)), "test_chains_as_trees"),
    (spoilt("returns doubles", to_double), "test_output_form"),
    (spoilt("returns a strided view", strided), "test_output_form"),
    (DoesNotWrite, "test_writes_new_kv_and_nothing_else"),
    (spoilt("writes too much", write_too_much), "test_writes_new_kv_and_nothing_else"),
    (spoilt("scales the queries in place", scale_query), "test_inputs_unchanged"),
    (NeedsContiguousInputs, "test_strided_inputs"),
    (LooksAtTheLongest, "test_batch_equals_singles"),
    (PlansForOneLayer, "test_layers_share_a_plan"),
    (ForgetsOldTokens, "test_steps_continue_each_other"),
    (DoesNotWrite, "test_rejected_drafts_are_overwritten"),
    (spoilt("reads a free slot", read_free_slot), "test_cached_slots_alone_are_read"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_fault_is_caught(fault: Callable[[], AttentionBackend], check: str) -> None:
    """Each planted fault fails the check that is there for it."""
    function = getattr(AttentionBackendContract(), check)
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    names = [mark.args[0] for mark in marks]

    def run_all() -> None:
        for values in itertools.product(*(mark.args[1] for mark in marks)):
            function(fault(), **dict(zip(names, values, strict=True)))

    with pytest.raises((AssertionError, RuntimeError)):
        run_all()


def test_every_check_catches_something() -> None:
    """No check is idle: each has a fault above, or is one of packaging."""
    members = inspect.getmembers(AttentionBackendContract, inspect.isfunction)
    packaging = {"test_plugin_imports_without_torch", "test_hooks_are_declared", "test_core_version_range"}
    assert {name for name, _ in members if name.startswith("test_")} - packaging == {check for _, check in FAULTS}
