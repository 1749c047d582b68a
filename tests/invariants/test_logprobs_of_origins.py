"""Log-probabilities are plain decoding's, whether a token was accepted, recovered, the bonus token or plain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec import AsyncLLM, RequestOutput, SamplingParams
from specdec.drafting import Proposer
from specdec.outputs import BONUS, RECOVERED
from specdec.sampling.logprobs import Logprob
from specdec.testing import OracleProposer
from specdec.types import Draft, ProposalInput, ProposerCapabilities
from tests.invariants.kit import PROMPTS, VOCAB, Runs, Start

GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=4, prompt_logprobs=2)
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=20, logprobs=4)
PENALIZED = SamplingParams(
    temperature=0.8, seed=5, max_tokens=20, logprobs=4, presence_penalty=1.5, frequency_penalty=0.5, top_p=0.95
)


class TreeOracle(Proposer):
    """At each depth a wrong node first and then the right one, so that no accepted path lies in index order."""

    capabilities = ProposerCapabilities(trees=True)

    def __init__(self, oracle: OracleProposer) -> None:
        self._oracle = oracle

    def propose(self, batch: ProposalInput) -> Draft:
        """Trees of as many whole depths as the requests can take."""
        tokens: list[int] = []
        parents: list[int] = []
        counts = []
        for name, text, limit in zip(batch.request_ids, batch.token_ids, batch.max_draft_tokens, strict=True):
            right = self._oracle.draft_for(name, text, int(limit) // 2)
            for depth, token in enumerate(right):
                tokens += [(token + 1) % VOCAB, token]
                parents += [2 * depth - 1] * 2
            counts.append(2 * len(right))
        return Draft(
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            num_draft_tokens=torch.tensor(counts, dtype=torch.int32),
            parents=torch.tensor(parents, dtype=torch.int32),
        )

    def finish(self, request_id: str) -> None:
        """Forget the request."""
        self._oracle.finish(request_id)


def plain_runs(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [[*(o.prompt_token_ids or []), *o.outputs[0].token_ids] for o in outputs]


def assert_same(found: Sequence[Any] | None, expected: Sequence[Any] | None) -> None:
    assert found is not None
    assert expected is not None
    assert len(found) == len(expected)
    for mine, plain in zip(found, expected, strict=True):
        if plain is None:
            assert mine is None
            continue
        assert list(mine) == list(plain)
        for token in plain:
            assert isinstance(mine[token], Logprob)
            assert mine[token].logprob == pytest.approx(plain[token].logprob, abs=1e-4)
            assert mine[token].rank == plain[token].rank


@pytest.mark.parametrize(
    ("params", "mode"),
    [(GREEDY, "raw"), (SAMPLED, "raw"), (SAMPLED, "processed"), (PENALIZED, "processed")],
    ids=["greedy, raw", "sampled, raw", "sampled, processed", "penalized, processed"],
)
@pytest.mark.parametrize("shape", ["chain", "chain, one right", "tree"])
def test_every_origin_has_plain_decodings_logprobs(start: Start, shape: str, params: SamplingParams, mode: str) -> None:
    plain = start(logprobs_mode=mode).generate(PROMPTS, params, use_tqdm=False)
    oracle = OracleProposer(plain_runs(plain), vocab_size=VOCAB, right=1 if "one right" in shape else None)
    proposer = TreeOracle(oracle) if shape == "tree" else oracle
    engine = start(proposer, 4, logprobs_mode=mode)
    origins: set[int] = set()
    for output, expected in zip(engine.generate(PROMPTS, params, use_tqdm=False), plain, strict=True):
        choice, wanted = output.outputs[0], expected.outputs[0]
        assert choice.token_ids == wanted.token_ids
        assert_same(choice.logprobs, wanted.logprobs)
        assert choice.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
        if params is GREEDY:
            assert_same(output.prompt_logprobs, expected.prompt_logprobs)
        origins.update(choice.token_origins)
    assert max(origins) >= 0
    assert (RECOVERED if "one right" in shape else BONUS) in origins


def test_all_of_the_vocabulary(start: Start, runs: Runs) -> None:
    """``logprobs=-1`` on accepted tokens: a whole law for each, each its own."""
    engine = start(OracleProposer(runs(PROMPTS), vocab_size=VOCAB), 4)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=-1)
    for output in engine.generate(PROMPTS[:3], params, use_tqdm=False):
        laws = output.outputs[0].logprobs
        assert laws is not None
        for law in laws:
            assert len(law) == VOCAB
            assert np.exp([entry.logprob for entry in law.values()]).sum() == pytest.approx(1.0, abs=1e-4)
        assert len({tuple(law) for law in laws}) > 1


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_each_piece_of_a_stream_brings_its_own(model: str, runs: Runs, start: Start, shape: str) -> None:
    """Known bug 31: several tokens in a piece do not share the first one's alternatives."""
    plain = start().generate(PROMPTS, GREEDY, use_tqdm=False)
    oracle = OracleProposer(runs(PROMPTS), vocab_size=VOCAB)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory": "4MiB",
        "stat_loggers": (),
        "proposer": TreeOracle(oracle) if shape == "tree" else oracle,
        "speculative_config": {"num_speculative_tokens": 4, "speculation": "always"},
    }

    async def main() -> None:
        async with AsyncLLM(model, **settings) as llm:
            for prompt, expected in zip(PROMPTS, plain, strict=True):
                seen, pieces = 0, 0
                async for output in llm.generate(prompt, GREEDY):
                    choice = output.outputs[0]
                    assert choice.logprobs is not None
                    assert len(choice.logprobs) == len(choice.token_ids)
                    new = len(choice.delta_token_ids)
                    assert_same(choice.logprobs[seen:], (expected.outputs[0].logprobs or [])[seen : seen + new])
                    assert all(
                        token in entries
                        for token, entries in zip(choice.delta_token_ids, choice.logprobs[seen:], strict=True)
                    )
                    seen, pieces = seen + new, pieces + 1
                assert pieces < seen == len(expected.outputs[0].token_ids)
                assert_same(output.prompt_logprobs, expected.prompt_logprobs)

    asyncio.run(main())
