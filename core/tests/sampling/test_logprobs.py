"""Log-probabilities, ranks and alternatives against a computation by hand; where they go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, field

from specdec.sampling import logprobs
from specdec.sampling.logprobs import Logprob, LogprobsComputer, as_dicts, row_logprobs
from specdec.sampling.params import SamplingParams


@define(eq=False)
class FakeRequest:
    params: SamplingParams
    logprobs: list[dict[int, Logprob]] | None = field(factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(factory=lambda: [None])


class Letters:
    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + t) for t in token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_ranks_and_alternatives(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows, tokens = torch.tensor([4, 0, 0, 5]), torch.tensor([3, 39, 7, 0])
    found = row_logprobs(logits, rows, tokens, 5)
    law = logits.double().log_softmax(dim=-1)[rows]
    torch.testing.assert_close(found.logprobs.double(), law.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
    for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        assert found.ranks[i] == (logits[row] > logits[row, token]).sum() + 1
        order = sorted(range(40), key=lambda t: (-float(logits[row, t]), t))
        assert found.top_token_ids[i].tolist() == order[:5]
        torch.testing.assert_close(found.top_logprobs[i].double(), law[i][order[:5]], atol=1e-5, rtol=0)


def test_ties_are_ordered_by_token_id() -> None:
    """So that in greedy decoding the first alternative is the chosen token, also among equals."""
    logits = torch.zeros(1, 30)
    logits[0, [20, 12]] = 1.0
    found = row_logprobs(logits, torch.tensor([0]), torch.tensor([12]), 4)
    assert found.top_token_ids.tolist() == [[12, 20, 0, 1]]
    assert found.ranks.tolist() == [1]


def test_rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 20)
    arguments = (logits, torch.arange(9), torch.arange(9), 3, torch.linspace(0.5, 2, 9))
    whole = row_logprobs(*arguments)
    monkeypatch.setattr(logprobs, "_CHUNK_BYTES", 4 * 20 * 2)
    parts = row_logprobs(*arguments)
    assert torch.equal(whole.top_logprobs, parts.top_logprobs)
    assert torch.equal(whole.logprobs, parts.logprobs)


def test_dictionaries_start_with_the_chosen_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(4, -1)
    rows = row_logprobs(logits, torch.arange(4), torch.tensor([1, 3, 0, 2]), 2)
    dicts = as_dicts(rows, [2, 2, 0, -1], lambda t: "abcd"[t])
    assert [list(d) for d in dicts] == [[1, 2], [3, 1, 2], [0], [2, 1]]
    assert [e.rank for e in dicts[1].values()] == [3, 1, 2]
    assert dicts[1][3].decoded_token == "d"
    assert as_dicts(rows, [2, 2, 0, 1])[0][1].decoded_token is None


def test_the_whole_vocabulary() -> None:
    logits = torch.randn(2, 2000)
    rows = row_logprobs(logits, torch.arange(2), torch.tensor([5, 6]), -1)
    dicts = as_dicts(rows, [-1, 3])
    assert len(dicts[0]) == 2000
    assert sum(np.exp(e.logprob) for e in dicts[0].values()) == pytest.approx(1, abs=1e-4)
    assert len(dicts[1]) in (3, 4)


def test_output_goes_to_the_requests() -> None:
    raw = torch.randn(5, 26)
    requests = [FakeRequest(SamplingParams(logprobs=2)), FakeRequest(SamplingParams(logprobs=0))]
    computer = LogprobsComputer("raw", Letters())
    computer.add_output([(requests[0], 2), (requests[1], 1)], raw, raw * 9, np.array([0, 1, 4]), np.array([3, 4, 5]))
    computer.add_output([(requests[1], 1)], raw, raw * 9, np.array([2]), np.array([6]))
    law = raw.log_softmax(dim=-1)
    first, second = requests[0].logprobs, requests[1].logprobs
    assert first is not None
    assert second is not None
    assert [next(iter(d)) for d in first] == [3, 4]
    assert [list(d) for d in second] == [[5], [6]]
    assert second[0][5].logprob == pytest.approx(float(law[4, 5]), abs=1e-5)
    assert second[0][5].decoded_token == "f"
    assert requests[0].cumulative_logprob == pytest.approx(float(law[0, 3] + law[1, 4]), abs=1e-5)


def test_processed_mode_divides_by_the_temperature_except_at_zero() -> None:
    raw = torch.randn(2, 26)
    requests = [FakeRequest(SamplingParams(logprobs=1, temperature=t)) for t in (0.5, 0.0)]
    computer = LogprobsComputer("processed")
    processed = raw + torch.arange(26)
    computer.add_output([(r, 1) for r in requests], raw, processed, np.arange(2), np.array([3, 4]))
    expected = [(processed[0] / 0.5).log_softmax(0)[3], processed[1].log_softmax(0)[4]]
    assert [r.cumulative_logprob for r in requests] == pytest.approx([float(e) for e in expected], abs=1e-5)


def test_masked_tokens_have_no_probability() -> None:
    processed = torch.tensor([[0.0, -torch.inf, 1.0]])
    request: Any = FakeRequest(SamplingParams(logprobs=3))
    LogprobsComputer("processed").add_output([(request, 1)], processed, processed, np.array([0]), np.array([2]))
    assert request.logprobs[0][1].logprob == -np.inf


def test_prompt_logprobs_are_raw_and_in_order() -> None:
    raw = torch.randn(7, 26)
    request: Any = FakeRequest(SamplingParams(prompt_logprobs=1))
    computer = LogprobsComputer("processed", Letters())
    prompt = np.array([9, 4, 5, 6, 1])
    computer.add_prompt(request, raw, 1, prompt[1:4])
    computer.add_prompt(request, raw, 6, prompt[4:5])
    law = raw.log_softmax(dim=-1)
    assert request.prompt_logprobs[0] is None
    assert [next(iter(d)) for d in request.prompt_logprobs[1:]] == [4, 5, 6, 1]
    values = [d[t].logprob for d, t in zip(request.prompt_logprobs[1:], prompt[1:].tolist(), strict=True)]
    assert values == pytest.approx([float(law[r, t]) for r, t in ((1, 4), (2, 5), (3, 6), (6, 1))], abs=1e-5)
