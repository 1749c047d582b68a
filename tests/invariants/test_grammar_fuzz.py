"""Structured output with everything else at once: random grammars, options, drafts and shortages.

With `match` the whole output is that of the same requests without speculation; with every verifier the grammar takes
the output, and text, tokens, log-probabilities and finish reasons agree with each other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define

from specdec import RequestOutput, SamplingParams
from specdec.drafting import Proposer
from specdec.drafting.sampling import DraftSampler, sampling_tensors
from specdec.grammar import GrammarBackend
from specdec.outputs import CompletionOutput
from specdec.testing import OracleProposer, RandomProposer, WrongProposer
from specdec.testing.context import engine_context
from specdec.testing.drawn import LawProposer
from specdec.testing.tokenizers import tiny_tokenizer
from specdec.types import Draft, ProposalInput, ProposerCapabilities
from tests.invariants.kit import PROMPTS, VOCAB, Start

pytest.importorskip("xgrammar")

END = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "k": {"enum": ["ab", "abc", 1]},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["k", "l"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}],
    },
}
GRAMMARS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"choice": ["a", "ab", "abc", "abd", "b"]},
    {"choice": ["exactly this", "exactly that", "exact"]},
    {"regex": "[a-c]*"},
    {"regex": "(ab|cd){2,9}x?"},
    {"regex": "x{5}"},
    {"json": SCHEMA},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json_object": True},
    {"grammar": 'root ::= "(" (root | "x" | "long text")* ")"'},
    {"structural_tag": TAGS},
)


def backend() -> GrammarBackend:
    from specdec_grammar_xgrammar.backend import XGrammarBackend
    from specdec_grammar_xgrammar.config import XGrammarConfig

    context = engine_context(vocab_size=VOCAB, eos_token_ids=(END,), tokenizer=tiny_tokenizer(VOCAB))
    return XGrammarBackend(XGrammarConfig(), context)


# --- what is asked --------------------------------------------------------------------------------


def random_params(rng: random.Random) -> SamplingParams:
    """Options that change what may come, where it stops and what is told."""
    grammar = rng.choice(GRAMMARS)
    max_tokens = rng.choice([1, 2, 5, 12, 40])
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(1000),
        "max_tokens": max_tokens,
        "logprobs": rng.choice([None, 0, 3]),
        "ignore_eos": rng.random() < 0.2,
    }
    if grammar is not None:
        fields["structured_outputs"] = grammar
    if fields["temperature"] and rng.random() < 0.3:
        fields["n"] = rng.choice([2, 3])
    if rng.random() < 0.3:
        fields["min_tokens"] = rng.randint(1, max_tokens)
    if rng.random() < 0.25:
        fields["stop"] = rng.sample(["b", "ab", "x", '"l', "))", "t t", "cd"], 2)
        fields["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.15:
        fields["stop_token_ids"] = [rng.randrange(2, VOCAB) for _ in range(6)]
    if rng.random() < 0.2:
        fields |= {"presence_penalty": 1.0, "repetition_penalty": 1.3}
    if rng.random() < 0.2:
        fields["logit_bias"] = {rng.randrange(VOCAB): rng.choice([-100.0, -5.0, 5.0]) for _ in range(4)}
    if rng.random() < 0.2:
        fields["top_k"] = rng.choice([1, 2, 5])
    if rng.random() < 0.15:
        fields["bad_words"] = rng.sample(["ab", "c", "true", "x"], 2)
    return SamplingParams(**fields)


def random_settings(rng: random.Random) -> dict[str, Any]:
    per_block = 2 * 2 * 2 * 16 * 4 * 8
    settings: dict[str, Any] = {
        "enable_prefix_caching": rng.random() < 0.7,
        "max_num_batched_tokens": rng.choice([24, 2048]),
        "logprobs_mode": rng.choice(["raw", "processed"]),
    }
    if rng.random() < 0.5:
        settings |= {"block_size": 8, "kv_cache_memory": 24 * per_block, "max_model_len": 160}
    return settings


# --- who drafts -----------------------------------------------------------------------------------


@define
class Drafting:
    """A proposer, the settings it needs, and whether the text is that of decoding without drafts."""

    proposer: Proposer
    settings: dict[str, Any]
    same_text: bool


def law_of_text(token_ids: np.ndarray) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(int(token_ids[-1]))) * 2


class Drawing(Proposer):
    """Trees of two siblings, one of them with a child, drawn from laws that are told."""

    capabilities = ProposerCapabilities(trees=True, draft_probs=True)

    def propose(self, batch: ProposalInput) -> Draft:
        temperature, seeds = sampling_tensors(batch)
        ends = torch.tensor([len(tokens) for tokens in batch.token_ids])
        sampler = DraftSampler("probabilistic")
        rows = torch.stack([law_of_text(tokens) for tokens in batch.token_ids])
        tops, first = sampler.choose_children(rows, temperature, seeds, ends, 2, draft_position=0)
        below, second = sampler.choose_children(rows, temperature, seeds, ends + 1, 1, draft_position=1)
        assert first is not None
        assert second is not None
        counts = [min(int(limit), 3) for limit in batch.max_draft_tokens]
        return Draft(
            token_ids=torch.cat([torch.cat([tops[r], below[r]])[:n] for r, n in enumerate(counts)]),
            num_draft_tokens=torch.tensor(counts, dtype=torch.int32),
            parents=torch.tensor([p for n in counts for p in (-1, -1, 1)[:n]], dtype=torch.int32),
            draft_probs=torch.cat([torch.cat([first[r], second[r]])[:n] for r, n in enumerate(counts)]),
        )


def random_drafting(rng: random.Random, runs: list[list[int]]) -> Drafting:
    kind = rng.choice(["oracle", "oracle_1", "oracle_3", "random", "tree", "end", "drawn", "drawn tree"])
    if kind.startswith("oracle"):
        right = int(kind[7:]) if kind[7:] else None
        return Drafting(OracleProposer(runs, vocab_size=VOCAB, right=right), {}, True)
    if kind == "drawn":
        return Drafting(LawProposer(law_of_text), {"verifier": "rejection"}, False)
    if kind == "drawn tree":
        return Drafting(Drawing(), {"verifier": "rejection", "verifier_options": {"tree_rule": "recursive"}}, False)
    if kind == "end":
        return Drafting(WrongProposer(END), {}, True)
    return Drafting(RandomProposer(VOCAB, seed=rng.randrange(100), trees=kind == "tree"), {}, True)


# --- what must hold -------------------------------------------------------------------------------


def check(params: SamplingParams, choice: CompletionOutput, grammars: GrammarBackend) -> None:
    """What one choice says of itself agrees."""
    assert choice.finish_reason in ("stop", "length") or "none of the vocabulary" in (choice.error or "")
    assert len(choice.token_ids) == len(choice.token_origins)
    if params.max_tokens is not None:
        assert len(choice.token_ids) <= params.max_tokens
        assert choice.finish_reason != "length" or len(choice.token_ids) == params.max_tokens
    if params.logprobs is not None:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        for token, entries in zip(choice.token_ids, choice.logprobs, strict=True):
            assert math.isfinite(entries[token].logprob)
    if params.structured_outputs is None:
        return
    matcher = grammars.compile(params.structured_outputs.spec()).matcher()
    assert all(map(matcher.accept, choice.token_ids)), "the grammar refuses a token"
    if choice.finish_reason == "stop" and choice.stop_reason is None:
        assert matcher.is_terminated()
        assert choice.token_ids[-1] == END
    if matcher.is_terminated():
        assert choice.finish_reason == "stop"


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) for choice in output.outputs]


def check_logprobs(found: RequestOutput, plain: RequestOutput) -> None:
    for mine, its in zip(found.outputs, plain.outputs, strict=True):
        for entries, expected in zip(mine.logprobs or [], its.logprobs or [], strict=True):
            assert list(entries) == list(expected)
            for token, entry in expected.items():
                assert entries[token].logprob == pytest.approx(entry.logprob, abs=1e-4)


def requests(rng: random.Random, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    return [rng.choice(PROMPTS[1:]) for _ in range(count)], [random_params(rng) for _ in range(count)]


def runs_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [[*(o.prompt_token_ids or []), *choice.token_ids] for o in outputs for choice in o.outputs]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 14))])
def test_whatever_is_asked(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    settings = random_settings(rng)
    prompts, params = requests(rng, 24)
    plain = start(**settings).generate(prompts, params, use_tqdm=False)
    grammars = backend()
    for one, output in zip(params, plain, strict=True):
        for choice in output.outputs:
            check(one, choice, grammars)
    for _ in range(2):
        drafting = random_drafting(rng, runs_of(plain))
        engine = start(drafting.proposer, rng.choice([1, 3, 6]), **settings, **drafting.settings)
        found = engine.generate(prompts, params, use_tqdm=False)
        for one, output, expected in zip(params, found, plain, strict=True):
            for choice in output.outputs:
                check(one, choice, grammars)
            if drafting.same_text or one.greedy:
                assert told(output) == told(expected)
                check_logprobs(output, expected)
        assert engine.stats().num_proposer_faults == 0
