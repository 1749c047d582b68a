"""Sampling under a grammar, end to end: whatever drafts and verifies, texts have the law of constrained decoding.

`core/tests/verify/test_grammar_law.py` enumerates the rules; here the whole engine is counted over many seeds.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import SamplingParams
from specdec.drafting import Proposer
from specdec.drafting.sampling import DraftSampler, sampling_tensors
from specdec.engine.request import RequestDraft
from specdec.grammar import RequestGrammar
from specdec.runner.shaping import DraftShaping
from specdec.testing.drawn import LawProposer
from specdec.testing.laws import deviations
from specdec.testing.models import load_module
from specdec.testing.tokenizers import tiny_tokenizer
from specdec.types import Draft, ProposalInput, ProposerCapabilities
from tests.invariants.kit import PROMPTS, VOCAB, Start, installed

pytest.importorskip("xgrammar")

REGEX = "(a[bc]|b[cd]|c[abd]|d[d])[ab]c"
"""What may follow depends on what came before; where it is "dd" or at the end, one token is left."""
LETTERS = "abcd"
TEXTS = [text for text in map("".join, itertools.product(LETTERS, repeat=4)) if re.fullmatch(REGEX, text)]
PROMPT = PROMPTS[2]
LENGTH = 3


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [tiny_tokenizer(VOCAB).encode(letter, add_special_tokens=False)[0] for letter in LETTERS]


@pytest.fixture(scope="module")
def law(model: str, ids: list[int]) -> Tensor:
    """float64 [4, 4, 4]: the constrained target's law of the first letters."""
    module = load_module(model)
    table = torch.zeros([len(LETTERS)] * LENGTH, dtype=torch.float64)

    def go_on(text: list[int], chance: float) -> None:
        if len(text) == LENGTH:
            table[tuple(text)] = chance
            return
        said = "".join(LETTERS[n] for n in text)
        may = [n for n in range(4) if any(whole.startswith(said + LETTERS[n]) for whole in TEXTS)]
        with torch.inference_mode():
            row = module(input_ids=torch.tensor([[*PROMPT, *(ids[n] for n in text)]])).logits[0, -1].double()
        for letter, share in zip(may, row[[ids[n] for n in may]].softmax(dim=-1).tolist(), strict=True):
            go_on([*text, letter], chance * share)

    go_on([], 1.0)
    return table


def letters_alone(ids: list[int]) -> Any:
    """The draft's logits: among the letters, whether or not the grammar wants them."""
    row = torch.full((VOCAB,), -torch.inf)
    row[ids] = torch.tensor([0.3, 0.9, 0.0, 0.5])

    def logits_of(token_ids: np.ndarray) -> Tensor:
        return row

    return logits_of


class TreeLawProposer(Proposer):
    """Trees of three siblings, each with a child, drawn without replacement from one law."""

    capabilities = ProposerCapabilities(trees=True, draft_probs=True)

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._sampler = DraftSampler("probabilistic")

    def propose(self, batch: ProposalInput) -> Draft:
        temperature, seeds = sampling_tensors(batch)
        first = torch.tensor([len(tokens) for tokens in batch.token_ids])
        rows = self._logits.expand(len(first), -1)
        tops, top_laws = self._sampler.choose_children(rows, temperature, seeds, first, 3, draft_position=0)
        below, laws = self._sampler.choose_children(rows, temperature, seeds, first + 1, 1, draft_position=1)
        assert top_laws is not None
        assert laws is not None
        counts = [min(int(limit), 6) for limit in batch.max_draft_tokens]
        tokens, parents, probs = [], [], []
        for r, count in enumerate(counts):
            tokens.append(torch.cat([tops[r], below[r].expand(3)])[:count])
            probs.append(torch.cat([top_laws[r], laws[r].expand(3, -1)])[:count])
            parents += [-1, -1, -1, 0, 1, 2][:count]
        return Draft(
            token_ids=torch.cat(tokens),
            num_draft_tokens=torch.tensor(counts, dtype=torch.int32),
            parents=torch.tensor(parents, dtype=torch.int32),
            draft_probs=torch.cat(probs),
        )


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chains, rejection": ("chain", {"verifier": "rejection"}),
    "chains, block": ("chain", {"verifier": "block"}),
    "chains, match": ("chain", {"verifier": "match"}),
    "trees, recursive": ("tree", {"verifier": "rejection", "verifier_options": {"tree_rule": "recursive"}}),
    "trees, one-hot": ("tree", {"verifier": "rejection"}),
}
FIRST = "chains, rejection"


def texts(start: Start, ids: list[int], name: str, count: int) -> Tensor:
    shape, settings = CASES[name]
    logits_of = letters_alone(ids)
    proposer = LawProposer(logits_of) if shape == "chain" else TreeLawProposer(logits_of(np.empty(0)))
    engine = start(proposer, 3 if shape == "chain" else 6, max_num_seqs=128, **settings)
    params = [SamplingParams(seed=seed, max_tokens=20, structured_outputs={"regex": REGEX}) for seed in range(count)]
    outputs = engine.generate([PROMPT] * count, params, use_tqdm=False)
    found = [output.outputs[0].text for output in outputs]
    assert all(re.fullmatch(REGEX, text) for text in found)
    stats = engine.stats()
    assert stats.num_proposer_faults == 0
    assert stats.num_accepted_tokens > 0
    return torch.tensor([[LETTERS.index(letter) for letter in text[:LENGTH]] for text in found])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FIRST else pytest.mark.slow) for name in CASES]
)
def test_texts_have_the_law_of_constrained_decoding(start: Start, ids: list[int], law: Tensor, name: str) -> None:
    if CASES[name][1]["verifier"] not in installed("verifier"):
        pytest.skip("the verifier is not installed")
    assert deviations(texts(start, ids, name, 1500), law) == []


@pytest.mark.parametrize("name", [FIRST, pytest.param("trees, recursive", marks=pytest.mark.slow)])
def test_leaving_out_what_was_drawn_is_found(
    start: Start, ids: list[int], law: Tensor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Planted: refused tokens are cut, and the laws of the others kept."""

    def cut(self: DraftShaping, grammar: RequestGrammar, draft: RequestDraft, drawn: bool) -> RequestDraft:
        kept = [node for node, ok in enumerate(grammar.fitting(draft.token_ids, draft.parents)) if ok]
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        parents = None if draft.parents is None else [place[draft.parents[node]] for node in kept]
        assert draft.probs is not None
        return RequestDraft([draft.token_ids[node] for node in kept], parents, draft.probs[kept])

    monkeypatch.setattr(DraftShaping, "_cut", cut)
    assert deviations(texts(start, ids, name, 1500), law) != []
