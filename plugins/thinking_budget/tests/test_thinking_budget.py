"""Thinking ends at the budget, row by row, whoever drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, field

from specdec import LLM, SamplingParams
from specdec.errors import ConfigError, InvalidRequestError
from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.custom import NamedProcessor
from specdec.sampling.pipeline import LogitsPipeline
from specdec.testing import OracleProposer, RandomProposer, tiny_model, use_proposer
from specdec.types import Draft
from specdec_thinking_budget.config import ThinkingBudgetConfig
from specdec_thinking_budget.processor import ThinkingBudget, tokens_of

V = 20
START, END = (7, 8), (9, 10, 9, 11)
PROMPTS = ["hello (", "the (", "hello"]


@define(eq=False)
class FakeRequest:
    request_id: str
    params: SamplingParams
    token_ids: np.ndarray
    num_prompt_tokens: int
    seed: int = 0
    stop_token_ids: frozenset[int] = field(factory=frozenset)
    grammar: Any = None


def forced(
    output: list[int], draft: list[int], budget: int = 3, prompt: tuple[int, ...] = (1, 7, 8)
) -> list[int | None]:
    """Per row, the one token that is left, or None where all are."""
    pipeline = LogitsPipeline(V, "cpu", [NamedProcessor(ThinkingBudget(start=START, end=END), "x")])
    params = SamplingParams(temperature=0, extra_args={"thinking_budget": budget})
    request = FakeRequest("r", params, np.array([*prompt, *output], dtype=np.int64), len(prompt))
    layout = RowLayout.build(np.array([len(draft)]), np.array([len(request.token_ids)]))
    tokens = torch.tensor(draft, dtype=torch.int64)
    drafted = Draft(token_ids=tokens, num_draft_tokens=torch.tensor([len(draft)], dtype=torch.int32))
    rows = pipeline.process(torch.randn(len(draft) + 1, V), layout, drafted, SamplingBatch.build([request]))
    left = [(row > -torch.inf).nonzero()[:, 0].tolist() for row in rows]
    assert all(len(tokens) in (1, V) for tokens in left)
    return [tokens[0] if len(tokens) == 1 else None for tokens in left]


@pytest.mark.parametrize(
    ("output", "draft", "expected"),
    [
        ([], [], [None]),
        ([1, 2], [], [None]),
        ([1, 2, 3], [], [9]),
        ([1], [2, 3, 9, 10], [None, None, 9, 10, 9]),
        ([1, 2, 3, 9, 10], [9, 11, 4, 4], [9, 11, None, None, None]),
        ([1, 2], [9, 10, 9], [None, 10, 9, 11]),  # the end marker began by itself
        ([1, 2, 3], [4, 9], [9, 9, 10]),  # a draft that goes its own way is not accepted anyway
        ([9, 10, 9, 10], [9, 11], [9, 11, None]),  # the marker overlaps with itself
        ([9, 10, 9, 11], [5] * 4, [None] * 5),
    ],
)
def test_rows(output: list[int], draft: list[int], expected: list[int | None]) -> None:
    assert forced(output, draft) == expected


def test_thinking_begins_anywhere() -> None:
    assert forced([], [], budget=0) == [9]
    assert forced([4, 4, 4, 4], [7, 8], budget=0, prompt=(1,)) == [None, None, 9]
    assert forced([4, 7, 8, 4, 4], [], budget=3, prompt=(1,)) == [None]
    assert forced([4] * 9, [4] * 3, budget=0, prompt=(1,)) == [None] * 4
    assert forced([9, 10, 9, 11, 7, 8], [3], budget=1) == [None, 9]


def test_committed_tokens_are_looked_at_once() -> None:
    processor = ThinkingBudget(start=START, end=END)
    progress = processor._committed_progress("r", np.array([7, 8, 1]))
    assert (progress.thinking, progress.num_thinking, progress.num_seen) == (True, 1, 3)
    assert processor._committed_progress("r", np.array([7, 8, 1, 2])) is progress
    assert (progress.num_thinking, progress.num_seen) == (2, 4)
    processor.forget("r")
    assert not processor._committed


@pytest.mark.parametrize("budget", [-1, True, "3", 1.5])
def test_bad_budgets(budget: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match="extra_args.thinking_budget is .*; it must be an integer of at least 0"
    ):
        ThinkingBudget(start=START, end=END).check(SamplingParams(extra_args={"thinking_budget": budget}))


def test_who_it_applies_to() -> None:
    by_request, by_default = ThinkingBudget(start=START, end=END), ThinkingBudget(start=START, end=END, default=5)
    free, limited = SamplingParams(), SamplingParams(extra_args={"thinking_budget": 0})
    assert (by_request.applies(free), by_request.applies(limited), by_default.applies(free)) == (False, True, True)


def test_markers_need_a_tokenizer() -> None:
    with pytest.raises(
        ConfigError, match="logits_processor_options.thinking_budget.start is a text, and this model has no"
    ):
        tokens_of(None, "start", "<think>")
    assert ThinkingBudgetConfig().end == "</think>"


# --- in an engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab_size=128)


@pytest.fixture
def engines() -> Iterator[list[LLM]]:
    made: list[LLM] = []
    yield made
    for engine in made:
        engine.close()


def test_the_same_tokens_with_any_draft(model: Path, engines: list[LLM]) -> None:
    """The end is forced inside drafts too, and other requests of the batch are left alone."""

    def run(**settings: Any) -> list[list[int]]:
        engine = LLM(
            str(model),
            dtype="float32",
            max_model_len=128,
            kv_cache_memory="4MiB",
            stat_loggers=(),
            proposer_time_budget=0,
            logits_processors=["thinking_budget"],
            logits_processor_options={"thinking_budget": {"start": "(", "end": "[so]"}},
            **settings,
        )
        engines.append(engine)
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    params = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, extra_args=extra)
        for extra in ({"thinking_budget": 6}, {}, {"thinking_budget": 2})
    ]
    plain = run()
    end = engines[0].get_tokenizer().encode("[so]")
    assert plain[0][6:10] == end
    assert plain[1][6:10] != end
    tokenizer = engines[0].get_tokenizer()
    runs = [[*tokenizer.encode(p), *t] for p, t in zip(PROMPTS, plain, strict=True)]
    assert run(**use_proposer(RandomProposer(128, trees=True))) == plain
    assert run(**use_proposer(OracleProposer(runs, vocab_size=128, right=2))) == plain
    right = run(**use_proposer(OracleProposer(runs, vocab_size=128)))
    assert right == plain
    stats = engines[-1].stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_options_are_checked(model: Path) -> None:
    with pytest.raises(ConfigError, match="logits_processor_options.thinking_budget.strat.*Did you mean 'start'"):
        LLM(
            str(model),
            logits_processors=["thinking_budget"],
            logits_processor_options={"thinking_budget": {"strat": "("}},
            stat_loggers=(),
        )
    with pytest.raises(
        ConfigError, match="logits_processor_options has a table 'thinking_budget', but logits_processors"
    ):
        LLM(str(model), logits_processor_options={"thinking_budget": {}}, stat_loggers=())
