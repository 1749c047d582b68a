"""Attention layers of a proposer's own, over K/V that share the target's blocks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from specdec.attention.paged import allocate_kv_cache
from specdec.target import bridge
from specdec.types import AttentionRequirements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from specdec.attention.interface import AttentionBackend, KVCache, KVGeometry
    from specdec.target.bridge import QueryScale
    from specdec.types import AttentionLayer, EngineContext, PackedBatch


def draft_backend(engine: EngineContext, requirements: AttentionRequirements) -> AttentionBackend:
    """The attention backend for draft layers: the engine's choice where they run on the same kind of device, else the
    best installed one.

    Raises:
        PluginUnsuitableError: none can serve them; all reasons are listed.
        RuntimeError: ``engine`` has no registry.
    """
    if engine.registry is None:
        raise RuntimeError("draft layers choose an attention backend through EngineContext.registry, which is not set")
    wanted = str(engine.settings.get("attention_backend", "auto")) if requirements.device == engine.device else "auto"
    return engine.registry.attention_backends(requirements, engine, wanted=wanted)


class DraftLayers:
    """Draft layers with their K/V and the backend that attends over it."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        backend: AttentionBackend,
        cache: KVCache,
        query_scales: Mapping[int, QueryScale] | None = None,
    ) -> None:
        """Hold the parts; use `build`.

        Args:
            layers: as numbered by the modules that call `specdec.target.bridge.attend`.
            backend: serves these layers.
            cache: their K/V, with the number and size of the target's blocks.
            query_scales: layers whose queries are scaled by position.
        """
        self.layers = tuple(layers)
        self.cache = cache
        self._backend = backend
        self._query_scales = query_scales or {}

    @classmethod
    def build(
        cls,
        engine: EngineContext,
        layers: Sequence[AttentionLayer],
        *,
        dtype: torch.dtype,
        device: torch.device,
        geometry: KVGeometry,
        query_scales: Mapping[int, QueryScale] | None = None,
        trees: bool = False,
    ) -> DraftLayers:
        """Choose a backend and allocate K/V.

        Args:
            engine: facts about the engine.
            layers: the draft's attention layers.
            dtype: of their weights and K/V.
            device: where they run.
            geometry: `specdec.target.TargetModel.kv_geometry` of the target.
            query_scales: layers whose queries are scaled by position.
            trees: whether batches of tree nodes will be run.

        Raises:
            PluginUnsuitableError: no attention backend serves the layers.
        """
        requirements = AttentionRequirements(
            layers=tuple(layers),
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            block_size=geometry.block_size,
            trees=trees,
        )
        backend = draft_backend(engine, requirements)
        return cls(layers, backend, allocate_kv_cache(layers, dtype, device, geometry), query_scales)

    @contextmanager
    def attending(self, batch: PackedBatch) -> Iterator[None]:
        """Inside, `specdec.target.bridge.attend` writes and reads these layers' K/V of the batch's requests."""
        plan = self._backend.plan(batch, self.cache)
        context = bridge.StepContext(self._backend, plan, self.layers, {}, self._query_scales, batch.positions)
        with bridge.using(context):
            yield

    @property
    def num_bytes(self) -> int:
        """Bytes of the K/V."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
