"""What an engine's steps teach the proposer, and what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from specdec import LLM, RequestOutput, SamplingParams
from specdec.testing import engine_context, tiny_model
from specdec_token_recycling.config import TokenRecyclingConfig
from specdec_token_recycling.proposer import TokenRecyclingProposer
from specdec_token_recycling.table import NOTHING, NUM_PAIRS, SuccessorTable

if TYPE_CHECKING:
    from specdec.types import ComputedStep, Draft, ProposalInput

torch.set_num_threads(1)
VOCAB = 128
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(2, VOCAB, n)] for n in (5, 30, 1, 17)]
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
SHAPES = {"chain": None, "tree": TREE}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab_size=VOCAB, eos_token_id=None))


def open_llm(model: str, proposer: Any = None, **settings: Any) -> LLM:
    common = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory": "2MiB", "stat_loggers": ()}
    return LLM(model, proposer=proposer, **{**common, **settings})


def speculative(shape: str, **options: Any) -> dict[str, Any]:
    method = {"method": "token_recycling", "num_speculative_tokens": 6, "speculation": "always"}
    return {**method, "speculative_token_tree": SHAPES[shape], **options}


def run(llm: LLM, temperature: float = 0, max_tokens: int = 40) -> list[RequestOutput]:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=max_tokens)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.spec_stats.num_accepted_tokens for output in outputs if output.spec_stats is not None)


class NotingTable(SuccessorTable):
    """Notes what it is taught: a token, the one before it, and what is likeliest behind them."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__(vocab_size, width)
        self.rows: list[tuple[int, int, list[int]]] = []
        self.followers: list[tuple[int, int, int]] = []

    def learn(self, before: np.ndarray, token_ids: np.ndarray, likeliest: np.ndarray) -> None:
        super().learn(before, token_ids, likeliest)
        self.rows += zip(before.tolist(), token_ids.tolist(), likeliest.tolist(), strict=True)

    def learn_text(self, text: np.ndarray, start: int) -> None:
        super().learn_text(text, start)
        triples = zip([NOTHING, *text.tolist()], text.tolist(), text[1:].tolist(), strict=False)
        self.followers += list(triples)[start:]


class Watched(TokenRecyclingProposer):
    """Compares at each step what the table is taught with what the step holds, token by token."""

    def __init__(self, shape: str) -> None:
        super().__init__(
            TokenRecyclingConfig(speculative_token_tree=SHAPES[shape]),
            engine_context(vocab_size=VOCAB, num_speculative_tokens=6),
        )
        self._table = NotingTable(VOCAB, self._table.width)
        self.num_rejected = self.num_prompt_tokens = 0

    def propose(self, batch: ProposalInput) -> Draft:
        draft = super().propose(batch)
        assert batch.computed is not None
        assert isinstance(self._table, NotingTable)
        before = self.tokens_before(batch.computed)
        assert self._table.rows == self.expected_rows(batch.computed, before)
        assert self._table.followers == self.expected_followers(batch.computed, before)
        self._table.rows, self._table.followers = [], []
        return draft

    def tokens_before(self, computed: ComputedStep) -> dict[int, int]:
        """Of each token of the step by its place: the text's of those that are kept, the parent's of other nodes."""
        tokens, starts = computed.batch.input_ids.tolist(), computed.batch.query_start_loc.tolist()
        before = {}
        for r, text in enumerate(computed.token_ids):
            for place in range(starts[r] + 1, starts[r + 1]):
                parents = computed.batch.parents
                parent = place - 1 if parents is None else starts[r] + int(parents[place])
                before[place] = tokens[parent]
            for position in range(computed.first_position[r], computed.num_computed[r]):
                place = int(computed.kept[computed.kept_start[r] + position - computed.first_position[r]])
                assert tokens[place] == text[position]
                before[place] = int(text[position - 1]) if position else NOTHING
        return before

    def expected_rows(self, computed: ComputedStep, before: dict[int, int]) -> list[tuple[int, int, list[int]]]:
        tokens, places = computed.batch.input_ids.tolist(), computed.batch.logits_indices.tolist()
        ranked = computed.target.logits.sort(dim=-1, descending=True, stable=True).indices[:, : self._table.width]
        self.num_rejected += len(set(places) - set(computed.kept.tolist()))
        return [(before[p], tokens[p], ranked[row].tolist()) for row, p in enumerate(places)]

    def expected_followers(self, computed: ComputedStep, before: dict[int, int]) -> list[tuple[int, int, int]]:
        if len(computed.batch.logits_indices) == len(computed.batch.input_ids):
            return []
        found = []
        for r, text in enumerate(computed.token_ids):
            for position in range(computed.first_position[r], min(computed.num_computed[r], len(text) - 1)):
                place = int(computed.kept[computed.kept_start[r] + position - computed.first_position[r]])
                found.append((before[place], int(text[position]), int(text[position + 1])))
        self.num_prompt_tokens += len(found)
        return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_teaches(model: str, shape: str) -> None:
    """Accepted and rejected rows, and the prompts' tokens, teach what they should, in chunks and batches."""
    watched = Watched(shape)
    method = {"num_speculative_tokens": 6, "speculation": "always"}
    with open_llm(model, watched, max_num_batched_tokens=24, speculative_config=method) as llm:
        run(llm)
        run(llm, temperature=1)
        assert llm.stats().num_proposer_faults == 0
    assert watched.num_rejected > 20
    assert watched.num_prompt_tokens > 20


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_text_is_the_plain_one(model: str, shape: str, temperature: float) -> None:
    with open_llm(model) as plain:
        expected = ids(run(plain, temperature))
    with open_llm(model, speculative_config=speculative(shape)) as llm:
        first, second = run(llm, temperature), run(llm, temperature)
        assert llm.stats().num_proposer_faults == 0
        width = {"chain": 1, "tree": 2}[shape]
        assert llm.stats().proposer_memory == {"table": (VOCAB + NUM_PAIRS) * width * 4 + NUM_PAIRS * 8}
    assert ids(first) == ids(second) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_seen_is_drafted(model: str, shape: str) -> None:
    """Texts are drafted better the second time, from what their first time has taught."""
    with open_llm(model, speculative_config=speculative(shape)) as llm:
        first, second = run(llm, max_tokens=8), run(llm, max_tokens=8)
    assert accepted(second) > accepted(first)


def test_first_of_a_composite(model: str) -> None:
    """Behind a lookup it learns from every step, and drafts where nothing was found."""
    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    members = [lookup, {"method": "token_recycling", "speculative_token_tree": TREE}]
    method = {"method": "composite", "num_speculative_tokens": 6, "speculation": "always", "proposers": members}
    with open_llm(model) as plain:
        expected = ids(run(plain))
    with open_llm(model, speculative_config=method) as llm:
        assert ids(run(llm)) == expected
        counts = llm.stats().proposer["members"]
    assert counts["ngram"]["num_drafts"] > 0
    assert counts["token_recycling"]["num_accepted_tokens"] > 0
    assert counts["token_recycling"]["num_faults"] == 0
