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
from specdec_token_recycling.table import NOTHING

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


class Watched(TokenRecyclingProposer):
    """Keeps a table of its own in step with the proposer's, token by token, and compares them at each step."""

    def __init__(self, shape: str) -> None:
        super().__init__(
            TokenRecyclingConfig(speculative_token_tree=SHAPES[shape]),
            engine_context(vocab_size=VOCAB, num_speculative_tokens=6),
        )
        self.expected: dict[int, list[int]] = {}
        self.num_rejected = self.num_prompt_tokens = 0

    def propose(self, batch: ProposalInput) -> Draft:
        draft = super().propose(batch)
        assert batch.computed is not None
        self.follow(batch.computed)
        assert self.learned() == self.expected
        return draft

    def learned(self) -> dict[int, list[int]]:
        rows = self._table.successors.tolist()
        return {token: row for token, row in enumerate(rows) if set(row) != {NOTHING}}

    def follow(self, computed: ComputedStep) -> None:
        tokens, rows = computed.batch.input_ids.tolist(), computed.batch.logits_indices.tolist()
        for r, text in enumerate(computed.token_ids):
            before = dict(self.expected)
            for position in range(computed.first_position[r], computed.num_computed[r]):
                place = int(computed.kept[computed.kept_start[r] + position - computed.first_position[r]])
                assert tokens[place] == text[position]
                if place not in rows and position + 1 < len(text):
                    self.num_prompt_tokens += 1
                    follower = int(text[position + 1])
                    old = before.get(tokens[place], [NOTHING] * self._table.width)
                    others = [token for token in old if token != follower]
                    self.expected[tokens[place]] = [follower, *others][: self._table.width]
        ranked = computed.target.logits.sort(dim=-1, descending=True, stable=True).indices
        for row, place in enumerate(rows):
            self.num_rejected += place not in computed.kept
            self.expected[tokens[place]] = ranked[row, : self._table.width].tolist()


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
        assert llm.stats().proposer_memory == {"table": VOCAB * width * 4}
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
