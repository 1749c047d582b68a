"""What a verifier returns is checked before it becomes text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.errors import EngineDeadError, PluginContractError
from specdec.runner.verdict_check import check_form, check_runs
from specdec.testing import tiny_model
from specdec.types import Verdict
from specdec.verify.match import MatchVerifier

RUNS, COUNTS, DRAFTED = [[3, 4, -1], [5, -1, -1]], [2, 1], [2, 0]


def test_right_verdicts_pass() -> None:
    check_form(Verdict(token_ids=torch.tensor(RUNS), num_tokens=torch.tensor(COUNTS, dtype=torch.int32)), "verifier")
    check_runs(RUNS, COUNTS, DRAFTED, 6, "verifier")
    check_runs([[3, -2]], [2], [1], 6, "verifier")  # a code in place of a token


@pytest.mark.parametrize(
    ("runs", "counts", "drafted", "told"),
    [
        (RUNS, [2, 2], DRAFTED, "gave 2 tokens, in a row of 3, for a draft of 0"),
        (RUNS, [0, 1], DRAFTED, "gave 0 tokens"),
        ([[3], [5]], [2, 1], DRAFTED, "gave 2 tokens, in a row of 1, for a draft of 2"),
        (RUNS, COUNTS, [2], "decided on 2 rows of token_ids and 2 num_tokens for 1 requests"),
        ([[3, 6, -1], [5, -1, -1]], COUNTS, DRAFTED, "gave the token 6, outside the vocabulary of 6"),
    ],
)
def test_wrong_runs_name_the_verifier(runs: Any, counts: Any, drafted: Any, told: str) -> None:
    with pytest.raises(PluginContractError, match=f"the verifier 'toy' of toy 1.0 {told}"):
        check_runs(runs, counts, drafted, 6, "verifier 'toy' of toy 1.0")


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (None, r"verify\(\) of the verifier 'toy' returned NoneType, no specdec.types.Verdict"),
        (
            Verdict(token_ids=torch.zeros(2, 3), num_tokens=torch.ones(2, dtype=torch.int32)),
            r"token_ids of the verdict of the verifier 'toy' must be a 2-dimensional integer tensor, not torch.float32",
        ),
        (
            Verdict(token_ids=torch.zeros(2, 3, dtype=torch.int64), num_tokens=[1, 1]),  # type: ignore[arg-type]
            "num_tokens of the verdict of the verifier 'toy' must be a 1-dimensional integer tensor, not list",
        ),
    ],
)
def test_what_is_no_verdict_is_refused(verdict: Any, told: str) -> None:
    with pytest.raises(PluginContractError, match=told):
        check_form(verdict, "verifier 'toy'")


def test_an_engine_stops_before_a_wrong_verdict_becomes_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(self: Any, rows: Any, draft: Any, sampling: Any) -> Verdict:
        ones = torch.ones(rows.num_requests, 4, dtype=torch.int64)
        return Verdict(token_ids=ones, num_tokens=ones.sum(dim=1).int())

    monkeypatch.setattr(MatchVerifier, "verify", verify)
    path = tiny_model("llama", tmp_path / "m")
    with LLM(str(path), max_model_len=64, kv_cache_memory="1MiB", stat_loggers=()) as llm:
        with pytest.raises(EngineDeadError, match=r"the verifier 'match' of specdec-core .* gave 4 tokens") as caught:
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert isinstance(caught.value.__cause__, PluginContractError)
