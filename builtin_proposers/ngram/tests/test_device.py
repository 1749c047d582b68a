"""The form on the device gives the drafts of `ngram`, in shapes that do not depend on the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafting import Proposer
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec.testing.reference import ngram_reference
from specdec.testing.strategies import growing_texts, lookup_windows
from specdec.types import Draft, ProposalInput
from specdec_ngram.config import NgramConfig
from specdec_ngram.device import NgramDeviceProposer, look_up
from specdec_ngram.device_plugin import propose

torch.set_num_threads(1)


def make(shortest: int, longest: int, k: int = 4, max_num_seqs: int = 8, device: str = "cpu") -> NgramDeviceProposer:
    return NgramDeviceProposer(
        prompt_lookup_min=shortest,
        prompt_lookup_max=longest,
        num_speculative_tokens=k,
        max_num_seqs=max_num_seqs,
        max_model_len=160,
        device=device,
    )


def ask(proposer: Proposer, texts: dict[str, np.ndarray], limits: Sequence[int]) -> Draft:
    return proposer.propose(
        ProposalInput(
            request_ids=tuple(texts),
            token_ids=tuple(texts.values()),
            max_draft_tokens=np.array(limits, dtype=np.int32),
        )
    )


class TestContract(ProposerContract):
    plugin = "specdec_ngram.device_plugin"
    distribution = "specdec-ngram"

    @pytest.fixture
    def proposer(self) -> Proposer:
        config = NgramConfig(prompt_lookup_min=1, prompt_lookup_max=4)
        return propose(config, engine_context(num_speculative_tokens=self.num_speculative_tokens))


@settings(deadline=None, max_examples=150)
@given(st.lists(growing_texts(4), min_size=1, max_size=4), lookup_windows(), st.integers(1, 6), st.data())
def test_equals_reference(
    shown: list[tuple[np.ndarray, list[int]]], window: tuple[int, int], k: int, data: st.DataObject
) -> None:
    """Texts that grow side by side get the same drafts as from `ngram`, at every step, with any limit."""
    proposer = make(*window, k)
    for step in range(max(len(lengths) for _, lengths in shown)):
        now = {f"r{i}": text[: lengths[step]] for i, (text, lengths) in enumerate(shown) if step < len(lengths)}
        limits = [data.draw(st.integers(0, k)) for _ in now]
        got = ask(proposer, now, limits)
        rows = got.token_ids.split(got.num_draft_tokens.tolist())
        for text, limit, row in zip(now.values(), limits, rows, strict=True):
            assert row.tolist() == ngram_reference(text.tolist(), *window, limit)


def test_more_requests_than_rows() -> None:
    """Requests that lost their row to others (they were preempted) are sent again."""
    rng = np.random.default_rng(0)
    proposer = make(1, 3, max_num_seqs=3)
    texts = {f"r{i}": rng.integers(0, 4, 150) for i in range(7)}
    for length in range(20, 150, 7):
        names = rng.choice(list(texts), 3, replace=False)
        got = ask(proposer, {name: texts[name][:length] for name in names}, [4] * 3)
        rows = got.token_ids.split(got.num_draft_tokens.tolist())
        for name, row in zip(names, rows, strict=True):
            assert row.tolist() == ngram_reference(texts[name][:length].tolist(), 1, 3, 4)


def test_only_new_tokens_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sends what came since the last one, not the texts."""
    proposer = make(1, 3)
    text = np.arange(100) % 7
    ask(proposer, {"a": text[:90]}, [4])
    sizes = []
    to_device = proposer._to_device
    monkeypatch.setattr(proposer, "_to_device", lambda array: sizes.append(array.size) or to_device(array))
    ask(proposer, {"a": text[:93]}, [4])
    assert max(sizes) == 3


def test_compiles_whole() -> None:
    """No step of the lookup depends on a value: it is one graph, and the graph of one step serves the next."""
    compiled = torch.compile(look_up, fullgraph=True, backend="aot_eager", dynamic=False)
    rng = np.random.default_rng(1)
    for _ in range(4):
        tokens = torch.from_numpy(rng.integers(0, 3, (5, 64))).int()
        lengths = torch.from_numpy(rng.integers(0, 65, 5))
        limits = torch.from_numpy(rng.integers(0, 5, 5))
        with torch.compiler.set_stance("default" if _ == 0 else "fail_on_recompile"):
            drafts, counts = compiled(tokens, lengths, limits, shortest=1, longest=3, k=4)
        for row in range(5):
            text = tokens[row, : lengths[row]].tolist()
            want = ngram_reference(text, 1, 3, int(limits[row]))
            assert drafts[row].tolist() == want + [-1] * (4 - len(want))
            assert counts[row] == len(want)


@pytest.mark.gpu
def test_lookup_does_not_wait_for_the_device() -> None:
    """On a GPU nothing in `look_up` synchronises, and a captured graph gives the drafts of later tokens."""
    rng = np.random.default_rng(2)
    tokens = torch.from_numpy(rng.integers(0, 3, (5, 64))).int().cuda()
    lengths = torch.full((5,), 60, device="cuda")
    limits = torch.full((5,), 4, device="cuda")
    look_up(tokens, lengths, limits, shortest=1, longest=3, k=4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        look_up(tokens, lengths, limits, shortest=1, longest=3, k=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts, _ = look_up(tokens, lengths, limits, shortest=1, longest=3, k=4)
    tokens.copy_(torch.from_numpy(rng.integers(0, 3, (5, 64))).int())
    graph.replay()
    for row in range(5):
        want = ngram_reference(tokens[row, :60].tolist(), 1, 3, 4)
        assert drafts[row].tolist() == want + [-1] * (4 - len(want))
