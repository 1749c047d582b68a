"""After every step the head's K/V is what the head would compute over the committed text from scratch.

Known bug 46: through prefill in chunks, cached prefixes, preemption, rejected drafts, accepted paths of trees and
rows of mask tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import SamplingParams
from specdec.target import bridge
from specdec.testing import load_module
from specdec.testing.heads import tiny_head
from tests.heads.test_lossless import PROMPTS, SHAPES


class Recording(bridge.ReferenceContext):
    """Dense attention that keeps the keys and values of every layer."""

    def __init__(self, head: Any, positions: Tensor) -> None:
        super().__init__(head.attention_layers, {}, head.query_scales, positions)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        self.kept[layer_index] = (key.clone(), value.clone())
        return super().attend(layer_index, query, key, value, sinks)


def from_scratch(module: Any, head: Any, text: np.ndarray, count: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of rows 0 to ``count - 1``, from the plain model's hidden states."""
    ids = torch.from_numpy(text.copy())
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda _module, _inputs, output: outputs.update({layer: output[0]})

    handles = [module.model.layers[layer].register_forward_hook(keep(layer)) for layer in head.taps]
    final = module.model(ids[None, :count]).last_hidden_state[0]
    for handle in handles:
        handle.remove()
    taken = tuple(outputs[layer] for layer in head.taps) or (final,)
    context = Recording(head, torch.arange(count))
    with bridge.using(context):
        head.forward(ids[1 : count + 1], head.fuse(taken), torch.arange(count), 0)
    return context.kept


class Checker:
    """Wraps a proposer's `propose`."""

    def __init__(self, proposer: Any, module: Any) -> None:
        self.proposer, self.module, self.propose = proposer, module, proposer.propose
        self.checked = 0
        self.worst = 0.0

    @torch.inference_mode()
    def __call__(self, batch: Any) -> Any:
        draft = self.propose(batch)
        computed = batch.computed
        for row, text in enumerate(computed.token_ids):
            count = min(int(computed.num_computed[row]), len(text) - 1)
            if not computed.finished[row] and count:
                self._check(computed.batch.block_tables[row], text, count)
        return draft

    def _check(self, table: Tensor, text: np.ndarray, count: int) -> None:
        cache, positions = self.proposer.layers.cache, torch.arange(count)
        slots = table[positions // cache.block_size].long() * cache.block_size + positions % cache.block_size
        expected = from_scratch(self.module, self.proposer.head, text, count)
        for layer, (keys, values) in expected.items():
            held = cache.layers[layer]
            for found, wanted in ((held.keys[slots], keys), (held.values[slots], values)):
                self.worst = max(self.worst, float((found - wanted).abs().max()))
        self.checked += 1


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle", "chain"),
        ("eagle", "dynamic tree"),
        ("eagle3", "chain"),
        ("eagle3", "dynamic tree"),
        ("peagle", "chain"),
    ],
)
def test_equals_a_computation_from_scratch(start, model, tmp_path, kind, shape):
    head = tiny_head(kind, model, tmp_path / "head")
    engine = start(
        {"model": str(head), **SHAPES[shape]},
        max_num_batched_tokens=29,
        kv_cache_memory="400KiB",
        block_size=8,
    )
    proposer = engine._engine.core.parts.drafting.proposer
    checker = proposer.propose = Checker(proposer, load_module(model))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=14, ignore_eos=True)
        engine.generate(PROMPTS, params, use_tqdm=False)
    assert checker.checked > 50
    assert checker.worst < 1e-4
