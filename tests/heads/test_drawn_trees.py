"""Trees whose nodes a head draws from its law, verified by recursive rejection: the text has the target's law."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LLM, SamplingParams
from specdec.drafting.sampling import DraftSampler
from specdec.testing import tiny_model
from specdec.testing.heads import tiny_head
from specdec.testing.laws import deviations
from specdec.testing.models import load_module
from tests.heads.test_lossless import METHODS

FEW, LENGTH = 8, 3
"""A vocabulary whose texts can be counted, and how much is looked at of texts that are long enough for whole trees."""
PROMPT = [3, 1, 4, 1, 2]
TREE = "[(0,),(1,),(2,),(0,0),(0,1),(1,0)]"

Start = Callable[..., LLM]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny target with few tokens."""
    path = tmp_path_factory.mktemp("drawn") / "llama"
    return str(tiny_model("llama", path, vocab_size=FEW, eos_token_id=None, num_hidden_layers=4, hidden_size=32))


@pytest.fixture(scope="module")
def law(small: str) -> Tensor:
    """float64 [FEW] * LENGTH: the target's law of the texts behind the prompt."""
    module = load_module(small)
    texts = torch.cartesian_prod(*[torch.arange(FEW)] * LENGTH)
    with torch.inference_mode():
        ids = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], dim=1)
        rows = module(input_ids=ids).logits[:, len(PROMPT) - 1 : -1].double().log_softmax(dim=-1)
    return rows.gather(2, texts[..., None]).sum(dim=(1, 2)).exp().view([FEW] * LENGTH)


def texts(start: Start, small: str, head: Path, method: str, count: int) -> tuple[Tensor, Any]:
    """Sampled texts, int64 [count, LENGTH], and the engine's statistics."""
    options = {"speculative_token_tree": TREE, "draft_sample_method": "probabilistic", "num_speculative_tokens": 6}
    engine = start(
        {"method": method, "model": str(head), **options},
        target=small,
        verifier="rejection",
        verifier_options={"tree_rule": "recursive"},
        max_num_seqs=128,
    )
    params = [SamplingParams(seed=seed, max_tokens=LENGTH + 4, ignore_eos=True) for seed in range(count)]
    outputs = engine.generate([PROMPT] * count, params, use_tqdm=False)
    return torch.tensor([output.outputs[0].token_ids[:LENGTH] for output in outputs]), engine.stats()


@pytest.mark.parametrize("method", [*METHODS[:1], *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS[1:])])
def test_the_text_has_the_targets_law(start: Start, small: str, law: Tensor, tmp_path: Path, method: str) -> None:
    head = tiny_head(method, small, tmp_path / "head")
    found, stats = texts(start, small, head, method, 2500)
    assert deviations(found, law) == []
    assert stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_laws_that_are_reported_wrongly_are_found(
    start: Start, small: str, law: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every child reported as if it had been drawn before its siblings."""
    original = DraftSampler.choose_children

    def alone(self: DraftSampler, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        tokens, laws = original(self, *arguments, **named)
        assert laws is not None
        return tokens, laws[:, :1].expand_as(laws)

    monkeypatch.setattr(DraftSampler, "choose_children", alone)
    found, _ = texts(start, small, tiny_head(METHODS[0], small, tmp_path / "head"), METHODS[0], 2500)
    assert deviations(found, law) != []
