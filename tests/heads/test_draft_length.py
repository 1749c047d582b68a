"""How many tokens a head's chains have: what it can draft, not what the configuration wishes."""

from __future__ import annotations

import pytest

from specdec.errors import DraftLengthError
from specdec.testing.heads import tiny_head

NUMBERS = {"medusa": 4, "mlp_speculator": 3}
"""Heads or steps of the tiny checkpoints."""
TREE = {"speculative_token_tree": "[(0,), (1,), (0, 0)]"}


@pytest.fixture(params=NUMBERS)
def head(request, model, tmp_path):
    """A head's settings, and how many tokens it can draft."""
    path = tiny_head(request.param, model, tmp_path / "head")
    return {"method": request.param, "model": str(path)}, NUMBERS[request.param]


def test_more_tokens_than_the_head_can_draft_are_refused(start, head):
    settings, most = head
    expected = (
        f"speculative.num_speculative_tokens is {most + 1}, but the proposer '{settings['method']}' of .* drafts at "
        f"most {most} tokens .*: set it to {most} or leave it out"
    )
    with pytest.raises(DraftLengthError, match=expected) as caught:
        start({**settings, "num_speculative_tokens": most + 1})
    assert caught.value.path == "speculative.num_speculative_tokens"


def test_a_number_that_is_left_out_is_what_the_head_can_draft(start, head):
    settings, most = head
    engine = start(settings)
    assert engine.config.speculative.num_speculative_tokens == min(4, most)
    engine.generate([[7] * 24], use_tqdm=False)
    assert len(engine.stats().num_draft_tokens_per_pos) == min(4, most)


def test_a_tree_may_have_more_nodes_than_there_are_heads(start, head):
    settings, _ = head
    assert start({**settings, **TREE, "num_speculative_tokens": 8}).config.speculative.num_speculative_tokens == 8


def test_among_several_methods_each_drafts_what_it_can(start, head):
    settings, most = head
    members = [settings, {"method": "ngram"}]
    engine = start({"method": "composite", "proposers": members, "num_speculative_tokens": 6})
    assert engine.config.speculative.num_speculative_tokens == 6
    too_many = [{"method": "ngram"}, {**settings, "num_speculative_tokens": most + 1}]
    with pytest.raises(
        DraftLengthError, match=rf"proposers\[1\]\.num_speculative_tokens is {most + 1}, .* most {most} "
    ):
        start({"method": "composite", "proposers": too_many, "num_speculative_tokens": 6})
    with pytest.raises(DraftLengthError, match=f"is 6, but the proposer 'composite' .* most {most} "):
        start({"method": "composite", "proposers": [settings], "num_speculative_tokens": 6})


def test_a_diagnosis_goes_as_far_as_the_head(model, head):
    from specdec import SamplingParams
    from specdec.cli.diagnosis import measure_method
    from specdec.cli.prompts import Prompt
    from specdec.config import SpeculativeConfig, from_kwargs

    settings, most = head
    config = from_kwargs(model, dtype="float32", max_model_len=128, kv_cache_memory="4MiB", stat_loggers=[])
    speculative = SpeculativeConfig(**settings, num_speculative_tokens=9)
    prompts = [Prompt(id="one", token_ids=(5, 9, 5, 9, 11))]
    facts = measure_method(config, speculative, prompts, SamplingParams(max_tokens=12), lambda _: None)
    assert facts.speculative.num_speculative_tokens == most
