"""What a step computed, as proposers see it: kept rows of chains, trees, chunks and requests that were cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specdec import LLM, SamplingParams
from specdec.drafting import Proposer
from specdec.testing import RandomProposer, WrappedProposer, tiny_model, use_proposer
from specdec.types import ComputedStep, Draft, Needs, ProposalInput, RequestInfo

torch.set_num_threads(1)
VOCAB = 64


class Recorder(WrappedProposer):
    """Passes on random drafts, and keeps what it was shown."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.steps: list[ComputedStep] = []
        self.events: list[tuple[str, str]] = []

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(every_step=True, hidden_states=True, lookahead_slots=3)

    def start(self, request: RequestInfo) -> None:
        self.events.append(("start", request.request_id))

    def propose(self, batch: ProposalInput) -> Draft:
        assert batch.computed is not None
        self.steps.append(batch.computed)
        self.events += [("step", name) for name in batch.computed.request_ids]
        assert set(batch.request_ids) <= set(batch.computed.request_ids)
        return super().propose(batch)

    def finish(self, request_id: str) -> None:
        self.events.append(("finish", request_id))


def run(tmp_path: Any, *, trees: bool, **settings: Any) -> tuple[Recorder, LLM]:
    path = tiny_model("llama", tmp_path / "m", vocab_size=VOCAB, eos_token_id=None)
    recorder = Recorder(RandomProposer(VOCAB, trees=trees))
    settings = {"max_model_len": 64, "kv_cache_memory": "1MiB", "block_size": 4, "stat_loggers": ()} | settings
    engine = LLM(str(path), dtype="float32", **use_proposer(recorder, 4), **settings)
    prompts = [[5, 6, 7], list(range(2, 32)), [9] * 11]
    params = [SamplingParams(temperature=1, seed=1, max_tokens=n, ignore_eos=True) for n in (1, 9, 14)]
    engine.generate(prompts, params, use_tqdm=False)
    return recorder, engine


def test_kept_rows_are_the_text(tmp_path: Any) -> None:
    """The tokens of kept rows are those of the text, at their positions, for chains and for trees."""
    for trees in (False, True):
        recorder, engine = run(tmp_path / str(trees), trees=trees, max_num_batched_tokens=16)
        accepted = 0
        for step in recorder.steps:
            batch, hidden = step.batch, step.target.hidden_states
            assert hidden is not None
            assert len(hidden) == len(batch.input_ids)
            for row, text in enumerate(step.token_ids):
                kept = torch.from_numpy(step.kept[step.kept_start[row] : step.kept_start[row + 1]])
                first, end = int(step.first_position[row]), int(step.num_computed[row])
                assert batch.positions[kept].tolist() == list(range(first, end))
                assert batch.input_ids[kept].tolist() == text[first:end].tolist()
                own = range(*batch.query_start_loc[row : row + 2].tolist())
                assert set(kept.tolist()) <= set(own)
                if step.samples[row] and not step.finished[row]:
                    assert end == len(text) - 1
                    accepted += len(kept) - 1
        assert engine.stats().num_accepted_tokens <= accepted
        engine.close()


def test_every_request_is_shown_from_its_start_to_its_end(tmp_path: Any) -> None:
    """Also a request of one step, prefill chunks, and the step in which a request ends."""
    recorder, engine = run(tmp_path, trees=False, max_num_batched_tokens=16)
    names = {name for _, name in recorder.events}
    assert len(names) == 3
    for name in names:
        own = [kind for kind, other in recorder.events if other == name]
        assert own[0] == "start"
        assert own[-1] == "finish"
        assert set(own[1:-1]) == {"step"}
    assert any(not step.samples.all() for step in recorder.steps)
    assert sum(int(step.finished.sum()) for step in recorder.steps) == 3
    assert engine.stats().num_proposer_faults == 0
    assert engine.stats().free_blocks == engine.stats().total_blocks
    engine.close()


def test_block_tables_reach_over_the_lookahead(tmp_path: Any) -> None:
    """K/V of a draft behind the newest token has its slots in the tables of the step, in blocks of the request."""
    recorder, engine = run(tmp_path, trees=False)
    for step in recorder.steps:
        tables = step.batch.block_tables.numpy()
        used: list[int] = []
        for row in np.flatnonzero(step.samples & ~step.finished):
            end = min(int(step.num_computed[row]) + 3, 64)
            assert tables.shape[1] * 4 >= end
            used += tables[row, : -(-end // 4)].tolist()
        assert len(set(used)) == len(used)
    engine.close()
