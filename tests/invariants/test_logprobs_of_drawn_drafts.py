"""Log-probabilities where drafts are verified by their laws: the target's, for accepted, recovered and bonus tokens.

Their text is not plain decoding's, so what is told is compared with a forward pass over it, constrained or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import AsyncLLM, RequestOutput, SamplingParams
from specdec.drafting import Proposer
from specdec.grammar import GrammarBackend, bitmask_width
from specdec.outputs import BONUS, RECOVERED
from specdec.testing import use_proposer
from specdec.testing.drawn import LawProposer
from specdec.testing.models import load_module
from tests.invariants.kit import PROMPTS, VOCAB, Start
from tests.invariants.test_grammar_fuzz import Drawing, backend, law_of_text

TEMPERATURE = 0.9
REGEX = {"regex": "([a-m][n-z]?)*[0-9]"}
PARAMS = [
    SamplingParams(
        temperature=TEMPERATURE,
        seed=seed,
        max_tokens=16,
        logprobs=3,
        ignore_eos=True,
        structured_outputs=REGEX if seed % 2 else None,
    )
    for seed in range(16)
]
ASKED = [PROMPTS[seed // 2] for seed in range(16)]
DRAFTS: dict[str, tuple[Callable[[], Proposer], dict[str, Any]]] = {
    "chain": (lambda: LawProposer(law_of_text), {"verifier": "rejection"}),
    "tree": (Drawing, {"verifier": "rejection", "verifier_options": {"tree_rule": "recursive"}}),
}


def expected_rows(module: Any, output: RequestOutput, params: SamplingParams, mode: str, own: GrammarBackend) -> Tensor:
    """[tokens, V]: the log-probabilities that each token's row should have."""
    tokens = output.outputs[0].token_ids
    prompt = output.prompt_token_ids or []
    with torch.inference_mode():
        rows = module(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    rows = rows.clone()
    if mode == "raw":
        return rows.log_softmax(dim=-1)
    if params.structured_outputs is not None:
        matcher = own.compile(params.structured_outputs.spec()).matcher()
        words = np.zeros((1, bitmask_width(VOCAB)), dtype=np.int32)
        for row, token in zip(rows, tokens, strict=True):
            matcher.fill_bitmask(words, 0)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            if bits.sum() > bits[1]:  # ignore_eos: the end comes only where nothing else can
                bits[1] = False
            row[torch.from_numpy(~bits)] = -torch.inf
            assert matcher.accept(token)
    return (rows / TEMPERATURE).log_softmax(dim=-1)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("shape", DRAFTS)
def test_they_are_the_targets(start: Start, model: str, shape: str, mode: str) -> None:
    make, settings = DRAFTS[shape]
    outputs = start(make(), 3, logprobs_mode=mode, **settings).generate(ASKED, PARAMS, use_tqdm=False)
    module, own = load_module(model), backend()
    origins: set[int] = set()
    for output, params in zip(outputs, PARAMS, strict=True):
        choice = output.outputs[0]
        origins.update(choice.token_origins)
        rows = expected_rows(module, output, params, mode, own)
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        for token, told, row in zip(choice.token_ids, choice.logprobs, rows, strict=True):
            assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert told[token].rank == 1 + int((row > row[token]).sum())
            best = sorted((float(row[other]) for other in told), reverse=True)[:3]
            assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
            for other, entry in told.items():
                assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
        assert choice.cumulative_logprob == pytest.approx(
            sum(float(row[token]) for token, row in zip(choice.token_ids, rows, strict=True)), abs=1e-3
        )
    assert max(origins) >= 0
    assert {RECOVERED, BONUS} <= origins


@pytest.mark.parametrize("shape", DRAFTS)
def test_streams_tell_the_same(start: Start, model: str, shape: str) -> None:
    """Piece by piece: as many entries as tokens at any time, and never another for a token that was told."""
    make, settings = DRAFTS[shape]
    whole = start(make(), 3, **settings).generate(ASKED[:6], PARAMS[:6], use_tqdm=False)
    limits = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "4MiB", "stat_loggers": ()}

    async def main() -> None:
        async with AsyncLLM(model, **limits, **settings, **use_proposer(make(), 3)) as llm:
            for prompt, params, expected in zip(ASKED, PARAMS, whole, strict=False):
                told: list[Any] = []
                async for output in llm.generate(prompt, params):
                    choice = output.outputs[0]
                    assert choice.logprobs is not None
                    assert len(choice.logprobs) == len(choice.token_ids)
                    assert choice.logprobs[: len(told)] == told
                    told = list(choice.logprobs)
                assert choice.token_ids == expected.outputs[0].token_ids
                for mine, its in zip(told, expected.outputs[0].logprobs or [], strict=True):
                    assert list(mine) == list(its)
                    for token, entry in its.items():
                        assert mine[token].logprob == pytest.approx(entry.logprob, abs=1e-4)

    asyncio.run(main())
