"""The demonstration model with the head that was trained for it: drafts change no token."""

import json
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "spec_bench.jsonl"
SHAPES = {
    "chain": {"num_speculative_tokens": 4},
    "dynamic tree": {"num_speculative_tokens": 8, "tree_top_k": 2, "tree_depth": 4},
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_trained_head_changes_nothing_and_is_accepted(conversations, temperature):
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=64)
    plain, _ = answers(conversations, params)
    for name, shape in SHAPES.items():
        speculative = {"method": "eagle3", "model": "demo:smollm2-eagle3", "speculation": "always", **shape}
        drafted, stats = answers(conversations, params, speculative)
        assert drafted == plain, name
        assert stats.num_proposer_faults == 0
        assert stats.num_accepted_tokens > 0.02 * stats.num_draft_tokens
