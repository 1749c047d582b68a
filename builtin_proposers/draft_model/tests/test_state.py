"""The drafter's K/V follows the target's through every kind of step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.attention.sdpa import SdpaBackend
from specdec.config import EngineConfig
from specdec.target.model import TargetModel, load_target
from specdec.types import Needs, PackedBatch, ProposalInput

Start = Callable[..., LLM]
LENGTH = 256


class FreshForward:
    """A model of its own, which runs whole texts from the first token on."""

    def __init__(self, path: str) -> None:
        self.model: TargetModel = load_target(EngineConfig(model=path, dtype="float32", device="cpu"))
        self.cache = self.model.allocate_kv_cache(1, LENGTH)
        self.model.bind(SdpaBackend(), self.cache, Needs())

    def keys_and_values(self, token_ids: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[n, heads, width] keys and values of each layer."""
        count = len(token_ids)
        at = torch.arange(count)
        self.model.forward(
            PackedBatch(
                input_ids=torch.from_numpy(np.array(token_ids)),
                positions=at,
                slot_mapping=at,
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([count], dtype=torch.int32),
                block_tables=torch.zeros(1, 1, dtype=torch.int32),
                logits_indices=at[-1:],
                max_query_len=count,
                max_seq_len=count,
            )
        )
        return [(layer.keys[:count].clone(), layer.values[:count].clone()) for layer in self.cache.layers]


class Watcher:
    """Compares, after every proposal of an engine, the drafter's K/V of all valid positions with a fresh forward."""

    def __init__(self, engine: LLM, path: str) -> None:
        self.proposer: Any = proposer_of(engine)
        self.fresh = FreshForward(path)
        self.num_compared = 0
        self.num_steps = 0
        self.tokens_run = 0
        self.longest_pass = 0
        self._propose, self.proposer.propose = self.proposer.propose, self.propose
        drafter = self.proposer.drafter
        self._forward, drafter.forward = drafter.forward, self.forward

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        self.tokens_run += len(batch.input_ids)
        self.longest_pass = max(self.longest_pass, len(batch.input_ids))
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens of one pass go to one slot"
        logits: torch.Tensor = self._forward(batch)
        return logits

    def propose(self, batch: ProposalInput) -> Any:
        draft = self._propose(batch)
        computed = batch.computed
        assert computed is not None
        self.num_steps += 1
        size = self.proposer.drafter.cache.block_size
        tables = computed.batch.block_tables.numpy()
        for row, name in enumerate(computed.request_ids):
            count = self.proposer._validity._states[name].num_valid
            assert count <= len(computed.token_ids[row])
            if not count:
                continue
            at = np.arange(count)
            slots = torch.from_numpy(tables[row, at // size].astype(np.int64) * size + at % size)
            expected = self.fresh.keys_and_values(computed.token_ids[row][:count])
            for layer, (keys, values) in zip(self.proposer.drafter.cache.layers, expected, strict=True):
                torch.testing.assert_close(layer.keys[slots], keys, rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(layer.values[slots], values, rtol=1e-3, atol=1e-4)
            self.num_compared += count
        return draft


def proposer_of(engine: LLM) -> Any:
    """The engine's proposer."""
    drafting = engine._engine.core.parts.drafting
    assert drafting is not None
    return drafting.proposer


def random_prompts(rng: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    """Prompts of which some share a beginning."""
    stem = rng.integers(2, 128, longest).tolist()
    prompts = []
    for _ in range(count):
        shared, own = int(rng.integers(0, longest)), int(rng.integers(1, longest))
        prompts.append([*(stem[:shared] if rng.random() < 0.6 else []), *rng.integers(2, 128, own).tolist()])
    return prompts


def output(outputs: list[Any]) -> list[list[int]]:
    return [choice.token_ids for one in outputs for choice in one.outputs]


SHORT: list[tuple[str, dict[str, Any]]] = [
    ("target", {"block_size": 4, "max_num_batched_tokens": 24}),
    ("other", {"block_size": 4, "num_blocks": 50, "max_num_batched_tokens": 64}),
    ("other", {"block_size": 2, "num_blocks": 100, "max_num_seqs": 3, "max_num_batched_tokens": 9}),
]
LONG: list[tuple[str, dict[str, Any]]] = [
    ("other", {}),
    ("target", {"block_size": 4, "num_blocks": 50, "max_num_batched_tokens": 64}),
    ("target", {"block_size": 8, "num_blocks": 26, "enable_prefix_caching": False}),
    ("target", {"block_size": 2, "num_blocks": 100, "max_num_seqs": 3, "max_num_batched_tokens": 9}),
    ("other", {"block_size": 1, "num_blocks": 300}),
]


@pytest.mark.parametrize(
    ("drafter", "case"), [*SHORT, *(pytest.param(*values, marks=pytest.mark.slow) for values in LONG)]
)
def test_valid_positions_equal_a_fresh_forward(
    start: Start, target: str, other: str, drafter: str, case: dict[str, Any]
) -> None:
    """After every step, whatever the schedule: chunked prefill, preemption, prefix hits, mixed lengths, ends."""
    settings = dict(case)
    path = {"target": target, "other": other}[drafter]
    num_blocks = settings.pop("num_blocks", None)
    rng = np.random.default_rng(sum(map(ord, repr(case))))
    if num_blocks is not None:
        plan = start(path, max_model_len=96, **settings)
        per_token = plan._engine.core.parts.target.kv_bytes_per_token() + proposer_of(plan).kv_bytes_per_token()
        settings["kv_cache_memory"] = num_blocks * settings["block_size"] * per_token
    engine = start(path, k=int(rng.integers(1, 6)), max_model_len=96, **settings)
    watcher = Watcher(engine, path)
    plain = start(max_model_len=96)
    for _ in range(2):
        prompts = random_prompts(rng, 6, 40)
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 1.0])),
                seed=int(rng.integers(100)),
                max_tokens=int(rng.integers(1, 24)),
            )
            for _ in prompts
        ]
        choices = [None, None, {"num_speculative_tokens": 1}, False, {"num_speculative_tokens": 0}]
        speculation = [choices[int(rng.integers(len(choices)))] for _ in prompts]
        got = engine.generate(prompts, params, use_tqdm=False, speculation=speculation)
        assert output(got) == output(plain.generate(prompts, params, use_tqdm=False))
    assert watcher.num_compared > 100
    if num_blocks is None:
        return
    assert engine._engine.core.parts.scheduler.kv_cache.num_blocks == num_blocks


def test_small_caches_do_preempt(start: Start, other: str) -> None:
    """Requests are preempted with drafts in flight and come back with other blocks."""
    engine = start(other, max_model_len=96, block_size=4, kv_cache_memory="90KiB")
    watcher = Watcher(engine, other)
    rng = np.random.default_rng(3)
    requests: list[Any] = []
    add = engine._engine.core.add
    engine._engine.core.add = lambda request: (requests.append(request), add(request))[1]  # type: ignore[method-assign]
    prompts = random_prompts(rng, 8, 30)
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert sum(request.num_preemptions for request in requests) > 0
    assert watcher.num_compared > 0


def test_a_cached_prefix_is_not_run_again(start: Start, other: str) -> None:
    """The drafter's K/V of a finished request's blocks serves the next request, down to its last full block."""
    engine = start(other, block_size=2)
    watcher = Watcher(engine, other)
    prompt = np.random.default_rng(0).integers(2, 128, 61).tolist()
    [first] = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    text = [*prompt, *first.outputs[0].token_ids]
    watcher.longest_pass = 0
    [second] = engine.generate(text, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert second.num_cached_tokens == len(text) - 1
    assert watcher.longest_pass == 2


def test_a_prefix_that_the_drafter_never_saw_is_run(start: Start, other: str) -> None:
    """A request without speculation leaves blocks of the target alone; the next one's drafter runs over them."""
    engine = start(other, block_size=4)
    watcher = Watcher(engine, other)
    prompt = np.random.default_rng(1).integers(2, 128, 61).tolist()
    params = SamplingParams(temperature=0, max_tokens=8)
    plain = engine.generate(prompt, params, use_tqdm=False, speculation=False)
    assert watcher.tokens_run == 0
    again = engine.generate(prompt, params, use_tqdm=False)
    assert again[0].num_cached_tokens == 60
    assert output(plain) == output(again)
    assert watcher.longest_pass == 62
    assert watcher.num_compared > 61


def test_full_acceptance_is_caught_up_in_the_same_pass(start: Start, target: str) -> None:
    """With the target as its own drafter each step runs two tokens, then one per further draft token."""
    engine = start(target, k=3)
    watcher = Watcher(engine, target)
    engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=21, ignore_eos=True), use_tqdm=False)
    stats = engine.stats()
    assert stats.acceptance_rate == 1.0
    assert stats.num_steps == 1 + 5
    # 3 prompt tokens and the first output; then (d3, bonus), d1, d2 in each step that drafts
    assert watcher.tokens_run == (4 + 2) + 4 * (2 + 2)


def test_nothing_is_kept_of_ended_requests(start: Start, other: str) -> None:
    """States go with their requests, aborted ones too."""
    engine = start(other)
    engine.generate([[3, 4, 5], [6] * 40], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert proposer_of(engine)._validity._states == {}
    assert proposer_of(engine)._never == set()
