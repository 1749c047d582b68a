"""I5 and class D: every token carries the target's log-probability, however it was decided."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import SamplingParams
from tests.invariants.kit import PROMPTS, Baseline, Runs, Speculation, Start, oracle, speculating


@pytest.fixture(scope="module")
def reference(model: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def log_softmax(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].log_softmax(-1)


@speculating("oracle_1", "random", "ngram", "eagle3")
def test_output_logprobs_are_the_targets(start: Start, speculation: Speculation, reference: torch.nn.Module) -> None:
    engine = start(**speculation(4))
    for params in (
        SamplingParams(temperature=0, max_tokens=16, logprobs=3),
        SamplingParams(temperature=1.0, seed=3, max_tokens=16, logprobs=3),
    ):
        for output in engine.generate(PROMPTS, params, use_tqdm=False):
            choice = output.outputs[0]
            expected = log_softmax(reference, [*output.prompt_token_ids, *choice.token_ids])
            assert choice.logprobs is not None
            assert len(choice.logprobs) == len(choice.token_ids)
            total = 0.0
            for i, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
                row = expected[len(output.prompt_token_ids) + i - 1]
                assert found[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
                assert found[token].rank == 1 + int((row > row[token]).sum())
                best = row.topk(3)
                for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    assert found[index].logprob == pytest.approx(value, abs=1e-4)
                total += found[token].logprob
            assert choice.cumulative_logprob == pytest.approx(total)
            assert min(found[t].logprob for t, found in zip(choice.token_ids, choice.logprobs, strict=True)) < -0.01


def test_processed_logprobs(start: Start, runs: Runs) -> None:
    engine = start(oracle(runs), logprobs_mode="processed")
    params = SamplingParams(temperature=0.5, seed=1, top_k=2, max_tokens=8, logprobs=2)
    for output in engine.generate(PROMPTS, params, use_tqdm=False):
        for found in output.outputs[0].logprobs or []:
            mass = sum(torch.tensor(lp.logprob).exp().item() for lp in found.values())
            assert mass == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("budget", [32, 2048])
def test_prompt_logprobs(start: Start, reference: torch.nn.Module, runs: Runs, budget: int) -> None:
    """Known bug 34: prompts around the chunk size, together, with a drafter."""
    lengths = [1, 31, 32, 33, 63, 64, 65, 97]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in lengths]
    engine = start(oracle(runs), max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    for output, prompt in zip(engine.generate(prompts, params, use_tqdm=False), prompts, strict=True):
        expected = log_softmax(reference, prompt)
        found = output.prompt_logprobs
        assert found is not None
        assert len(found) == len(prompt)
        assert found[0] is None
        for i in range(1, len(prompt)):
            entry = found[i]
            assert entry is not None
            assert entry[prompt[i]].logprob == pytest.approx(expected[i - 1, prompt[i]].item(), abs=1e-4)


@speculating("oracle_1", "random", "ngram", "eagle3")
def test_first_request_with_logprobs(start: Start, speculation: Speculation, baseline: Baseline) -> None:
    """Known bug 32: the first thing an engine is asked."""
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=1, prompt_logprobs=1)
    output = start(**speculation(3)).generate(PROMPTS[1], params, use_tqdm=False)[0]
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) == 16
    assert output.outputs[0].token_ids == baseline(PROMPTS[1:2], params)[0].outputs[0].token_ids
