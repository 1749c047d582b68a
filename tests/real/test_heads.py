"""The demonstration model with the heads that were trained for it: drafts change no token."""

import json
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "spec_bench.jsonl"
CHAIN = {"num_speculative_tokens": 4}
DYNAMIC = {"num_speculative_tokens": 8, "tree_top_k": 2, "tree_depth": 4}
STATIC = {"num_speculative_tokens": 6, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"}
SHAPES = {
    "eagle": (CHAIN, DYNAMIC),
    "eagle3": (CHAIN, DYNAMIC),
    "medusa": (CHAIN, STATIC),
    "mlp_speculator": ({"num_speculative_tokens": 3}, STATIC),
}

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def conversations() -> list[list[dict[str, str]]]:
    lines = PROMPTS.read_text().splitlines()[::60]
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]


def answers(conversations, params, speculative=None):
    with LLM("demo:smollm2", dtype="float32", max_model_len=2048, speculative_config=speculative) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], llm.stats()


@pytest.fixture(scope="module")
def plain(conversations):
    """Answers without drafts, by temperature."""
    return {temperature: answers(conversations, params_at(temperature))[0] for temperature in (0.0, 1.0)}


def params_at(temperature):
    return SamplingParams(temperature=temperature, seed=1, max_tokens=64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", SHAPES)
def test_trained_heads_change_nothing_and_are_accepted(conversations, plain, method, temperature):
    for shape in SHAPES[method]:
        speculative = {"method": method, "model": f"demo:smollm2-{method}", "speculation": "always", **shape}
        drafted, stats = answers(conversations, params_at(temperature), speculative)
        assert drafted == plain[temperature], shape
        assert stats.num_proposer_faults == 0
        assert stats.num_accepted_tokens > 0.02 * stats.num_draft_tokens
