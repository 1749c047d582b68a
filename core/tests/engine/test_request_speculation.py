"""What a request may say about its speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, RequestSpeculation, SamplingParams
from specdec.errors import InvalidRequestError
from specdec.speculation import as_request_speculation
from specdec.testing import WrongProposer, tiny_model, use_proposer

PROMPTS = [[7] * 12, [5, 9, 5, 9], [3]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def llm(model: Path) -> Any:
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory": "1MiB", "stat_loggers": ()}
    with LLM(str(model), **settings, **use_proposer(WrongProposer(1), 3)) as engine:
        yield engine


def test_each_prompt_has_its_own(llm: LLM) -> None:
    """Off, fewer and the engine's own in one batch; the text is the same."""
    plain = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False, speculation=False)]
    assert llm.stats().num_drafts == 0
    outputs = llm.generate(
        PROMPTS, GREEDY, use_tqdm=False, speculation=["off", {"num_speculative_tokens": 1}, RequestSpeculation()]
    )
    assert [o.outputs[0].token_ids for o in outputs] == plain
    assert [len(o.spec_stats.num_draft_tokens_per_pos) for o in outputs] == [0, 1, 3]


def test_the_engines_method_may_be_named(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, speculation={"method": "WrongProposer"})
    assert output.spec_stats.num_drafts > 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "wrongproposer"}, r"not loaded in this engine\. Did you mean 'WrongProposer'\? Loaded: Wrong"),
        ({"num_speculative_tokens": 4}, r"num_speculative_tokens = 4, but the engine decodes with at most 3 draft"),
        ({"num_speculative_tokens": -1}, r"must be an integer of at least 0"),
        ({"num_speculative_tokens": True}, r"must be an integer of at least 0"),
        ({"enabled": "no"}, r"speculation\.enabled = 'no': must be true or false"),
        ({"k": 1}, r"unknown setting 'speculation\.k'\. Known here: method, num_speculative_tokens, enabled"),
        ("on", r"speculation = 'on': must be a RequestSpeculation"),
        (3, r"speculation = 3: must be"),
        (["off"], r"speculation has 1 entries for 3 prompts"),
    ],
)
def test_what_is_wrong_is_said(llm: LLM, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, speculation=value)


def test_without_speculation_a_method_cannot_be_chosen() -> None:
    choice: Callable[[Any], Any] = as_request_speculation
    choice("off").check_against((), 0)
    choice({"num_speculative_tokens": 0}).check_against((), 0)
    with pytest.raises(InvalidRequestError, match="the engine runs without speculation: set speculative.method"):
        choice({"method": "ngram"}).check_against((), 0)
    with pytest.raises(InvalidRequestError, match="decodes without speculation"):
        choice({"num_speculative_tokens": 1}).check_against((), 0)


@pytest.mark.parametrize("speculation", ["auto", "always"])
def test_the_control_changes_speed_not_text(model: Path, speculation: str) -> None:
    """Whatever the control decides, the text is the target's, and the schedule binds."""
    settings = {"dtype": "float32", "max_model_len": 96, "kv_cache_memory": "1MiB", "stat_loggers": ()}
    longer = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(str(model), **settings) as engine:
        plain = [o.outputs[0].token_ids for o in engine.generate(PROMPTS, longer, use_tqdm=False)]
    speculative = {
        "num_speculative_tokens": 5,
        "speculation": speculation,
        "num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 8, 2]],
    }
    with LLM(str(model), proposer=WrongProposer(1), speculative_config=speculative, **settings) as engine:
        outputs = engine.generate(PROMPTS, longer, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == plain
        stats = engine.stats()
        assert 0 < len(stats.num_draft_tokens_per_pos) <= 2
        if speculation == "always":
            assert len(stats.num_draft_tokens_per_pos) == 2
            assert not stats.speculation_paused
