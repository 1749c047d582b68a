"""What the control of draft lengths learns of trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.control import AdaptiveControl
from specdec.control.acceptance import TreeAcceptance
from specdec.drafting import Proposer
from specdec.testing import tiny_model
from specdec.types import Draft, ProposalInput, ProposerCapabilities

PROMPT = [5, 9, 5, 9]
VOCAB = 128
TREE = (-1, -1, 0, 1)
"""Two wrong tokens, one behind the other, and behind them in the order of nodes two right ones."""


class SecondBranch(Proposer):
    """Drafts trees of `TREE` whose accepted path is nodes 1 and 3."""

    capabilities = ProposerCapabilities(trees=True)

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def propose(self, batch: ProposalInput) -> Draft:
        token_ids: list[int] = []
        counts = []
        for tokens, limit in zip(batch.token_ids, batch.max_draft_tokens.tolist(), strict=True):
            first, second = [*self._text[len(tokens) : len(tokens) + 2], 0, 0][:2]
            nodes = [(first + 1) % VOCAB, first, (second + 1) % VOCAB, second][:limit]
            token_ids += nodes
            counts.append(len(nodes))
        parents = [parent for count in counts for parent in TREE[:count]]
        return Draft(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            num_draft_tokens=torch.tensor(counts, dtype=torch.int32),
            parents=torch.tensor(parents, dtype=torch.int32),
        )


def test_it_is_told_the_nodes_of_the_accepted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that a stop ended says nothing; of the others the nodes count, not how many they are."""
    torch.set_num_threads(1)
    model = str(tiny_model("llama", tmp_path / "llama", vocab_size=VOCAB))
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory": "1MiB", "stat_loggers": ()}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, **settings) as llm:
        (plain,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    told: list[tuple[int, list[int]]] = []
    controls = set()
    record = AdaptiveControl.record_step

    def noting(self: AdaptiveControl, requests: int, rows: int, seconds: float, outcomes: Sequence[Any]) -> None:
        controls.add(type(self._acceptance))
        told.extend((drafted, list(nodes)) for _, drafted, nodes in outcomes)
        record(self, requests, rows, seconds, outcomes)

    monkeypatch.setattr(AdaptiveControl, "record_step", noting)
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, ids, caps: list(caps))
    proposer = SecondBranch([*PROMPT, *plain.outputs[0].token_ids])
    speculative = {"num_speculative_tokens": 4, "speculation": "auto"}
    with LLM(model, proposer=proposer, speculative_config=speculative, **settings) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert controls == {TreeAcceptance}
    assert told == [(4, [1, 3])] * 3, "12 tokens: one, three times three, and two of which the last ended the request"
